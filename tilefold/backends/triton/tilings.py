"""What becomes of a tile of least estimated time (`widths`) where what the estimate does not know decides: registers,
functions that are waited for, windows, ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilefold.algebra.expr import Call, Expr, dims_used
from tilefold.algebra.expr import loads as loads_of
from tilefold.backends.triton.choices import of_parts
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.traffic import WARP, Traffic
from tilefold.backends.triton.widths import BUSY, EACH, MOST_WARPS, ONCE, VECTOR, contiguous, repairs, widths
from tilefold.backends.triton.work import operations, room
from tilefold.block.crossing import REGISTER, between, crossing
from tilefold.block.ir import Accumulate, Block, Let, Loop, Node, Store, Update, exprs_of
from tilefold.block.ir import walk as nodes_of
from tilefold.plan.dataflow import root_of
from tilefold.plan.hardware import H100
from tilefold.tensor.analysis import expr_flops
from tilefold.tile.pieces import largest_power

if TYPE_CHECKING:
    from tilefold.backends.triton.tiles import Shape

#: Least tile of a stream that is shortened for what crosses its reductions; share of the elements of held columns that
#: more than a few values may have, and how many are few.
SHORTEST, SEVERAL, FEW = 64, 3 / 4, 3
#: Lanes of the longest rows, and maps of which a compiler does not compute one element after the other there.
LONGEST, SEVERAL_MAPS = 1 << 15, 3
#: Lanes of a streamed dim, over its indices, above which its tiles are shorter, and with which they are short enough;
#: the shortest such tile.
MASKED_MOST, ENDED, LEAST_TILE = 4 / 3, 5 / 4, 8
#: Elements of the largest value for each thread, where each waits for its row, or for states.
EACH_CENTRED = 16
#: Functions that a thread waits for, and elements for each thread of a map of them.
WAITING, EACH_WAITING = frozenset({"sin", "cos", "pow"}), 8
#: The same of functions whose code is so long that that of many elements does not stay in the instruction cache: three
#: logarithms of the gamma function, eight elements a thread, 78 us on an H200 for a million; Inductor 21.5.
LONG, EACH_LONG = frozenset({"lgamma"}), 2
#: Values that statements leave to later ones from which they are all there at once, and part of the registers that they
#: may have.
VALUES, PART_OF = 8, 0.4
#: How many times as much is computed as read and written of what is bound by arithmetic.
OUTER = 8
#: Loads of a thread that are under way at once, where one element takes `WINDOW` or more; warps of such a block, and
#: blocks that larger tiles leave.
UNDER_WAY, WINDOW, MOST_FOR_WINDOWS, BLOCKS = 208, 9, 8, 8 * H100.cores
#: Arithmetic, in additions, that is worth computing once for several rows.
HEAVY = 4
#: The same of what is not computed twice for a held row (a sigmoid; not an exponential).
DEAR = 12
#: Bytes of neighbours below which parts of a concatenation share a thread block.
PART = 64


def for_windows(c: TritonConfig, s: Shape, b: Block, t: Traffic, local: Mapping[str, int]) -> TritonConfig:
    """Where a window is written out: as much for each thread as its registers have room for while all loads of a part
    are under way, so that what does not vary from place to place (its weights) is loaded and converted once for
    several; and no more."""
    inputs = {i.name: i.dtype.nbytes for i in b.inputs}
    window, loads = window_of(b)
    if window < WINDOW:
        return c
    tiles, warps = dict(c.tiles), c.warps
    near = contiguous(s, t)
    for d in (d for d in s.parallel if d not in near):  # few blocks: some multiprocessors have one, others two
        while tiles.get(d, 1) > 1 and t.blocks(tiles) < BLOCKS and s.area({**local, **tiles}) >= 2 * WARP * warps:
            tiles[d] //= 2
    weighted = loads != window
    narrow = max(inputs.values()) <= 2 and all(
        a.run(c.tiles, t.sizes)[0] >= VECTOR and not a.between for a in t.accesses if a.axes
    )
    most = UNDER_WAY * (2 if narrow else 1) * WARP  # vectors of 16 bits: two elements a register
    for d in near if narrow and weighted else ():  # lanes beyond the last channel compute as much as others
        fit = [n for n in widths(t.sizes[d]) if min(4 * VECTOR, tiles[d]) <= n <= tiles[d]] or [tiles[d]]
        tiles[d] = min(reversed(fit), key=lambda n: -(-t.sizes[d] // n) * n)
    warps = _with_room(s, tiles, warps, lambda warps: loads * s.area({**local, **tiles}) <= most * warps)
    for d in reversed([d for d in s.parallel if d not in near]) if weighted else ():
        while (
            tiles.get(d, 1) < t.sizes[d]
            and 2 * loads * s.area({**local, **tiles}) <= most * warps
            and t.blocks(tiles) >= 2 * BLOCKS
        ):
            tiles[d] = 2 * tiles.get(d, 1)
    return c if (tiles, warps) == (c.tiles, c.warps) else replace(c, tiles=tiles, warps=warps)


def for_operands(c: TritonConfig, s: Shape, b: Block, local: Mapping[str, int]) -> TritonConfig:
    """Fewer elements for each thread of a map of which one element takes so many, of several tensors, that registers do
    not have them all: the assembler then keeps next to nothing in registers.

    A step of Jacobi's of what the step before makes of two tensors, at seven places, 32 elements a thread by four
    warps: 32 registers and 6,716 bytes spilled, some 470 us on an H100; by eight warps none.
    """
    kinds = {i.name: i.dtype.nbytes / REGISTER for i in b.inputs}
    if s.reduces or s.streamed or window_of(b)[0] >= WINDOW:
        return c
    tiles, warps = dict(c.tiles), c.warps
    asked = (
        [x for x in dict.fromkeys(x for e in exprs for x in loads_of(e)) if x.tensor in kinds]
        for exprs in _computed(b.body)
    )
    dear = [[(min(1.0, kinds[x.tensor]), dims_used(x)) for x in xs] for xs in asked if len(xs) >= WINDOW]

    def most() -> float:
        lanes = {**local, **tiles}
        return max((sum(k * math.prod(lanes.get(d, 1) for d in dims) for k, dims in xs) for xs in dear), default=0.0)

    warps = _with_room(s, tiles, warps, lambda warps: most() <= UNDER_WAY * WARP * warps)
    return c if (tiles, warps) == (c.tiles, c.warps) else replace(c, tiles=tiles, warps=warps)


def _with_room(s: Shape, tiles: dict[str, int], warps: int, fits: Callable[[int], bool]) -> int:
    """Warps of a thread block, more of them and then shorter tiles (in place) until what it has under way fits."""
    while not fits(warps):
        free = [d for d in s.parallel if tiles.get(d, 1) > 1]
        if warps < MOST_FOR_WINDOWS:
            warps *= 2
        elif free:
            tiles[free[0]] //= 2
        else:
            break
    return warps


def window_of(b: Block) -> tuple[int, int]:
    """Loads of the tensor that a statement reads in most places, and all loads of that statement."""
    inputs = {i.name for i in b.inputs}
    read = [Counter(x.tensor for e in exprs for x in loads_of(e) if x.tensor in inputs) for exprs in _computed(b.body)]
    return max(((max(n.values(), default=0), n.total()) for n in read), default=(0, 0))


def for_parts(c: TritonConfig, s: Shape, b: Block, t: Traffic, local: Mapping[str, int]) -> TritonConfig:
    """Where what is stored is one of many parts: as many indices of what chooses a thread block as are of one part, one
    of a dim along which nothing is contiguous, so that it reads one part; as many elements as before, of the other
    dims, where they have them."""
    near = set(contiguous(s, t))
    stored = [n.expr for n in nodes_of(b.body) if isinstance(n, Store)]
    least = PART // min((a.nbytes for a in t.accesses), default=PART)
    torn = {d for d, n in of_parts(stored, lambda d: d in s.parallel).items() if d in near and n < least}
    of_one = of_parts(stored, lambda d: d in s.parallel and d not in torn)
    chosen = {d: min(n, c.tiles.get(d, 1)) if d in near else 1 for d, n in of_one.items()}
    if all(c.tiles.get(d, 1) == n for d, n in chosen.items()):
        return c
    area = s.area({**local, **c.tiles})
    tiles, free = {**c.tiles, **chosen}, [d for d in s.parallel if d not in chosen]
    for d in (*(d for d in free if d in near), *reversed([d for d in free if d not in near])):
        while tiles.get(d, 1) < t.sizes[d] and 2 * s.area({**local, **tiles}) <= max(area, ONCE):
            tiles[d] = 2 * tiles.get(d, 1)
    found = s.area({**local, **tiles})
    return replace(c, tiles=tiles, warps=max(1, min(MOST_WARPS, found // (WARP * EACH)))) if found >= area // 4 else c


def for_columns(c: TritonConfig, s: Shape, b: Block, t: Traffic, local: Mapping[str, int]) -> TritonConfig:
    """Where something is computed of columns alone: several rows for each thread, which has neighbouring columns and
    computes it for each of them, whatever its rows; as long as blocks are many.

    Batch norm and a clamp of 96 channels in bf16, cross-compiled: 56 instructions an element of 8 a thread, 22 of 32.
    What is reduced of columns alone, each block reduces: Adafactor's step, whose blocks sum 2,048 partial sums, reads
    three numbers a column besides.
    """
    near = {*contiguous(s, t), *(d for d, n in local.items() if s.reduces and n > 1)}
    lets = [n for n in nodes_of(b.body) if isinstance(n, Let) and expr_flops(n.expr) >= HEAVY]
    if (
        any(isinstance(n, Accumulate) for n in nodes_of(b.body))
        or any(isinstance(n, Let) and n.rdims and dims_used(n.expr) & {*s.parallel} for n in nodes_of(b.body))
        or s.streamed
        or window_of(b)[0] >= WINDOW
        or any(isinstance(n, Loop) and n.single for n in nodes_of(b.body))
    ):
        return c
    tiles = dict(c.tiles)
    for d in reversed(
        [d for d in s.parallel if d not in near and any(d not in n.dims and near & {*n.dims} for n in lets)]
    ):
        while (
            tiles.get(d, 1) < t.sizes[d]
            and 2 * s.area({**local, **tiles}) <= EACH * WARP * c.warps
            and t.blocks(tiles) >= BLOCKS
        ):
            tiles[d] = 2 * tiles.get(d, 1)
    return c if tiles == c.tiles else replace(c, tiles=tiles)


def for_functions(c: TritonConfig, s: Shape, b: Block, local: Mapping[str, int]) -> TritonConfig:
    """Threads enough to keep what functions make of a held row, which few threads with narrow elements compute again.

    RMS norm of silu(x) y, rows of 4096 in bf16, a warp each: 5344 instructions of 128 elements a thread, 52 us on an
    H100 for what takes 40.
    """
    if s.streamed or s.products or not s.reduces:
        return c
    dear = (n for n in nodes_of(b.body) if isinstance(n, Let) and not n.rdims and expr_flops(n.expr) >= DEAR)
    kept = max((math.prod(local.get(d, 1) for d in n.dims) for n in dear), default=0)
    enough = largest_power(kept // (WARP * EACH))
    return replace(c, warps=max(c.warps, min(MOST_WARPS, enough)))


def for_branches(c: TritonConfig, s: Shape, b: Block, t: Traffic, local: Mapping[str, int]) -> TritonConfig:
    """Fewer elements for each thread of what computes functions which branch for rare arguments of them: a thread
    computes one after the other, and waits for each, beside the fewer warps the more registers its elements have. Down
    to one where multiprocessors have few warps of them.

    Haversine distances of 4,000 and 3,001 places, 32 elements a thread with two sines each: 192 us on an H100, where
    the sines' arithmetic is 40; 116 registers, 11,080 instructions. A sine and a cosine of 512 x 320 angles, eight
    elements a thread, by 1,024 warps: 5.1 us on an H200, Inductor 1.6; 1,612 instructions, of two elements 423. Sums of
    32 damped waves, 128 places at a time by four warps, 32 elements a thread: 233 us on an H200, of eight
    109 (Inductor 109 to 126).
    """
    if s.streamed or s.products:
        return c
    lanes = {**local, **c.tiles}
    area = s.area(lanes)
    every = (x for exprs in _computed(b.body) for e in exprs for x in operations(e))
    apart = [x for x in every if isinstance(x, Call) and x.op in WAITING | LONG and root_of(x) is None]
    whole = {x.op for x in apart if 2 * math.prod(lanes.get(d, 1) for d in dims_used(x)) > area}
    if not whole:
        return c
    each = EACH_LONG if whole & LONG else EACH_WAITING
    warps = max(c.warps, min(MOST_WARPS // 2, largest_power(area // (WARP * each))))
    while t.blocks(c.tiles) * warps < BUSY * H100.cores and 2 * WARP * warps <= area and 2 * warps < MOST_WARPS:
        warps *= 2
    return replace(c, warps=warps)


def _shorter(c: TritonConfig, s: Shape, b: Block, local: Mapping[str, int]) -> TritonConfig:
    """Shorter tiles of a stream whose states are repaired: its elements are read for the first sum and for those about
    it, so that they are there beside the states. 32 x 57 x 57 places of a channel, eight images at a time by 32 warps,
    of 64 registers a thread: 412 bytes spilled."""
    tiles = dict(c.tiles)
    kept = sum(isinstance(n, Update) for n in nodes_of(b.body)) + 2
    for d in s.streamed if kept > 2 else ():
        while tiles.get(d, 1) > 1:
            area = s.area({**local, **tiles})
            beside = area // tiles[d]  # held whole; rows by themselves have a rule of their own
            if beside == 1 or area + kept * beside < room(WARP * c.warps):
                break
            tiles[d] //= 2
    return c if tiles == c.tiles else replace(c, tiles=tiles)


def for_values(c: TritonConfig, s: Shape, b: Block, local: Mapping[str, int]) -> TritonConfig:
    """More warps for what is left by many statements to many later ones, all of it at once.

    Mixtures of ten logistics of three channels, 16 elements a thread of twelve values: 2,892 bytes a thread spilled,
    209 us on an H200 for what takes Inductor 38.
    """
    if s.products:
        return c
    lanes, warps = {**local, **c.tiles}, c.warps
    held = between(b, lanes, VALUES)
    while held > PART_OF * room(WARP * warps) and 2 * warps <= MOST_WARPS // 2 and s.area(lanes) >= 2 * WARP * warps:
        warps *= 2
    return c if warps == c.warps else replace(c, warps=warps)


def for_outer(c: TritonConfig, s: Shape, b: Block, t: Traffic, local: Mapping[str, int]) -> TritonConfig:
    """Where far more is computed than is read or written (sigmoids of all differences of a row's elements, summed):
    tiles that few warps hold, for large ones save nothing and leave a thread fewer registers; and more warps where
    thread blocks are too few for every multiprocessor to have many.

    Gradients of the ranks of 256 x 240 scores, in tiles of 128 x 256 and 32 warps: 64 registers a thread, of which 524
    bytes spilled, 110 us on an H100; Inductor 27.
    """
    if s.products or not s.reduces:
        return c

    def times(tiles: Mapping[str, int]) -> float:
        lanes = {**local, **tiles}
        stored = (math.prod(lanes.get(d, 1) for d in n.dims) for n in nodes_of(b.body) if isinstance(n, Store))
        return s.area(lanes) / max(s.held(lanes), *stored, 1)

    tiles = dict(c.tiles)
    if times(tiles) < OUTER:
        return c
    for d in s.parallel:
        while tiles.get(d, 1) > 1 and s.area({**local, **tiles}) > ONCE and times({**tiles, d: tiles[d] // 2}) >= 2:
            tiles[d] //= 2
    area = s.area({**local, **tiles})
    warps = min(c.warps, max(1, area // (WARP * EACH)))
    while t.blocks(tiles) * warps < BUSY * H100.cores and area >= 2 * EACH_WAITING * WARP * warps:
        warps *= 2
    return replace(c, tiles=tiles, warps=min(warps, MOST_WARPS // 2))


def for_crossing(
    c: TritonConfig, s: Shape, b: Block, local: Mapping[str, int], sizes: Mapping[str, int]
) -> TritonConfig:
    """Shorter tiles of streamed dims where registers do not have all that crosses a reduction: of a row that one tile
    covers in all loops that run over it, else in each. Three values may have most of them (two softmaxes and a sum of
    both, in tiles of 16,384: 374 us on an H100 for what half of that takes 495), more of them less, with what is
    computed of them at the same time (a gate's gradient and its sums, four values of 8 x 1,024: 3,768 bytes spilled).
    Rows that are read again may have more: shorter tiles leave room for blocks whose rows no cache holds. Of single
    indices there is a value each (differences of pairs in three coordinates, which forces are summed of). Of the
    longest rows a thread has half of its registers' number of elements: what several maps leave to others is there for
    all of them (the gradients of a divergence of two rows of 32,000: 1,008 bytes spilled, by half of a row 8). Of what
    repairs states warps become fewer with it, which then wait for fewer others: a divergence of two rows of 32,000, a
    cross-entropy and their sum, in tiles of 4,096, by sixteen warps 202 us on an H200, by eight 115.
    """
    tiles, warps, each = dict(c.tiles), c.warps, {d: n for d, n in sizes.items() if d in s.singles}
    waits = repairs(s, b)
    for d in s.streamed:
        while tiles.get(d, 0) > SHORTEST:
            lanes = {**local, **each, **tiles}
            whole = tiles[d] >= sizes[d]
            found = crossing(b, d, lanes, whole=whole, apart=each)
            several = SEVERAL if found > FEW * s.area(lanes) else 3 / 2
            several = several if d not in s.again or whole else 2
            crowded = whole and s.area(lanes) >= LONGEST and between(b, lanes, SEVERAL_MAPS) > 2 * H100.held_columns
            if found <= H100.held_columns * several and not crowded:
                break
            tiles[d] //= 2
            if waits and s.area({**local, **tiles}) < EACH_CENTRED * WARP * warps:
                warps //= 2
    return c if tiles == c.tiles else replace(c, tiles=tiles, warps=warps)


def for_centred(c: TritonConfig, s: Shape, b: Block, local: Mapping[str, int]) -> TritonConfig:
    """Shorter tiles of a loop that reduces rows, and columns of what follows from these: each element waits in a
    register for its row, beside the lane of its column (`tile.lanes`).

    Sums of 72 columns about means of rows, 6,400 rows of 64 images in 512 thread blocks, 16 bits, on an H200: tiles of
    128 by eight warps 50 us, of 64 55, of 32 33; of 32 by 16 32, by 4 54.
    """
    tiles = dict(c.tiles)
    for loop in nodes_of(b.body):
        if not isinstance(loop, Loop) or loop.dim not in s.streamed:
            continue
        d, inside = loop.dim, list(nodes_of(loop.body))
        rows = [n for n in inside if isinstance(n, Let) and d in n.dims and n.rdims and local.keys() >= {*n.rdims}]
        columns = [dims_used(n.expr) for n in inside if isinstance(n, Accumulate) and d in n.rdims]
        if any({*n.rdims} <= dims for n in rows for dims in columns):
            while tiles[d] > SHORTEST // 2 and s.area({**local, **tiles}) > EACH_CENTRED * WARP * c.warps:
                tiles[d] //= 2
    return c if tiles == c.tiles else replace(c, tiles=tiles)


def for_registers(c: TritonConfig, s: Shape, b: Block, local: Mapping[str, int]) -> TritonConfig:
    """Fewer rows for a thread block, and then more warps, where its registers do not have what crosses reductions of
    rows that it holds whole. Of three axes and more each reduction wants its own layout of it: as much again.

    Gates and states of eight steps of an LSTM, read again, and 33 results of rows of 512, four rows by two warps: 36 KB
    a thread spilled, 30,000 lines of PTX, and 17 s to compile them. A state space's step, 64 x 8 x 16 of which 16 are
    summed, by two warps: 57 us more on an H100 than in a kernel of two axes.
    """
    whole = [d for d in local if d not in c.tiles]
    tiles, warps = dict(c.tiles), c.warps
    if not s.reduces:
        return c

    several = sum(n > 1 for n in {**local, **tiles}.values()) > 2
    if s.streamed and not several:
        return _shorter(c, s, b, local)

    def held() -> float:
        return (1 + several) * max((crossing(b, d, {**local, **tiles}) for d in whole), default=0.0)

    while held() > room(WARP * warps):
        d = next((d for d in s.parallel if tiles.get(d, 1) > 1), None)
        if d is not None:
            tiles[d] //= 2
        elif 2 * warps <= MOST_WARPS // 2:
            warps *= 2
        else:
            return c
    return c if (tiles, warps) == (c.tiles, c.warps) else replace(c, tiles=tiles, warps=warps)


def for_ends(c: TritonConfig, s: Shape, local: Mapping[str, int], sizes: Mapping[str, int]) -> TritonConfig:
    """Shorter tiles of a streamed dim whose last tile would be all but beyond its end: lanes there compute as others do
    (gelu and group norm of 8 x 4489 places, in two tiles of 4096: 260 us on an H100, of which 45 % was masked). So has
    a segment that one tile would cover half empty, for nothing holds it whole."""
    tiles = dict(c.tiles)

    def met(d: str, n: int) -> float:
        return -(-sizes[d] // n) * n / sizes[d]

    for d in s.streamed if not s.products else ():
        n = tiles.get(d, 0)
        covered = n >= sizes[d] and (d not in s.cut or d in s.again or d in s.whole)
        if n <= LEAST_TILE or covered or d in s.dynamic or met(d, n) <= MASKED_MOST:
            continue
        least = VECTOR * WARP * c.warps
        lengths = [n >> k for k in range(n.bit_length()) if n >> k >= LEAST_TILE]
        lengths = [m for m in lengths if m == n or _most(s, {**local, **tiles, d: m}) >= least]
        tiles[d] = next((m for m in lengths if met(d, m) <= ENDED), min(lengths, key=lambda m: met(d, m)))
    return c if tiles == c.tiles else replace(c, tiles=tiles)


def _most(s: Shape, tiles: Mapping[str, int]) -> int:
    """Elements of the largest statement for these tiles, or of all that it reads."""
    return max(s.area(tiles), s.held(tiles))


def _computed(nodes: Sequence[Node]) -> Iterator[tuple[Expr, ...]]:
    """The expressions of each statement."""
    for n in nodes:
        if isinstance(n, Loop):
            yield from _computed(n.body)
        if isinstance(n, Let | Accumulate | Update | Store):
            yield exprs_of(n)
