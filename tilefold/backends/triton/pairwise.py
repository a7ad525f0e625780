"""Reductions over what belongs to pairs of rows: distances, of which no matrix unit knows.

Law: an element of the result takes as many operations as it has indices to reduce, and two rows serve a tile of rows
and columns. Each thread has its own elements then and all that is reduced for them: nothing crosses threads, and what
both rows have is in registers for a few indices at a time, read once for a row of elements.

Squared distances of 2,048 and 2,048 points of 64 numbers in float32, cross-compiled: 640 instructions and 161
exchanges for half an element a thread, with what is reduced along a warp (304 us on an H100, arithmetic alone 18);
now 128 of 170 instructions are arithmetic, for eight elements and eight numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from tilefold.algebra.expr import Expr, dims_used, loads
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.traffic import WARP
from tilefold.block.ir import Accumulate, Block, Let
from tilefold.block.ir import walk as nodes_of
from tilefold.plan.hardware import H100
from tilefold.tile.pieces import power_of_two

if TYPE_CHECKING:
    from tilefold.backends.triton.tiles import Shape

#: Rows and columns of a tile of pairs, indices that are reduced at a time, and fewest.
ROWS, COLUMNS, STEP, LEAST_STEP = 16, 64, 16, 4
#: Indices of all steps, over those that are reduced, of steps that do not end where these do.
MOST_BEYOND = 9 / 8
#: Warps of a thread block.
WARPS = 4


def of_pairs(e: Expr, over: Collection[str], out: Collection[str]) -> tuple[frozenset[str], ...]:
    """The dims of `out` that each operand of a reduction of e over dims has, if it reduces something of pairs: no
    operand has all of them, and none those of all others. None otherwise."""
    whole = frozenset(out)
    sides = dict.fromkeys(frozenset(dims_used(ld)) & whole for ld in loads(e) if not dims_used(ld).isdisjoint(over))
    most = tuple(x for x in sides if not any(x < y for y in sides))
    return most if len(most) > 1 and whole not in most and frozenset().union(*most) == whole else ()


def in_threads(e: Expr, over: Mapping[str, int], out: Mapping[str, int], warps: int) -> bool:
    """Whether what is reduced of pairs stays in the thread that has the pair: there are pairs for every thread of a
    block, and more indices to reduce than meet in one exchange. over, out: lanes of dims."""
    enough = math.prod(out.values()) >= WARP * warps and math.prod(over.values()) >= LEAST_STEP
    return enough and bool(of_pairs(e, over, [d for d, n in out.items() if n != 1]))


def for_pairs(s: Shape, b: Block, sizes: Mapping[str, int]) -> TritonConfig | None:
    """The configuration of a kernel that does no more than reduce something of pairs of rows, and what follows for each
    pair; None of others."""
    found = set(_pairs(s, b))
    if len(found) != 1:
        return None
    rows, columns, batch, over = found.pop()
    looped, dims = (*s.parallel, *s.streamed), {rows, columns, *batch, over}
    others = any(not area <= dims for area in s.areas)
    if others or rows not in looped or {rows, over} & s.again or over in s.parallel or sizes[over] < LEAST_STEP:
        return None
    whole = power_of_two(sizes[columns])  # of a row that several loops run over: what is reduced for it is kept
    width = min(COLUMNS, whole) if columns in looped and columns not in s.again else whole
    tile = min(power_of_two(sizes[rows]), max(1, ROWS * COLUMNS // width))
    blocks = math.prod(sizes[d] for d in batch) * (-(-sizes[columns] // width) if columns in s.parallel else 1)
    while tile * width > 2 * WARPS * WARP and blocks * -(-sizes[rows] // tile) < H100.cores:
        tile //= 2
    if not WARPS * WARP <= tile * width <= ROWS * COLUMNS:
        return None
    # smaller tiles take longer steps: each waits for the memory once
    most = min(STEP * ROWS * COLUMNS // (tile * width), max(LEAST_STEP, power_of_two(sizes[over])))
    powers = (LEAST_STEP << k for k in range((most // LEAST_STEP).bit_length()))
    steps = [n for n in powers if -(-sizes[over] // n) * n <= MOST_BEYOND * sizes[over]]
    step = max(steps, default=max(LEAST_STEP, sizes[over] & -sizes[over]))
    tiles = dict.fromkeys(looped, 1) | {rows: tile, over: step} | ({columns: width} if columns in looped else {})
    return TritonConfig(tiles, {}, warps=WARPS, stages=1)


def _pairs(s: Shape, b: Block) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Of each reduction of something of pairs: rows, columns (the later ones), other dims, and what is reduced."""
    order = [*s.parallel, *(d for d in b.sizes if d not in s.parallel)]
    for n in nodes_of(b.body):
        if not isinstance(n, Let | Accumulate) or len(n.rdims) != 1:
            continue
        out = dims_used(n.expr) - {*n.rdims} - s.segments - s.singles
        sides = of_pairs(n.expr, n.rdims, out)
        if len(sides) != 2 or n.rdims[0] in s.singles:
            continue
        own = [sorted(x - y, key=order.index) for x, y in (sides, sides[::-1])]
        if all(len(x) == 1 for x in own):
            rows, columns = sorted((x[0] for x in own), key=order.index)
            yield rows, columns, tuple(d for d in order if d in sides[0] & sides[1]), n.rdims[0]
