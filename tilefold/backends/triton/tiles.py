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
from tilefold.backends.triton.pairwise import for_pairs
from tilefold.backends.triton.product import BYTES
from tilefold.backends.triton.tilings import (
    cheapest,
    for_columns,
    for_crossing,
    for_depth,
    for_ends,
    for_functions,
    for_parts,
    for_windows,
)
from tilefold.backends.triton.traffic import Traffic, accesses
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Result, Store, exprs_of
from tilefold.block.ir import walk as nodes_of
from tilefold.block.pairs import ranged
from tilefold.plan.hardware import H100
from tilefold.tensor.ir import Input
from tilefold.tensor.product import divided, product
from tilefold.tile.layout import UnitAxes
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.pieces import MATRIX_UNIT, MOST_SINGLES, is_small, power_of_two, singled, summed

#: Elements of the largest value of a kernel without products, a thread block.
AREA = 8192
#: Longest axis that a thread block holds at once (elements).
HELD = 1 << 15
#: A contraction of more elements than this is streamed.
CONTRACTED = 256
#: Columns up to which a product's contraction is read in long steps; bytes of both operands and elements of the
#: contraction that a step has at most and at least; rows of a block where blocks are few.
STEPPED, STEP, CHUNK, LEAST_ROWS = 128, 1 << 15, 64, 32
#: Elements of an operand of a float32 product that a thread block of eight warps has in registers.
EXACT = 4096
#: Inside a streamed loop an operand is held up to so many elements of a contraction (576: latent attention).
HELD_CONTRACTED = 640
#: Sums that several products of a tile have in registers beside what eight warps compute of them: of twice as many,
#: scores and their gradient in tiles of 128 x 128, each thread spills 600 bytes, of four warps 2,900.
SUMS = 1 << 14
#: Groups of warps that share a state of more than 256 columns.
GROUPS = 2
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
    where tiles are chosen (`_with_singles`).
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

    @staticmethod
    def of(b: Block) -> Shape:
        """Read a block program: once, though tiles, order and residency each ask for it."""
        return _shape_of(b.body, b.inputs, b.results, tuple(b.sizes.items()))

    def seen(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Extents as one thread block meets them: a segment's share of the axis that segments cut."""
        return {d: -(-n // math.prod(sizes[x] for x in self.cut[d])) if d in self.cut else n for d, n in sizes.items()}

    def held(self, tiles: Mapping[str, int]) -> int:
        """Elements that one step reads for these tiles: they have registers all at once."""
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
    for n in nodes_of(body):
        sides = _operands(n, dict(sizes))
        if sides is not None and isinstance(n, Let | Accumulate):
            left, right, k = *sides, frozenset(n.rdims)
            common |= (left & right) - k
            if k <= left & right:
                products.append((left - right, right - left, k))
                exact = exact or any(ld.tensor in wide_inputs for ld in loads(n.expr))
                wide = wide or any(ld.tensor not in of_bytes for ld in loads(n.expr))
    exact = exact and (wide or not products)
    singles = frozenset(n.dim for n in loops if n.single)
    cut = {n.dim: found for n in loops if n.start is not None and (found := _bounds_dims(n) & singles)}
    streams = [n.dim for n in loops if n.kind == "for"]
    again = frozenset(d for d in streams if streams.count(d) > 1)
    parallel = tuple(n.dim for n in loops if n.kind == "forall" and n.dim not in singles)
    bounded = any(_bounds_dims(n) & set(parallel) for n in loops if n.kind == "for")
    shared: dict[str, int] = {}
    summed = frozenset(d for _, _, k in products for d in k)
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
            beside = {x for ld in loads(e) if not summed & dims_used(ld) for x in divided(ld)}
            of_operands = {x for ld in loads(e) if summed & dims_used(ld) for x in divided(ld)}
            for d, c in divided(e):
                if (d, c) not in beside - of_operands:
                    shared[d] = min(c, shared.get(d, c))
    return Shape(
        parallel,
        tuple(dict.fromkeys(n.dim for n in loops if n.kind == "for")),
        tuple(products), common, shared, tuple(areas), reduces, singles, cut, again,
        bounded, all(i.dtype.is_float and i.dtype.nbytes == 2 for i in inputs),
        tuple(frozenset(dims_used(ld)) - singles for ld in elements),
        frozenset(d for d, e in sizes if not isinstance(e, Const)), exact,
    )  # fmt: skip


def _bounds_dims(n: Loop) -> frozenset[str]:
    return frozenset(d for e in (n.start, n.stop) if e is not None for d in dims_used(e))


def _operands(n: Node, extents: Mapping[str, Expr]) -> tuple[frozenset[str], frozenset[str]] | None:
    """Dims of the two operands, if the statement sums products of two loads that differ in their dims.

    Heads that share an operand are in one tile, in which that operand is one index.
    """
    if not isinstance(n, Let | Accumulate):
        return None
    p = product(n.reducer, n.expr, (), n.rdims)
    if p is None or p.loads is None or p.packed()[0] == p.packed()[1] or is_small(n.expr, p.rdims, extents):
        return None
    return p.packed()


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
    s = _with_singles(s, b, sizes)
    cut, sizes = sizes, s.seen(sizes)
    if any(m and n for m, n, _ in s.products):
        return for_depth(_with_products(s, sizes), s, sizes, EXACT)
    pairs = for_pairs(s, b, sizes)
    if pairs is not None:
        return pairs
    rule = _without(s, sizes)
    if any(k - frozenset(s.streamed) for _, _, k in s.products):
        return rule
    grid = tuple(d for d in s.parallel if d not in s.segments)
    at_least = {d: 1 if d in s.segments else max(1, n) for d, n in sizes.items()}
    traffic = Traffic(accesses(b, unit or {}), grid, at_least, math.prod(cut[d] for d in s.segments))
    local = _held_lanes(s, sizes)
    found = for_windows(cheapest(s, rule, traffic, local), s, b, traffic, local)
    found = for_functions(for_columns(for_parts(found, s, b, traffic, local), s, b, traffic, local), s, b, local)
    return for_ends(for_crossing(found, s, b, local, sizes), s, local, sizes)


def _with_products(s: Shape, sizes: Mapping[str, int]) -> TritonConfig:
    tiles: dict[str, int] = {}
    lanes: dict[str, int] = {}
    sides = frozenset(d for m, n, _ in s.products for d in m | n)
    rows = [d for d in s.parallel if d in sides and d not in s.shared and d not in s.common]
    rows = [d for d in rows if not _beside(s, d, rows, sizes)]
    others = [d for d in s.parallel if d not in rows]
    tiles |= dict.fromkeys(others, 1)
    blocks = math.prod(sizes[d] for d in others)
    inside = {d for _, _, k in s.products for d in k if _held_whole(s, d)} - {*s.streamed}
    long = {d for d in inside if sizes[d] > HELD_CONTRACTED}
    chunks = {d for _, _, k in s.products for d in k if sizes[d] > CONTRACTED and not _held_whole(s, d)}
    held = {d for m, n, k in s.products for d in m | n | k} - {*s.parallel, *s.streamed, *long, *chunks}
    wide = max([sizes[d] for d in held] or [1])
    whole = math.prod(-(-sizes[d] // 128) for d in rows) * blocks
    parts = blocks * math.prod(sizes[d] for d in s.segments)
    for d in rows:
        # blocks of unequal length fill the machine better where they are many
        small = whole < FULL if len(rows) > 1 else s.bounded or wide <= 64 or whole < 3 * FULL
        most = 64 if wide > 256 or small else 128
        while wide > 256 and most > 16 and len(rows) == 1 and parts * -(-sizes[d] // most) < FULL * 3 // 4:
            most //= 2
        tiles[d] = max(16, min(most, power_of_two(sizes[d])))
    few = all(tiles[d] <= 16 and sizes[d] < 16 for d in rows)
    for d, c in s.shared.items():
        packed = max(n for n in range(1, min(c, 64) + 1) if c % n == 0)
        if d in tiles and few and packed > 1:
            tiles[d] = packed
            if (not rows and packed < MATRIX_UNIT) or packed & (packed - 1):
                lanes[d] = power_of_two(packed if rows else max(packed, MATRIX_UNIT))
    for d in rows:
        if sizes[d] < 16:
            lanes[d] = 16
            tiles[d] = min(tiles[d], power_of_two(sizes[d]))
    lanes |= _padded(s, sizes)
    for d in s.streamed:
        product = d in sides or any(d in k for _, _, k in s.products)
        tiles[d] = 64 if product else 1024
    tiles |= {d: 64 for d in sorted(chunks) if d not in tiles and wide > 1}
    tiles |= dict.fromkeys(sorted(long), 64)
    if s.exact:
        return _exact(s, TritonConfig(tiles, lanes), rows, sizes)
    whole_rows = not sides <= set(s.parallel) and chunks.issuperset(s.streamed)
    loaded = chunks.isdisjoint(sides)  # attention's second product contracts what its first makes
    if chunks and loaded and whole_rows and not s.segments and wide <= STEPPED:
        return _in_steps(TritonConfig(tiles, lanes), s, rows, sizes, chunks)
    big = max([tiles[d] for d in rows] or [16])
    if long and wide == 1:  # a matrix product, and what is reduced over its columns
        columns = {d: 128 for d in s.streamed if big >= 64}
        return TritonConfig({**tiles, **columns}, lanes, warps=8 if big >= 64 else 4, stages=3)
    if not rows and wide >= 256:  # a thread block holds all of a product: half the stream, or registers spill
        return TritonConfig({**tiles, **{d: min(tiles[d], 32) for d in s.streamed}}, lanes, warps=8, stages=3)
    if wide > 256:
        if big > 32:
            return TritonConfig(tiles, lanes, warps=8, stages=2, groups=GROUPS)
        return TritonConfig(tiles, lanes, stages=3)
    if big >= 128 and wide >= 128:
        return TritonConfig(tiles, lanes, warps=8, stages=2, descriptors=True)
    warps = 4
    sums = [m | n for m, n, _ in s.products if m | n <= set(rows) and not s.streamed]
    while sum(math.prod(tiles[d] for d in x) for x in sums) > SUMS:
        tiles[max(rows, key=lambda d: tiles[d])] //= 2
        warps = 8
    return TritonConfig(tiles, lanes, warps=warps, stages=3, descriptors=s.bounded and big >= 64 and wide >= 128)


def _in_steps(
    c: TritonConfig, s: Shape, rows: Sequence[str], sizes: Mapping[str, int], chunks: frozenset[str] | set[str]
) -> TritonConfig:
    """Few columns, all in one block, and a long contraction: each step costs a latency of the memory, shared by the
    loads that are under way, so that steps are long and several are ahead; and fewer rows a block where blocks are few.

    On an H200, [1024, 1024] times [1024, 8]: 6.1 us in tiles of 32 x 256, 27 of 64 x 64.
    """
    tiles = dict(c.tiles)
    blocks = math.prod(-(-sizes[d] // tiles.get(d, 1)) for d in s.parallel)
    if blocks < FULL * 3 // 4:
        tiles |= {d: min(tiles[d], LEAST_ROWS) for d in rows}
    held = {d: c.lanes.get(d, power_of_two(sizes[d])) for d in sizes if d not in s.parallel and d not in chunks}
    sides = [frozenset(side | k) for m, n, k in s.products for side in (m, n)]
    across = max(1, sum(math.prod({**tiles, **held}.get(d, 1) for d in side - chunks) for side in sides))
    for d in sorted(chunks):
        most = max(CHUNK, STEP // ((2 if s.narrow else 4) * across))
        tiles[d] = min(power_of_two(sizes[d]), 1 << (most.bit_length() - 1))
    return replace(c, tiles=tiles, warps=4, stages=4)


def _exact(s: Shape, c: TritonConfig, rows: Sequence[str], sizes: Mapping[str, int]) -> TritonConfig:
    """Small tiles, many threads: the operands of a product of float32 are in registers, all of what it contracts, and
    of each row all that a block has of it (ten places of eight columns).

    Of few rows in segments, which only read: longer steps, three of them ahead."""
    dims = {d for m, n, k in s.products for d in m | n | k}
    sums = {d for _, _, k in s.products for d in k if d not in s.streamed}
    chunked = {d for d in sums if d in c.tiles or (not s.streamed and sizes[d] > 2 * MATRIX_UNIT)}
    held = {d: c.lanes.get(d, power_of_two(sizes[d])) for d in dims - chunked - c.tiles.keys()}
    with_rows = [x for m, n, k in s.products for x in (m | k, n | k, m | n) if x & set(rows)]
    wide = max([*held.values(), *(math.prod(held.get(d, 1) for d in x) for x in with_rows)] or [1])
    most = max(MATRIX_UNIT, min(64, power_of_two(EXACT // wide)))
    tiles = {**c.tiles, **{d: min(c.tiles[d], most) for d in rows}}
    tiles |= {d: min(tiles[d], 32 if wide <= 128 else MATRIX_UNIT) for d in s.streamed}
    tiles |= dict.fromkeys(chunked, MATRIX_UNIT)
    few = any(math.prod(sizes[d] for d in side) <= MATRIX_UNIT for m, n, _ in s.products for side in (m, n))
    if few and s.segments and len(s.products) == 1 and s.cut.keys() >= set(s.streamed):
        return replace(c, tiles=tiles | dict.fromkeys(s.streamed, CHUNK), warps=4, stages=4)
    return replace(c, tiles=tiles, warps=8, stages=2)


def _beside(s: Shape, d: str, rows: Sequence[str], sizes: Mapping[str, int]) -> bool:
    """Whether every operand with d has rows enough along another dim: one that is not parallel, or is longer.

    Of equally long dims the last one counts as the longer one.
    """
    mine = [side for m, n, _ in s.products for side in (m, n) if d in side]

    def enough(x: str) -> bool:
        if x in rows:
            return (sizes[x], rows.index(x)) > (sizes[d], rows.index(d))
        return x not in s.parallel and sizes[x] >= MATRIX_UNIT

    return all(any(enough(x) for x in side - {d}) for side in mine)


def _padded(s: Shape, sizes: Mapping[str, int]) -> dict[str, int]:
    """Lanes that fill a matrix unit, of dims held whole that are the only ones of an operand's side: eight experts.

    Not of a few coordinates in float32, whose products are summed as they are.
    """
    found: dict[str, int] = {}
    for m, n, k in s.products:
        for side in (m, n, k) if m and n else ():
            if len(side) == 1 and not side & {*s.parallel, *s.streamed}:
                least = MATRIX_UNIT // 2 if s.exact and side == k else 2
                found |= {d: MATRIX_UNIT for d in side if least <= sizes[d] < MATRIX_UNIT}
    return found


def _held_whole(s: Shape, d: str) -> bool:
    """Whether the streamed loop's products contract d: then its operand stays in the block."""
    return any(d in k and (set(s.streamed) & (m | n)) for m, n, k in s.products)


def _without(s: Shape, sizes: Mapping[str, int]) -> TritonConfig:
    """Rows and streams by elements a thread block; a row that fits is held whole.

    A row that does not fit and is read twice has tiles as large as can be held: one thread block then fills a
    multiprocessor, so that the rows at work at one time (132 of 256 KB on an H100) stay in the second-level cache.
    Of 16-bit elements twice as many are on their way at a time, if no ragged end is left that would be held as float32.
    """
    local = _held_lanes(s, sizes)
    tiles: dict[str, int] = {}
    whole_cut = _everything(s, sizes)
    inner = any(k - frozenset(s.streamed) for _, _, k in s.products)
    most = AREA if s.products else HELD
    for d in s.streamed:
        with_d = max((math.prod(local.get(x, 1) for x in dims) for dims in s.areas if d in dims), default=1)
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
    at_once = AREA if whole_cut else HELD
    for d in () if s.products else s.streamed:  # several tensors are read at every step, and not again
        while d not in s.again and tiles[d] > LEAST_STREAMED and s.held({**local, **tiles}) > at_once:
            tiles[d] //= 2
    area = s.area({**local, **tiles})
    several = math.prod(power_of_two(sizes[d]) for d in s.singles) if s.reduces else 1  # loads of a row, one by one
    room = max(1, (AREA // 4 if s.reduces else AREA // 8) // area // max(1, several // 2))
    for d in reversed(s.parallel):
        tiles[d] = max(1, min(room, power_of_two(sizes[d])))
        room //= tiles[d]
    if s.parallel and s.dynamic.isdisjoint(s.parallel):
        _spread(s, sizes, tiles)
    area = s.area({**local, **tiles})
    warps = 4 if area <= 4096 or s.products else 8 if area <= 8192 else 16 if area <= 16384 else 32
    have = math.prod(-(-sizes[d] // tiles[d]) for d in s.parallel)
    rows = any(n > 1 for n in local.values())
    if rows and s.narrow and s.reduces and not s.streamed and not s.products and have >= 8 * FULL:
        # few threads with much to do each; of long rows two blocks a multiprocessor, which take turns at the memory
        held = max((sizes[d] for d in local), default=0)
        warps = 1 if held <= 4096 else 4 if held <= 16384 else 8
        if MASKED < held < 2 * MASKED:
            tiles, warps = {**tiles, **dict.fromkeys(s.parallel, 1)}, 2
    if inner:
        warps = 2
    elif whole_cut:
        blocks = max(1, math.prod(sizes[d] for d in s.segments) // FULL)
        each = LEAST_EACH if s.narrow else LEAST_EACH // 2  # a vector of each tensor, a few in all
        most_warps = max(
            area // (THREADS * LEAST_EACH), min(area // each, s.held({**local, **tiles}) // LEAST_EACH) // THREADS
        )
        most_warps = min(MOST_WARPS, 1 << max(1, most_warps).bit_length() - 1)
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


def _held_lanes(s: Shape, sizes: Mapping[str, int]) -> dict[str, int]:
    """Lanes of the dims that no loop runs over."""
    held = (d for d in sizes if d not in s.parallel and d not in s.streamed)
    return {d: 1 if d in s.singles else power_of_two(sizes[d]) for d in held}


def _with_singles(s: Shape, b: Block, sizes: Mapping[str, int]) -> Shape:
    """`s` with the dims that kernels with these extents have as single indices (`tile.pieces`): of three coordinates
    one lane is held at a time, of images of 7 x 7 that are stored or summed whole all 64. What is stored for each of
    such indices is held until then: its values are a tile's, though they lie in registers of their own."""
    held = (d for d in sizes if d not in s.parallel and d not in s.streamed)
    if not any(sizes[d] <= MOST_SINGLES and sizes[d] & (sizes[d] - 1) for d in held):
        return s
    tiles = {n.dim: 1 if n.single else LEAST_STREAMED for n in nodes_of(b.body) if isinstance(n, Loop)}
    stored = {d for n in nodes_of(b.body) if isinstance(n, Store) for d in n.dims}
    return replace(s, singles=singled(summed(lower(b, LowerOptions(tiles=tiles, arranged=False)))) - stored)
