"""Default configurations: what a kernel runs with before, or without, tuning.

Rules, from what its statements do. Rows of matrix products: 128 a thread block where there are
enough to fill the machine, else fewer. Streamed dims of products: 64. Heads that share keys and
have too few rows each are packed into one tile. Everything else is sized by elements a thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, dims_used, loads
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.mislaid import for_mislaid
from tilefold.backends.triton.odd_rows import for_odd_rows
from tilefold.backends.triton.own_rows import for_rows
from tilefold.backends.triton.pairwise import for_pairs
from tilefold.backends.triton.product import BYTES
from tilefold.backends.triton.product_tiles import for_depth, with_products
from tilefold.backends.triton.short_sums import for_sums
from tilefold.backends.triton.tilings import (
    for_branches,
    for_centred,
    for_columns,
    for_crossing,
    for_ends,
    for_functions,
    for_operands,
    for_outer,
    for_parts,
    for_registers,
    for_values,
    for_windows,
)
from tilefold.backends.triton.traffic import Traffic, accesses
from tilefold.backends.triton.widths import cheapest, two_share
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Result, Store, exprs_of
from tilefold.block.ir import walk as nodes_of
from tilefold.block.pairs import ranged
from tilefold.plan.hardware import H100
from tilefold.tensor.ir import Input
from tilefold.tensor.product import divided, product
from tilefold.tile.layout import UnitAxes
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.pieces import (
    MATRIX_UNIT,
    MOST_STACKED,
    computed_along,
    is_plain_sum,
    largest_power,
    power_of_two,
    singled,
    stacked,
    summed,
)

#: Elements of the largest value of a kernel without products, a thread block.
AREA = 8192
#: Elements from which a contraction of float32 is padded to those of a matrix unit.
LEAST_EXACT = MATRIX_UNIT // 2
#: Longest axis that a thread block holds at once (elements).
HELD = 1 << 15
#: Thread blocks that fill once the GPU on which these rules were measured.
FULL = H100.cores
#: Fewer elements than this a warp are not worth one.
FEW = 64
#: Longer rows in twice as many lanes have two warps each (8192 x 1000 on an H200: 15.1 us, 16.4 in pairs of one warp).
MASKED = 512
#: A streamed dim is a vector, also where one index of it is left: nothing is selected from single elements.
LEAST_STREAMED = 2
#: Threads of a warp; most warps of a thread block that is one of few, and least elements of each thread there.
THREADS, MOST_WARPS, LEAST_EACH = 32, 16, 8
#: Neighbours along the last dim that are not torn apart: 32 bytes of float32.
LEAST_LAST = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What the rules look at.

    products: dims of the left operand alone, of the right alone, and reduced. common: kept dims that both
    operands of some product have (batches). shared: dims d that some
    operand is indexed with as d // c (heads that share keys), with the least c. areas: dims that the
    statements range over, without segments. segments: dims of which a block has one index. cut: dims that run over
    such a block's share, and by which of these. again: dims that several loops run over, one after the other. bounded:
    whether a loop's bounds follow the rows (causal masks, windows). narrow: all inputs are floats of 16 bits.
    read: dims of each element that is read from memory. dynamic: dims without a fixed extent. exact: products are of
    float32, which no matrix unit takes unrounded (the
    rules are those of `product.Products`). singles: short dims of which each index is a value of its own; that is asked
    where tiles are chosen (`with_singles`). whole: streamed dims that statements outside of their loops range over.
    """

    parallel: tuple[str, ...]
    streamed: tuple[str, ...]
    products: tuple[tuple[frozenset[str], frozenset[str], frozenset[str]], ...]
    common: frozenset[str]
    shared: Mapping[str, int]
    areas: tuple[frozenset[str], ...]
    reduces: bool
    segments: frozenset[str]
    cut: Mapping[str, frozenset[str]]
    again: frozenset[str]
    bounded: bool
    narrow: bool
    read: tuple[frozenset[str], ...]
    dynamic: frozenset[str]
    exact: bool
    singles: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()

    @staticmethod
    def of(b: Block) -> Shape:
        """Read a block program: once, though tiles, order and residency each ask for it."""
        return _shape_of(b.body, b.inputs, b.results, tuple(b.sizes.items()))

    def seen(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Extents as one thread block meets them: a segment's share of the axis that segments cut."""
        return {d: -(-n // math.prod(sizes[x] for x in self.cut[d])) if d in self.cut else n for d, n in sizes.items()}

    def held(self, tiles: Mapping[str, int]) -> int:
        """Elements that one step reads for these tiles (lanes of single indices: how many there are): they have
        registers all at once."""
        return sum(math.prod(tiles.get(d, 1) for d in dims) for dims in self.read)

    def area(self, tiles: Mapping[str, int]) -> int:
        """Elements of the largest statement for these tiles (extents for dims without a loop)."""
        return max((math.prod(tiles.get(d, 1) for d in dims) for dims in self.areas), default=1)


@lru_cache(maxsize=1 << 10)
def _shape_of(
    body: tuple[Node, ...],
    inputs: tuple[Input, ...],
    results: tuple[Result, ...],
    sizes: tuple[tuple[str, Expr], ...],
) -> Shape:
    """See `Shape.of`."""
    loops = [n for n in nodes_of(body) if isinstance(n, Loop)]
    products = []
    wide_inputs = {i.name for i in inputs if i.dtype is DType.F32}
    read = {i.dtype for i in inputs if i.dtype.is_float}
    halves = {DType.F16, DType.BF16}
    exact = not read & halves and (DType.F32 in read or not halves & {r.dtype for r in results})
    common: frozenset[str] = frozenset()
    of_bytes = {i.name for i in inputs if i.dtype in BYTES}
    wide = False
    ranges = [_area_of(n) for n in nodes_of(body) if not isinstance(n, Loop) and not _is_product(n)]
    for n in nodes_of(body):
        sides = _operands(n, dict(sizes), ranges)
        if sides is not None and isinstance(n, Let | Accumulate):
            left, right, k = *sides, frozenset(n.rdims)
            common |= (left & right) - k
            if k <= left & right:
                products.append((left - right, right - left, k))
                exact = exact or any(ld.tensor in wide_inputs for ld in loads(n.expr))
                wide = wide or any(ld.tensor not in of_bytes for ld in loads(n.expr))
    exact = exact and (wide or not products)
    known = {d: int(e.value) for d, e in sizes if isinstance(e, Const)}
    if exact:  # of a few coordinates, which are summed as they are
        products = [x for x in products if math.prod(known.get(d, MATRIX_UNIT) for d in x[2]) >= LEAST_EXACT]
    singles = frozenset(n.dim for n in loops if n.single)
    cut = {n.dim: found for n in loops if n.start is not None and (found := _bounds_dims(n) & singles)}
    streams = [n.dim for n in loops if n.kind == "for"]
    again = frozenset(d for d in streams if streams.count(d) > 1)
    parallel = tuple(n.dim for n in loops if n.kind == "forall" and n.dim not in singles)
    bounded = any(_bounds_dims(n) & set(parallel) for n in loops if n.kind == "for")
    shared: dict[str, int] = {}
    contracted = frozenset(d for _, _, k in products for d in k)
    given = {i.name for i in inputs}
    elements = {ld for n in nodes_of(body) for e in exprs_of(n) for ld in loads(e) if ld.tensor in given}
    areas: list[frozenset[str]] = []
    reduces = False
    for n in nodes_of(body):
        if isinstance(n, Loop):
            continue
        reduces = reduces or (isinstance(n, Let | Accumulate) and bool(n.rdims))
        own = n.dims if isinstance(n, Let | Init | Store) else ()
        areas.append(frozenset({*own, *(d for e in exprs_of(n) for d in dims_used(e))}) - singles)
        for e in exprs_of(n):
            beside = {x for ld in loads(e) if not contracted & dims_used(ld) for x in divided(ld)}
            of_operands = {x for ld in loads(e) if contracted & dims_used(ld) for x in divided(ld)}
            for d, c in divided(e):
                if (d, c) not in beside - of_operands:
                    shared[d] = min(c, shared.get(d, c))
    return Shape(
        parallel,
        tuple(dict.fromkeys(n.dim for n in loops if n.kind == "for")),
        tuple(products), common, shared, tuple(areas), reduces, singles, cut, again,
        bounded, all(i.dtype.is_float and i.dtype.nbytes == 2 for i in inputs),
        tuple(frozenset(dims_used(ld)) - singles for ld in elements),
        frozenset(d for d, e in sizes if not isinstance(e, Const)), exact, whole=_beyond_loops(body),
    )  # fmt: skip


def _beyond_loops(nodes: Sequence[Node], around: frozenset[str] = frozenset()) -> frozenset[str]:
    """Dims of loops that statements outside of these range over as well: a row of scores that loops sum, and others
    read, is held whole."""
    streamed = {n.dim for n in nodes_of(tuple(nodes)) if isinstance(n, Loop) and n.kind == "for"} - around
    found: set[str] = set()
    for n in nodes:
        if isinstance(n, Loop):
            found |= _beyond_loops(n.body, around | {n.dim})
        else:
            own = n.dims if isinstance(n, Let | Store) else ()
            found |= streamed & {*own, *(d for e in exprs_of(n) for d in dims_used(e))}
    return frozenset(found)


def _bounds_dims(n: Loop) -> frozenset[str]:
    return frozenset(d for e in (n.start, n.stop) if e is not None for d in dims_used(e))


def _is_product(n: Node) -> bool:
    """Whether a statement sums products of two loads."""
    if not isinstance(n, Let | Accumulate):
        return False
    p = product(n.reducer, n.expr, (), n.rdims)
    return p is not None and p.loads is not None and p.left != p.right


def _area_of(n: Node) -> frozenset[str]:
    """The dims that a statement's expressions range over."""
    return frozenset(d for e in exprs_of(n) for d in dims_used(e))


def _operands(
    n: Node, extents: Mapping[str, Expr], beside: Sequence[frozenset[str]]
) -> tuple[frozenset[str], frozenset[str]] | None:
    """Dims of the two operands, if the statement sums products of two loads that differ in their dims.

    Heads that share an operand are in one tile, in which that operand is one index.
    """
    if not isinstance(n, Let | Accumulate):
        return None
    p = product(n.reducer, n.expr, (), n.rdims)
    if p is None or p.loads is None or p.packed()[0] == p.packed()[1]:
        return None
    return None if is_plain_sum(n.expr, p.rdims, extents, beside) else p.packed()


def apart(b: Block) -> Callable[[str, str], bool]:
    """Whether two dims of a kernel with matrix products stay apart there, though they lie side by side in memory: those
    that are other parts of a product (a row, a column, what it sums over), and batches, of which tiles have one index.

    Rows that are joined, as the pixels of images, fill tiles; columns that are (channels in groups) are neighbours.
    """
    s = Shape.of(b)
    products = [(m, n, k) for m, n, k in s.products if m and n]

    def found(d: str, e: str) -> bool:
        other = any((d in side) != (e in side) for p in products for side in p)
        return bool(products) and (other or d in s.common)

    return found


def default_config(
    b: Block, sizes: Mapping[str, int], unit: UnitAxes | None = None, *, tf32: bool = False
) -> TritonConfig:
    """A configuration for extents about as `sizes` (all dims; dynamic ones as at this call).

    unit: tensor -> axis of stride 1 (absent: the last). tf32: products of float32 may be rounded to what matrix units
    take.
    """
    s = Shape.of(b)
    s = replace(s, exact=s.exact and not tf32)
    over = ranged(b)
    sizes = {d: n for d, n in sizes.items() if d in over}
    s = with_singles(s, b, sizes)
    cut, sizes = sizes, s.seen(sizes)
    if any(m and n for m, n, _ in s.products):
        return for_depth(with_products(s, sizes), s, sizes)
    pairs = for_pairs(s, b, sizes)
    if pairs is not None and math.prod(-(-sizes[d] // pairs.tiles[d]) for d in s.parallel) >= FULL:
        return pairs
    rule = _without(s, sizes, shared=two_share(s, b))
    grid = tuple(d for d in s.parallel if d not in s.segments)
    at_least = {d: 1 if d in s.segments else max(1, n) for d, n in sizes.items()}
    traffic = Traffic(accesses(b, unit or {}), grid, at_least, math.prod(cut[d] for d in s.segments))
    local = held_lanes(s, sizes)
    if any(k - frozenset(s.streamed) for _, _, k in s.products):
        return for_sums(for_registers(rule, s, b, local), s, b, traffic, local)
    found = for_windows(cheapest(s, rule, b, traffic, local), s, b, traffic, local)
    found = for_functions(for_columns(for_parts(found, s, b, traffic, local), s, b, traffic, local), s, b, local)
    found = for_operands(found, s, b, local)
    found = for_branches(for_outer(found, s, b, traffic, local), s, b, traffic, local)
    found = for_centred(for_crossing(found, s, b, local, sizes), s, b, local)
    found = for_ends(found, s, local, sizes)
    found = for_odd_rows(for_rows(found, s, b, local, unit or {}), s, b, local, unit or {}, sizes)
    found = for_registers(found, s, b, local)
    found = for_mislaid(for_sums(for_values(found, s, b, local), s, b, traffic, local), s, traffic)
    if pairs is None:
        return found
    # too few blocks for every multiprocessor: nothing hides what each step of a long loop waits for
    return min(pairs, found, key=lambda c: traffic.seconds(c.tiles, c.warps, s.area({**local, **c.tiles})))


def _without(s: Shape, sizes: Mapping[str, int], *, shared: bool) -> TritonConfig:
    """Rows and streams by elements a thread block; a row that fits is held whole.

    A row that does not fit and is read twice has tiles as large as can be held: one thread block then fills a
    multiprocessor, so that the rows at work at one time (132 of 256 KB on an H100) stay in the second-level cache.
    Of 16-bit elements twice as many are on their way at a time, if no ragged end is left that would be held as float32.

    Turns that repair states wait for memory, then for warps, so that two thread blocks share a multiprocessor where
    their registers let them (`shared`), also where one would hold the row. On an H200, by tile: variances of 512 rows
    of 32,768 numbers 32,768 26.0 us, 16,384 23.3; moments of inertia of as many particles, of four numbers each, 8,192
    90, 4,096 74; cross-entropies of 4,096 rows of 32,000 numbers of 16 bits 32,768 115, 16,384 99; but with a second
    sum of exponentials (for a norm of their logarithm) 154 and 192.
    """
    local = held_lanes(s, sizes)
    singles = {d: sizes[d] for d in s.singles & sizes.keys()}
    tiles: dict[str, int] = {}
    whole_cut = _everything(s, sizes)
    inner = any(k - frozenset(s.streamed) for _, _, k in s.products)
    most = AREA if s.products else HELD
    for d in s.streamed:
        beside = {**_whole_beside(s, d, sizes), **local}
        with_d = max((math.prod(beside.get(x, 1) for x in dims) for dims in s.areas if d in dims), default=1)
        several = 2 if s.products and not inner else 1  # values for every index
        room, whole = max(1, most // with_d // several), power_of_two(sizes[d])
        area = AREA
        if d in s.again and not s.products:
            large = 2 * HELD
            whole_tiles = d not in s.dynamic and sizes[d] > large and sizes[d] % large == 0
            area = large if s.narrow and whole_tiles else HELD
        part = area // min(with_d, area) // several
        if whole_cut:
            whole = min(whole, part)
        tiles[d] = max(LEAST_STREAMED, whole if whole <= room else min(part, whole))
    at_once = AREA if whole_cut else HELD // 2 if shared else HELD
    for d in () if s.products else s.streamed:  # several tensors are read at every step, and not again
        while d not in s.again and tiles[d] > LEAST_STREAMED and s.held({**local, **singles, **tiles}) > at_once:
            tiles[d] //= 2
    area = _area(s, {**local, **tiles}, sizes)
    several = math.prod(power_of_two(sizes[d]) for d in s.singles) if s.reduces else 1  # loads of a row, one by one
    room = max(1, (AREA // 4 if s.reduces else AREA // 8) // area // max(1, several // 2))
    for d in reversed(s.parallel):
        tiles[d] = max(1, min(room, power_of_two(sizes[d])))
        room //= tiles[d]
    if s.parallel and s.dynamic.isdisjoint(s.parallel):
        _spread(s, sizes, tiles)
    area = _area(s, {**local, **tiles}, sizes)
    warps = 4 if area <= 4096 or s.products else 8 if area <= 8192 else 16 if area <= 16384 else 32
    have = math.prod(-(-sizes[d] // tiles[d]) for d in s.parallel)
    rows = any(n > 1 for n in local.values())
    if rows and s.narrow and s.reduces and not s.streamed and not s.products and have >= 8 * FULL:
        # few threads with much to do each; of long rows two blocks a multiprocessor, which take turns at the memory
        held = s.area({**dict.fromkeys(s.parallel, 1), **local})  # of one row, whatever its axes
        warps = 1 if held <= 4096 else 4 if held <= 16384 else 8
        if MASKED < max((sizes[d] for d in local), default=0) < 2 * MASKED:
            tiles, warps = {**tiles, **dict.fromkeys(s.parallel, 1)}, 2
    if inner:
        warps = 2
    elif whole_cut:
        blocks = max(1, math.prod(sizes[d] for d in s.segments) // FULL)
        each = LEAST_EACH if s.narrow else LEAST_EACH // 2  # a vector of each tensor, a few in all
        most_warps = max(
            area // (THREADS * LEAST_EACH), min(area // each, s.held({**local, **tiles}) // LEAST_EACH) // THREADS
        )
        most_warps = min(MOST_WARPS, largest_power(most_warps))
        warps = max(warps, min(most_warps, power_of_two(H100.threads // (THREADS * blocks))))
    warps = max(1, min(warps, area // FEW))
    # loads straight to registers: copies ahead of their use take no cache hints, and single elements badly
    return TritonConfig(tiles, {}, warps=warps, stages=3 if inner else 1 if s.streamed else 2)


def _everything(s: Shape, sizes: Mapping[str, int]) -> bool:
    """Whether a kernel reduces all there is in segments, reading it once: segments are its only thread blocks, so they
    have the threads of a multiprocessor among them, and each thread a few loads at a time."""
    once = bool(s.streamed) and not s.again and not s.products and s.cut.keys() >= set(s.streamed)
    return once and all(sizes[d] == 1 for d in s.parallel)


def _spread(s: Shape, sizes: Mapping[str, int], tiles: dict[str, int]) -> None:
    """Smaller tiles of parallel dims where they leave multiprocessors without a block: combining a few states."""
    least = {d: LEAST_LAST if d == s.parallel[-1] else 1 for d in s.parallel}
    while math.prod(-(-sizes[d] // tiles[d]) for d in s.parallel) < FULL:
        large = max(s.parallel, key=lambda d: tiles[d] // least[d])
        if tiles[large] <= least[large]:
            return
        tiles[large] //= 2


def _area(s: Shape, tiles: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Elements of the largest statement for these tiles, in any of the loops."""
    return max(s.area(tiles), *(s.area({**tiles, **_whole_beside(s, d, sizes)}) for d in s.streamed), 0)


def _whole_beside(s: Shape, d: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Lanes of dims that loops of their own run over, and that the loop over d has whole: sums of pairs over rows, and
    over columns, in one kernel."""
    return {x: power_of_two(n) for x, n in sizes.items() if x != d and x in s.streamed and x in s.whole}


def held_lanes(s: Shape, sizes: Mapping[str, int]) -> dict[str, int]:
    """Lanes of the dims that no loop runs over tile by tile."""
    held = (d for d in sizes if d not in s.parallel and d not in s.streamed)
    return {d: 1 if d in s.singles or d in s.segments else power_of_two(sizes[d]) for d in held}


def with_singles(s: Shape, b: Block, sizes: Mapping[str, int]) -> Shape:
    """`s` with the dims that kernels with these extents have as single indices (`tile.pieces`): of three coordinates
    one lane is held at a time, of images of 7 x 7 that are stored or summed whole all 64. What is stored for each of
    such indices is held until then: its values are a tile's, though they lie in registers of their own; what is stacked
    is stored one after the other."""
    held = (d for d in sizes if d not in s.parallel and d not in s.streamed)
    if not any(1 < sizes[d] <= MOST_STACKED for d in held):
        return s
    tiles = {n.dim: 1 if n.single else LEAST_STREAMED for n in nodes_of(b.body) if isinstance(n, Loop)}
    stored = {d for n in nodes_of(b.body) if isinstance(n, Store) for d in n.dims}
    kernel = summed(lower(b, LowerOptions(tiles=tiles, arranged=False)))
    found = singled(kernel) - (stored - computed_along(kernel, kernel.body) - stacked(kernel, kernel.body))
    return replace(s, singles=found & sizes.keys())  # a result may have a dim that nothing runs over (l * 2 + m)
