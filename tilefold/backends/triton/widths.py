"""The tile of least estimated time of a kernel without matrix products whose rows are not what is contiguous in memory.

Sums over columns, copies between layouts, softmax along a middle dim: a tile is as wide as loads and stores need along
each dim that is contiguous for some tensor, and as long along what is reduced as a thread block holds. Which widths is
the choice of least estimated time (`traffic`); the rule of rows (`tiles`) stands where it is as cheap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tilefold.algebra.expr import dims_used
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.traffic import WARP, Traffic
from tilefold.block.ir import Accumulate, Block, Let, Store, Update
from tilefold.block.ir import walk as nodes_of
from tilefold.plan.hardware import H100
from tilefold.tensor.analysis import expr_flops
from tilefold.tile.pieces import power_of_two

if TYPE_CHECKING:
    from tilefold.backends.triton.tiles import Shape

#: Warps that a multiprocessor should have of what is bound by arithmetic.
BUSY = 16
#: Least and largest width of a tile along a contiguous dim.
NARROWEST, WIDEST = 8, 1024
#: Elements of the largest value of a kernel that computes each element once, of one that reduces, of one whose rows or
#: columns are held whole.
ONCE, REDUCED, HELD = 1 << 12, 1 << 13, 1 << 15
#: The same of columns that a loop folds lane by lane and repairs (`tile.lanes`), of which a thread then has twice as
#: many: each turn waits for memory, and then for what states depend on. Variances of 96 channels over 3,840 places of
#: 64 images of 16 bits, 256 thread blocks on an H200, microseconds by tiles of places by warps: 64 by 8 34, by 4 31;
#: 128 by 8 20, by 4 20; 256 by 8 20, by 4 19; of 32 channels a block 64 by 4 18, 128 by 4 17.
FOLDED = 1 << 14
#: Arithmetic of an element, in additions, of which two thread blocks have registers: an exponential about a maximum and
#: sums beside it, not two exponentials.
LIGHT = 12
#: Turns that a loop must have with such tiles: what is left of a segment is masked.
TURNS = 4
#: Elements of the largest value for each thread.
EACH = 32
#: Most contiguous dims that widths are tried for.
MOST_DIMS = 3
#: Share of a kernel's bytes that a dim must be contiguous for.
SHARE = 1 / 16
#: Share of the rule's time below which another choice is taken: estimates are no better.
CLEAR = 0.95
#: The same of a smaller tile's time beside a larger one's.
SMALLER = 0.97
#: Neighbours of a vector of 16 bytes.
VECTOR = 8
#: Thread blocks of so many warps are the largest.
MOST_WARPS = 32
#: Seconds in which a multiprocessor passes a value from a warp to others, where warps share columns that are reduced:
#: sum and maximum of 256 channels over 32 x 3,136 places, 16 bits, on an H100 (microseconds; places by warps) 128 by 32
#: 80, 128 by 16 43, 64 by 16 40, 32 by 16 47, 32 by 8 28, 64 by 8 25. Warps from which it counts.
PASSED, FEW_WARPS = 2 / 1.7e9, 8
#: Additions that handing a value to a neighbour of its warp and combining it there takes; each warp that has a part of
#: a column does so. Maxima of 80 places of 32 channels by two rows, 4,608 thread blocks, 16 bits, on an H200: two warps
#: 19 us, four 22, eight 36.
HANDED = 6


def cheapest(s: Shape, rule: TritonConfig, b: Block, t: Traffic, local: Mapping[str, int]) -> TritonConfig:
    """The configuration of least estimated time; local: lanes of the dims that a thread block holds whole."""
    lanes = contiguous(s, t)
    if not lanes or all(d not in s.parallel for d in lanes) or t.sectors(rule.tiles) <= _least(t):
        return rule
    held = [n for n in nodes_of(b.body) if isinstance(n, Let | Accumulate) and local.keys() >= {*n.rdims} != set()]
    columns = len(held) if all(d in s.parallel for d in lanes) else 0
    whole = {d for d, n in local.items() if n > 1}
    once = not any(whole & {*n.dims} for n in nodes_of(b.body) if isinstance(n, Store))
    narrow = all(a.nbytes <= 2 for a in t.accesses if whole & a.dims and a.dims.intersection(lanes))
    few = once and (columns > 1 or (columns > 0 and narrow))  # what is read once registers have as it is in memory
    folds = repairs(s, b)
    under_way = 4 if s.narrow else 2  # the same of a fold, which has what it loads alone

    def seconds_of(tiles: Mapping[str, int], warps: int, area: int) -> float:
        if folds and all(tiles[d] < t.sizes[d] for d in s.streamed):
            area //= under_way
        seconds = t.seconds(tiles, warps, area) + _passed(s, t, tiles, warps, columns)
        return seconds + (_handed(s, t, tiles, local, warps, columns) if few else 0.0)

    best, price = rule, CLEAR * seconds_of(rule.tiles, rule.warps, s.area({**local, **rule.tiles}))
    of_area: dict[int, tuple[float, TritonConfig]] = {}
    for tiles in _candidates(s, t, lanes, local, folds=folds):
        area = s.area({**local, **tiles})
        for warps in _warps(s, t, tiles, area, columns, few=few, folds=folds):
            seconds = seconds_of(tiles, warps, area)
            if area not in of_area or seconds < of_area[area][0]:
                of_area[area] = seconds, replace(rule, tiles=tiles, warps=warps)
    for _, (seconds, config) in sorted(of_area.items(), reverse=True):
        if seconds < price:
            best, price = config, SMALLER * seconds
    return best


def _warps(
    s: Shape, t: Traffic, tiles: Mapping[str, int], area: int, columns: int, *, few: bool, folds: bool
) -> tuple[int, ...]:
    """Warps that a thread block may have. few: down to a quarter, as long as multiprocessors are busy."""
    if folds and area > REDUCED:
        short = any(tiles[d] * TURNS > t.sizes[d] for d in s.streamed)
        return () if short else (t.warps(tiles, area, EACH * area // REDUCED, MOST_WARPS),)
    most = t.warps(tiles, area, EACH, MOST_WARPS)
    fewer = tuple(n for n in (most // 2, most // 4) if n * t.blocks(tiles) >= BUSY * H100.cores)
    return (most, *(fewer if few else (most // 2,) if columns and most >= 2 * FEW_WARPS else ()))


def repairs(s: Shape, b: Block) -> bool:
    """Whether a kernel folds what it reads once, and repairs states: each turn waits for these."""
    once = bool(s.streamed) and not s.again and not s.products
    return once and any(isinstance(n, Update) for n in nodes_of(b.body))


def two_share(s: Shape, b: Block) -> bool:
    """Whether a kernel repairs states and computes so little of each element that a thread's registers leave room for a
    second thread block: turns of one go on while those of the other wait."""
    of_elements = (n.expr for n in nodes_of(b.body) if isinstance(n, Let | Accumulate))
    return repairs(s, b) and sum(expr_flops(e) for e in of_elements if dims_used(e) & {*s.streamed}) <= LIGHT


def _passed(s: Shape, t: Traffic, tiles: Mapping[str, int], warps: int, reductions: int) -> float:
    """Seconds that warps take to reduce columns, each of which has a part of every one: lanes lie along the columns."""
    columns = _columns(s, t, tiles)
    along = warps // min(warps, max(1, columns // (WARP * VECTOR)))
    blocks = t.blocks(tiles)
    return PASSED * blocks * along * columns * reductions / min(H100.cores, blocks) if along > FEW_WARPS else 0.0


def _handed(
    s: Shape, t: Traffic, tiles: Mapping[str, int], local: Mapping[str, int], warps: int, reductions: int
) -> float:
    """Seconds that the threads of warps take to reduce columns, each of which has a part of some; where few warps do,
    they have it while they wait for memory."""
    near = max(1, min(WARP, _neighbours(s, t, tiles) // VECTOR))
    handed = WARP // near  # threads of a warp that have parts of one column
    sharing = min(warps, max(1, max(local.values(), default=1) // handed))
    each = _columns(s, t, tiles) / (near * (warps / sharing))
    steps = t.blocks(tiles) * WARP * warps * math.log2(handed) * each * reductions * HANDED
    return steps / H100.vector if t.blocks(tiles) * warps >= BUSY * H100.cores else 0.0


def _columns(s: Shape, t: Traffic, tiles: Mapping[str, int]) -> int:
    return math.prod(min(tiles.get(d, 1), t.sizes[d]) for d in s.parallel if d not in s.segments)


def _neighbours(s: Shape, t: Traffic, tiles: Mapping[str, int]) -> int:
    """Indices of a tile along the dim that most is contiguous along."""
    return next((tiles.get(d, 1) for d in contiguous(s, t)), 1)


def _least(t: Traffic) -> float:
    """Bytes of sectors and requests where every access has whole tiles of the widest kind."""
    return t.sectors(dict.fromkeys(t.sizes, WIDEST))


def contiguous(s: Shape, t: Traffic) -> list[str]:
    """Dims in loops along which elements of some tensor are neighbours, those of most bytes first."""
    bytes_of: dict[str, float] = {}
    for a in t.accesses:
        for d in a.near(t.sizes, NARROWEST):
            if d in s.parallel or d in s.streamed:
                bytes_of[d] = bytes_of.get(d, 0.0) + a.nbytes * t.points(a)
    all_of_them = sum(a.nbytes * t.points(a) for a in t.accesses)
    worth = [d for d in bytes_of if bytes_of[d] >= SHARE * all_of_them]
    worth.sort(key=lambda d: -bytes_of[d])
    short = [d for d in worth if len(widths(t.sizes[d])) == 1]
    return short + [d for d in worth if d not in short][:MOST_DIMS]


def _candidates(
    s: Shape, t: Traffic, lanes: list[str], local: Mapping[str, int], *, folds: bool
) -> Iterator[dict[str, int]]:
    """Tiles of every width along the contiguous dims; what is reduced fills the thread block."""
    mosts = (REDUCED, FOLDED) if folds else (REDUCED,) if s.reduces else (ONCE,)
    for most, *chosen in itertools.product(mosts, *(widths(t.sizes[d]) for d in lanes)):
        tiles = {d: 1 for d in (*s.streamed, *s.parallel)} | dict(zip(lanes, chosen, strict=True))
        area = s.area({**local, **tiles})
        if area > (HELD if local or s.streamed else most):
            continue
        for d in (*(d for d in s.streamed if d not in lanes), *(d for d in reversed(s.parallel) if d not in lanes)):
            whole, longest = power_of_two(t.sizes[d]), 1
            while longest < whole and s.area({**local, **tiles, d: 2 * longest}) <= most:
                longest *= 2
            tiles[d] = max(2, longest) if d in s.streamed else longest
        if not (folds and _hands_rows_on(s, t, lanes, tiles)):
            yield tiles


def _hands_rows_on(s: Shape, t: Traffic, lanes: list[str], tiles: Mapping[str, int]) -> bool:
    """Whether each turn of a loop along neighbours reduces several rows to states that it then repairs: what is loaded
    beside one another, and states, have layouts of their own, and pass through shared memory.

    Moments of inertia of 128 bodies of 32,768 particles in four segments on an H200, by tiles of bodies, coordinates
    and particles: 1 x 1 x 1,024 28.5 us, 1 x 1 x 8,192 32, 1 x 4 x 1,024 45, 2 x 4 x 1,024 52, 2 x 1 x 1,024 69.
    """
    turns = any(tiles[d] < t.sizes[d] for d in s.streamed if d in lanes)
    masked = (d for d in s.parallel if d not in lanes or power_of_two(t.sizes[d]) != t.sizes[d])
    return turns and any(min(tiles[d], t.sizes[d]) > 1 for d in masked)


def widths(extent: int) -> list[int]:
    most = min(WIDEST, power_of_two(extent))
    return [n for n in (1 << k for k in range(11)) if min(NARROWEST, most) <= n <= most]
