"""When groups of warps own rows (`row_roles`), and in which tiles: the default on Hopper.

The form pays where the matrix unit is what a kernel waits for: many rows meet a long stream. A thread block has two
groups or three, one ring, and a multiprocessor to itself, so there must be enough blocks of rows to fill the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tilefold.algebra.expr import Call, Const, Expr, Index, Load, Size, dims_used, loads, ops_used
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.parts import LEAST_PIECE, ROWS, STREAMED, offset, page_of, piece
from tilefold.backends.triton.row_planes import COPIED, copied
from tilefold.backends.triton.row_room import REGISTERS, Form, longest, of_several, one_of_each, widest
from tilefold.backends.triton.row_shares import CACHED, DRAWING, unevenness
from tilefold.backends.triton.tiles import FULL, Shape
from tilefold.block.ir import Accumulate, Block, Let, Loop, exprs_of, walk
from tilefold.plan.hardware import H100
from tilefold.plan.pace import Scores, owned_seconds
from tilefold.tile.layout import UnitAxes
from tilefold.tile.pieces import power_of_two

#: Dims that the operands of a product keep, and those that it reduces.
Product = tuple[frozenset[str], frozenset[str]]
#: Groups and streamed indices a tile, of one product that lifts and one state where both ends of the stream follow the
#: rows and are so near (a window) that most tiles have masks. Others have the form that fits (`row_room.widest`).
ENDS, MASKED = ((64, 32), (2,)), 1024
#: Columns of the states, most of them: groups, streamed indices a tile, stages of the ring, where several products
#: lift, or add to states: each has results, or a state, in registers. Wider ones have what fits. Up to `NARROW` columns
#: the usual form is faster, as a multiprocessor then has several thread blocks.
SEVERAL, NARROW = ((64, 2, 64, 4), (128, 2, 64, 3)), 64
#: The same where a tile draws random numbers, whose counters take registers: with one product that lifts and one state,
#: and with several states (longer tiles spill in the loop).
DRAWN, DRAWN_STATES = ((64, 3, 64, 4), (128, 2, 64, 3), (256, 2, 64, 2)), ((64, 2, 64, 4), (128, 2, 32, 4))
#: Of the multiprocessors, the part that has a thread block.
BUSY = 0.5
#: Most indices of what is summed beside the stream: held whole.
BESIDE = 256


def owning_rows(
    b: Block, sizes: Mapping[str, int], usual: TritonConfig, unit: UnitAxes | None = None, *, every: bool = False
) -> TritonConfig:
    """The configuration for groups of warps that own rows; the usual one where they would gain nothing.

    sizes: extents of all dims. unit: axes of stride 1, the last where not said. What is read for each row and streamed
    index (a bias) must be what copies bring (`row_planes`), for pointers the scheme does not hide; what a lift
    multiplies and is computed was not measured either. every: also where the usual form is faster as a rule.
    """
    s = Shape.of(b)
    sizes = s.seen(sizes)
    streams = [d for d in s.streamed if any(d in m | n for m, n, _ in s.products)]
    beside = [d for d in s.streamed if d not in streams]
    if len(streams) != 1 or s.exact or s.segments or any(sizes[d] > BESIDE for d in beside):
        return usual
    (stream,) = streams
    lifts = [(m | n, k) for m, n, k in s.products if stream not in k and stream in m | n]
    merges = [(m | n, k) for m, n, k in s.products if k == {stream}]
    rows = [d for d in s.parallel if usual.tiles.get(d, 1) >= ROWS and usual.lanes.get(d, 1) <= usual.tiles[d]]
    if not lifts or not merges or len(rows) != 1 or usual.lanes:
        return usual
    alone = len(lifts) == len(merges) == 1
    if beside and alone:
        return usual
    (row,) = rows
    held = frozenset(d for _, k in lifts for d in k)
    found = _columns(s, row, stream, lifts, merges)
    if not all(_of_arguments(b, k) for _, k in lifts):
        return usual
    pages, planes = _pages(b, stream), _planes(b, row, stream, unit or {})
    if planes is None or ((pages or planes) and not alone):
        return usual
    if found is None or held & {*s.parallel}:
        return usual
    wide = max(power_of_two(sizes[d]) for d in (*found, *held))
    draws = any("random16" in ops_used(e) for n in walk(b.body) for e in exprs_of(n))
    blocks = math.prod(sizes[d] for d in s.parallel if d != row)
    if alone and not draws:
        width, columns = (math.prod(sizes[d] for d in dims) for dims in (held, found))
        narrow = _between(b, stream, row, sizes) <= MASKED
        lengths, counts = ENDS if narrow else (STREAMED, tuple(REGISTERS))
        of_planes = replace(one_of_each(width, columns), planes=planes)
        shape = widest(of_planes, [n for n in lengths if all(copied(n, p) for p in planes)], counts)
        if pages and shape is not None:  # groups as of whole streams: short tiles have room for more, and then spill
            shape = widest(one_of_each(width, columns), _of_pages(lengths, pages), (shape.groups,))
        last = _met_at(b, stream, row, sizes, sizes[row] - 1)
        scores = Scores(blocks, sizes[row], *_met(b, stream, row, sizes), max(width, columns), sum(planes), last)
        if not narrow and not every and not _pays(scores, usual.tiles[row], shape):
            return usual
    else:
        table = SEVERAL if not draws or (len(merges) == 1 and not alone) else DRAWN if alone else DRAWN_STATES
        shape = next((Form(*x) for most, *x in table if wide <= most), None)
        if shape is None and len(merges) == 1 and not alone:
            (column,) = found
            contracted = [(math.prod(sizes[d] for d in k), column in k) for _, k in lifts]
            shape = longest(of_several(contracted, sizes[column], draws=draws))
    if shape is None or (not alone and wide <= NARROW and not every):
        return usual
    groups, tile, stages = shape.groups, shape.tile, shape.stages
    if groups > 2 and any({row, *found} <= set(dims_used(ld)) for ld in _loads(b)):
        groups = 2  # what meets the states at the end (a gate) takes registers that three groups have not
    if groups > 2 and -(-sizes[row] // (ROWS * groups)) * blocks < FULL:
        groups = 2
    if -(-sizes[row] // (ROWS * groups)) * blocks < BUSY * FULL or sizes[stream] <= tile or sizes[row] <= ROWS:
        return usual
    tiles = {**usual.tiles, **{d: power_of_two(sizes[d]) for d in beside}, row: ROWS, stream: tile}
    even = not s.bounded or math.isfinite(_between(b, stream, row, sizes))
    if alone and not even:
        held_columns = sum(math.prod(sizes[d] for d in dims) for dims in (held, found))
        side = max(1, CACHED // (2 * held_columns * sizes[stream]))
        drawn = unevenness(_lengths(b, stream, row, sizes, ROWS * groups), blocks, side, FULL) > DRAWING
    else:
        drawn = not even or len(merges) > 1
    sums = bool(beside) or (every and not alone and _sums_rows(b, stream))
    return replace(usual, tiles=tiles, stages=stages, groups=groups, own="rows", draws=drawn, descriptors=sums)


def _pays(x: Scores, rows: int, shape: Form | None) -> bool:
    """Whether groups are estimated faster than the usual form (blocks of so many rows), of which a multiprocessor has
    several thread blocks: their blocks start late, and their tiles are fast, and as they have more rows they read the
    stream less often: what a score reads besides can have the caches busier than the matrix unit. Heads wider than was
    measured have groups."""
    groups, own = owned_seconds(x, H100.owning_paces, H100.cores), H100.usual_pace.seconds(x)
    if not x.planes or shape is None:
        return math.isinf(groups) or groups < own
    rate = min(H100.cache_reached * H100.last_cache.bandwidth, H100.cores * H100.near_rate)
    theirs, ours = x.served(ROWS * shape.groups, rate), x.served(rows, rate)
    return math.isinf(groups) or (max(groups, theirs), groups) < (max(own, ours), own)  # where both wait, the faster


def _met(b: Block, stream: str, row: str, sizes: Mapping[str, int]) -> tuple[float, bool]:
    """Indices of the stream that a row meets on average, and whether an end of the stream follows the rows."""
    for n in walk(b.body):
        if isinstance(n, Loop) and n.dim == stream:
            bounds = [e for e in (n.start, n.stop) if e is not None]
            lo = 0.0 if n.start is None else _middle(n.start, row, sizes)
            hi = float(sizes[stream]) if n.stop is None else _middle(n.stop, row, sizes)
            ends = any(row in dims_used(e) for e in bounds)
            if math.isfinite(lo) and math.isfinite(hi):
                return max(0.0, hi - max(lo, 0.0) - 2 * ROWS * ends), ends
    return float(sizes[stream]), False


def _met_at(b: Block, stream: str, row: str, sizes: Mapping[str, int], at: int) -> float:
    """Indices of the stream that the block with row `at` meets, to the end of its own."""
    met, ends = _met(b, stream, row, {**sizes, row: 2 * at + 1})
    return met + 2 * ROWS * ends


def _lengths(b: Block, stream: str, row: str, sizes: Mapping[str, int], step: int) -> list[float]:
    """Indices of the stream that each block of `step` rows meets, and a tile's for its start; longest first."""
    found = [_met_at(b, stream, row, sizes, at) + step for at in range(0, sizes[row], step)]
    return sorted(found, reverse=True)


def _sums_rows(b: Block, stream: str) -> bool:
    """Whether a sum that the stream has no part in is held whole, without a loop (the sums of dO O of few columns)."""
    sums = [n for n in walk(b.body) if isinstance(n, Let) and n.reducer == "sum"]
    return any(stream not in (*n.dims, *n.rdims) for n in sums)


def _between(b: Block, stream: str, row: str, sizes: Mapping[str, int]) -> float:
    """Indices that a block of rows meets where the stream's loop begins and ends where the rows say (a window): as many
    in each. Else infinite."""
    for n in walk(b.body):
        if isinstance(n, Loop) and n.dim == stream and n.start is not None and n.stop is not None:
            ends = [_middle(e, row, sizes) for e in (n.start, n.stop) if row in dims_used(e)]
            if len(ends) == 2 and all(map(math.isfinite, ends)):
                return ends[1] - ends[0]
    return math.inf


def _middle(e: Expr, row: str, sizes: Mapping[str, int]) -> float:
    """A bound of the stream for a block of rows in the middle; infinite where it is none of numbers, sizes and rows."""
    match e:
        case Const(value, _):
            return float(value)
        case Size(d) if d in sizes:
            return float(sizes[d])
        case Call("tile_start" | "tile_stop" as op, (Index(d),)) if d == row:
            return sizes[d] // 2 + (2 * ROWS if op == "tile_stop" else 0)
        case Call("add" | "sub" | "minimum" | "maximum" as op, (x, y)):
            a, c = _middle(x, row, sizes), _middle(y, row, sizes)
            return {"add": a + c, "sub": a - c, "minimum": min(a, c), "maximum": max(a, c)}[op]
    return math.inf


def _columns(
    s: Shape, row: str, stream: str, lifts: Sequence[Product], merges: Sequence[Product]
) -> frozenset[str] | None:
    """Dims of the states beside the row; None: a product does not have the form."""
    columns = [merged - {row} - {d for d in s.parallel if d != row} for merged, _ in merges]
    fits = all(row in lifted for lifted, _ in lifts) and all(row in merged for merged, _ in merges)
    if not fits or any(len(c) != 1 or stream in c for c in columns):
        return None
    return frozenset(d for c in columns for d in c)


def _loads(b: Block) -> Iterator[Load]:
    """Of arguments, by anything that the block computes."""
    inputs = {i.name for i in b.inputs}
    for n in walk(b.body):
        yield from (ld for e in exprs_of(n) for ld in loads(e) if ld.tensor in inputs)


def _planes(b: Block, row: str, stream: str, unit: UnitAxes) -> tuple[int, ...] | None:
    """Bytes of an element of each tensor that is read for each row and streamed index; None: copies do not bring it."""
    inputs, found = {i.name: i for i in b.inputs}, dict[Load, int]()
    for ld in _loads(b):
        if {row, stream} <= dims_used(ld):
            i, last = inputs[ld.tensor], len(ld.index) - 1
            along = [e for e in ld.index[:-1] if row in dims_used(e)]
            apart = not any(stream in dims_used(e) for e in ld.index[:-1]) and along == [Index(row)]
            if not apart or offset(ld.index[-1], stream) is None or unit.get(ld.tensor, last) != last:
                return None
            if i.dtype not in COPIED or not isinstance(b.sizes[stream], Const):
                return None
            found[ld] = i.dtype.nbytes
    return tuple(found.values())


def _gathered(b: Block) -> Iterator[Let]:
    """What holds elements of an argument as they are, found by a table."""
    inputs = {i.name for i in b.inputs}
    for n in walk(b.body):
        if isinstance(n, Let) and n.reducer is None and isinstance(n.expr, Load) and n.expr.tensor in inputs:
            yield n


def _pages(b: Block, stream: str) -> tuple[int, ...]:
    """Extents of the pages that the stream lies in."""
    index = (n.expr.index for n in _gathered(b) if isinstance(n.expr, Load))
    return tuple(p for x in index if (p := page_of([e for e in x if stream in dims_used(e)], stream)))


def _of_pages(lengths: Sequence[int], pages: Sequence[int]) -> list[int]:
    """Streamed indices a tile where the stream lies in pages: whole tiles a page, if those are not short; else several
    pages, or parts of some, a tile."""
    whole = [n for n in lengths if n >= ROWS and all(p % n == 0 for p in pages)]
    return whole or [n for n in lengths if n <= ROWS and all(piece(p, n) >= LEAST_PIECE for p in pages)]


def _of_arguments(b: Block, contracted: frozenset[str]) -> bool:
    """Whether products over these dims multiply arguments as they are."""
    inputs = {i.name for i in b.inputs} | {n.name for n in _gathered(b)}
    sums = [n for n in walk(b.body) if isinstance(n, Let | Accumulate) and frozenset(n.rdims) == contracted]
    return all({ld.tensor for ld in loads(n.expr)} <= inputs for n in sums)
