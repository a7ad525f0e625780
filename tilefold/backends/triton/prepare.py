"""A block program as the tile kernel that a GPU configuration describes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tilefold.algebra.expr import Call, Const, Expr, Index, dims_used, loads
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.gluon_text import INSTRUCTION
from tilefold.backends.triton.pairwise import in_threads
from tilefold.backends.triton.work import work
from tilefold.block.ir import Block, Loop, walk
from tilefold.block.pairs import ranged
from tilefold.tile.again import recomputed
from tilefold.tile.ir import For, Gemm, Kernel, Reduce, Select, Stmt
from tilefold.tile.lanes import MOST_STEPS, per_lane
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.pieces import MATRIX_UNIT, cut, lengths, power_of_two, product_dims, singles, summed
from tilefold.tile.reads_first import reads_first
from tilefold.tile.rows_first import rows_first, without_single_loops
from tilefold.tile.scaled_after import scaled_after
from tilefold.tile.stream import stream
from tilefold.tile.uses import expressions
from tilefold.tile.verify import verify

#: An operand is padded to at most this many columns; longer ones are always cut into pieces.
MOST_PADDED = 512
#: The same where groups of warps own rows, whose products are matrix instructions of at most as many columns.
OWNED = INSTRUCTION
#: A dim of a kernel without products is cut from so many indices on, if no more than so much of the lanes is left.
LONG, MOST_OF = 512, 0.9
#: The same where a loop computes so many units (`work`) for each of its indices and each of the dim, which it reduces:
#: idle lanes then cost more than another sum (512 x 160 x 160 sigmoids in 256 lanes 30 us on an H100, in loops of ours
#: and of others that leave none idle 11).
PAIRED, UNITS = 128, 8.0
#: Elements a thread, of so many bytes, above which they are kept as they are in memory.
MANY, NARROW = 32, 2
#: Threads of a warp.
THREADS = 32
#: Elements a thread of what is read in front of several reductions.
READ_FIRST = 48
#: Bytes that a thread loads at once.
AT_ONCE = 16
#: Elements a thread of the states of a loop that are kept per lane: as many are computed at a time for each of them.
#: Of a quantile loss's gradients, two sums of 200 x 200 pairs a row, 128 a thread spilled 38 KB (some 800 us on an H100
#: for what takes 100).
STATES = 32


def tile_kernel(
    block: Block, config: TritonConfig, unit: Mapping[str, int | None], bins: Mapping[str, int] | None = None
) -> Kernel:
    """Lowered with the configuration's tiles; long contractions streamed, odd extents in pieces, folds per lane.

    bins: dynamic dim -> most indices; one that no tile is shorter than is held whole, not streamed.
    """
    loops = dict.fromkeys(n.dim for n in walk(block.body) if isinstance(n, Loop))
    tiles = {d: config.tiles.get(d, 1) for d in loops}
    kernel = summed(lower(block, LowerOptions(unit=unit, tiles=tiles, arranged=False)))
    over = ranged(block)
    kernel = replace(kernel, sizes={d: e for d, e in kernel.sizes.items() if d in over})
    kernel = stream(kernel, {d: n for d, n in config.tiles.items() if d not in loops})
    if config.groups and config.own == "rows":
        kernel = without_single_loops(kernel)
    dims = product_dims(kernel)
    if dims:
        kernel = scaled_after(rows_first(kernel))
    if not dims:
        beside = {d for s in kernel.body if isinstance(s, For) for d in _beside(s)}
        kernel = cut(singles(kernel), [d for d in _wasteful(kernel) if d not in beside])
        if packed(kernel, config):
            kernel = recomputed(kernel, [d for d in kernel.sizes if d not in loops and _padded(kernel, d) >= LONG])
        kernel = per_lane(kernel, lambda s: lanes_of(kernel, s, config.warps, bins or {}))
        tiled = {t.dim: t.tile for t in kernel.grid}
        return verify(
            reads_first(kernel, lambda d: tiled.get(d) or _padded(kernel, d), READ_FIRST * THREADS * config.warps)
        )
    if not steady(kernel):
        most = OWNED if config.groups and config.own == "rows" else MOST_PADDED
        dims = tuple(d for d in dims if _padded(kernel, d) > most)
    return verify(cut(kernel, [d for d in dims if _padded(kernel, d) > MOST_PADDED or not _splinters(kernel, d)]))


def packed(kernel: Kernel, config: TritonConfig) -> bool:
    """Whether a thread block holds so many narrow elements a thread that it had better keep them as they are in memory.

    Their float32 values take twice the registers, and a multiprocessor then holds one block instead of two.
    """
    read = [t.dtype for t in kernel.tensors if t.role == "in"]
    narrow = all(d.is_float and d.nbytes == NARROW for d in read)
    held = max((_padded(kernel, d) for d in kernel.sizes if d not in {t.dim for t in kernel.grid}), default=0)
    straight = not any(isinstance(s, For | Gemm | Select) for s in kernel.body)
    return straight and narrow and held > MANY * THREADS * config.warps


def _wasteful(kernel: Kernel) -> tuple[str, ...]:
    """Long dims that vectors of a power of two would hold with many idle lanes: rows of 2560, 1536, 7168."""
    found, pairs = [], {d for s in kernel.body if isinstance(s, For) for d in _paired(s)}
    for d, e in kernel.sizes.items():
        n = int(e.value) if isinstance(e, Const) else 0
        if n >= (PAIRED if d in pairs else LONG) and sum(map(power_of_two, lengths(n))) <= MOST_OF * power_of_two(n):
            found.append(d)
    return tuple(found)


def _paired(s: For) -> Iterator[str]:
    """Dims that a loop reduces, for each of its indices, of what takes many units for each pair."""
    for x in s.body:
        if isinstance(x, Reduce) and len(x.rdims) == 1 and s.dim not in x.rdims:
            pair = {s.dim, *x.rdims}
            if work(x.expr, lambda dims, pair=pair: float(pair <= dims)) >= UNITS:  # type: ignore[misc]
                yield x.rdims[0]


def lanes_of(kernel: Kernel, s: For, warps: int, bins: Mapping[str, int]) -> int | None:
    """Lanes that the folds of a loop are kept in; None for a loop that is none, its tile covers the axis.

    As many as the threads of a row, times the elements that a thread loads at once where all loads are contiguous.
    """
    e = kernel.sizes[s.dim]
    size = int(e.value) if isinstance(e, Const) else bins.get(s.dim)
    if (size is not None and size <= s.tile) or s.tile & (s.tile - 1):
        return None
    tiles = {t.dim: t.tile for t in kernel.grid} | {d: _padded(kernel, d) for d in _beside(s)}
    if any(isinstance(x, Reduce) and _of_pairs(kernel, s, x, warps) for x in s.body):
        return None
    rows = math.prod(power_of_two(n) // _wide(kernel, s, d, n) for d, n in tiles.items())
    threads = max(1, THREADS * warps // rows)
    once, least = _at_once(kernel, s), s.tile // MOST_STEPS
    n = min(s.tile, max(threads * once, least))
    while n > max(once, least, 1) and n * _states(kernel, s) > STATES * THREADS * warps:
        n //= 2
    return n if n > 1 or _beside(s) else None


def _states(kernel: Kernel, s: For) -> int:
    """Elements of what a loop's reductions make in a thread block."""
    tiled = {t.dim: t.tile for t in kernel.grid}
    kept = [dims_used(x.expr) - {*x.rdims} for x in s.body if isinstance(x, Reduce) and s.dim in x.rdims]
    return sum(math.prod(tiled.get(d) or max(1, _padded(kernel, d)) for d in dims) for dims in kept)


def _of_pairs(kernel: Kernel, loop: For, s: Reduce, warps: int) -> bool:
    """Whether a statement of a loop reduces something of pairs of rows, of which each thread has its own."""
    tiled = {t.dim: t.tile for t in kernel.grid}
    out = {d: tiled.get(d) or _padded(kernel, d) for d in dims_used(s.expr) - {*s.rdims}}
    over = {d: loop.tile if d == loop.dim else _padded(kernel, d) for d in s.rdims}
    return in_threads(s.expr, over, out, warps)


def _beside(s: For) -> frozenset[str]:
    """Dims that a loop's reductions run over beside the loop's own."""
    rdims = (x.rdims for x in s.body if isinstance(x, Reduce | Gemm) and s.dim in x.rdims)
    return frozenset(d for dims in rdims for d in dims) - {s.dim}


def _at_once(kernel: Kernel, s: For, dim: str | None = None) -> int:
    """Elements along the loop (or along `dim`) that one load of a thread covers for every tensor it reads there."""
    tensors, d = {t.name: t for t in kernel.tensors}, dim or s.dim
    read = {ld for e in expressions(s.body) for ld in loads(e) if ld.tensor in tensors and {s.dim, d} <= dims_used(ld)}
    least = AT_ONCE
    for ld in read:
        t = tensors[ld.tensor]
        along = [axis for axis, e in enumerate(ld.index) if d in dims_used(e)]
        contiguous = along == [t.unit_axis] and _plain(ld.index[along[0]], d)
        least = min(least, AT_ONCE // t.dtype.nbytes if contiguous else 1)
    return least if read else 1


def _wide(kernel: Kernel, s: For, dim: str, tile: int) -> int:
    """Elements of a parallel dim that a thread has side by side, as it loads them."""
    return min(power_of_two(tile), _at_once(kernel, s, dim))


def _plain(e: Expr, d: str) -> bool:
    """Whether e is the index of d plus something that does not vary with it."""
    match e:
        case Index():
            return True
        case Call("add", (a, b)):
            return (_plain(a, d) and d not in dims_used(b)) or (_plain(b, d) and d not in dims_used(a))
        case Call("sub", (a, b)):
            return _plain(a, d) and d not in dims_used(b)
    return False


def steady(kernel: Kernel) -> bool:
    """Whether every loop runs over whole tiles, two or more, so that the compiler sees a loop and no tail.

    Products of pieces in straight-line code (loops of one iteration are unrolled) came out wrong on Hopper with
    Triton 3.6: 64 + 16 columns, 45 rows, 77 keys; in loops, and in the interpreter, the same code is right.
    """

    def ok(s: Stmt) -> bool:
        if not isinstance(s, For):
            return True
        e = kernel.sizes[s.dim]
        whole = isinstance(e, Const) and int(e.value) % s.tile == 0 and int(e.value) >= 2 * s.tile
        return whole and s.start is None and s.stop is None and all(map(ok, s.body))

    return all(map(ok, kernel.body)) and any(isinstance(s, For) for s in kernel.body)


def _splinters(kernel: Kernel, d: str) -> bool:
    """Whether the last piece of a product's dim is too short for a matrix unit (72 = 64 + 8): it would be multiplied
    element by element, out of registers that a thread does not have. Padding it all costs less."""
    e = kernel.sizes[d]
    return isinstance(e, Const) and power_of_two(lengths(int(e.value))[-1]) < MATRIX_UNIT


def _padded(kernel: Kernel, d: str) -> int:
    e = kernel.sizes[d]
    return power_of_two(int(e.value)) if isinstance(e, Const) else 0
