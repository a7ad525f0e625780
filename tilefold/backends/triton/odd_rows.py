"""Tiles for reductions of short rows that begin between two vectors, so that each element is a load of its own.

Triton lays the lanes of all warps along such a row, an element each: threads of four warps have four elements each of a
row of 257, in 512 lanes, and pass each sum through shared memory. One warp a row has no barriers, and the assembler
drops what is beyond the row's end for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tilefold.algebra.expr import Const, Load, dims_used, loads
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.traffic import REGISTER, WARP
from tilefold.block.ir import Block, exprs_of
from tilefold.block.ir import walk as nodes_of
from tilefold.plan.hardware import H100
from tilefold.tile.layout import UnitAxes
from tilefold.tile.pieces import power_of_two

if TYPE_CHECKING:
    from tilefold.backends.triton.tiles import Shape

#: Elements of a row that a warp is enough for; it has all of a shorter one at once, however many warps a block has.
LONGEST = 1024
#: Registers a thread of what is read of a row, and of what is read of several.
ROW, ROWS = 96, 64
#: Thread blocks a multiprocessor, below which rows are few.
MANY = 8


def for_odd_rows(
    c: TritonConfig, s: Shape, b: Block, local: Mapping[str, int], unit: UnitAxes, sizes: Mapping[str, int]
) -> TritonConfig:
    """One warp a thread block, and as many rows as its registers have with all that is under way at once, where a block
    holds odd rows whole, one after the other in memory, and rows are many.

    Distances of 32,768 rows of 257 elements of bf16, of three tensors, cross-compiled: 556 instructions a row of four
    by four warps, 248 of two by one; 32.5 us on an H200, Inductor's, by one warp, 19.5.
    """
    whole = {d: power_of_two(sizes[d]) for d in s.streamed if c.tiles.get(d, 0) >= sizes[d] and d not in s.dynamic}
    held = [d for d, n in {**local, **whole}.items() if n > 1]
    if s.products or not s.reduces or s.segments or s.cut or s.singles or len(whole) < len(s.streamed):
        return c
    rows = math.prod(sizes[d] for d in s.parallel)
    if len(held) != 1 or rows < MANY * H100.cores or not _odd(s, b, unit, held[0]):
        return c
    row = _registers(b, held[0], sizes[held[0]])
    if not WARP < sizes[held[0]] <= LONGEST or row > ROW:
        return c
    tiles, together = {**c.tiles, **dict.fromkeys(s.parallel, 1)}, 1
    for d in reversed(s.parallel):
        while tiles[d] < sizes[d] and 2 * together * max(row / ROWS, MANY * H100.cores / rows) <= 1:
            tiles[d], together = 2 * tiles[d], 2 * together
    return replace(c, tiles=tiles, warps=1)


def _odd(s: Shape, b: Block, unit: UnitAxes, along: str) -> bool:
    """Whether some tensor has rows along a dim that are read an element at a time, and no tensor that varies along it
    has its neighbours along another: a warp of one row would touch a line for each."""
    kinds = {i.name: i for i in b.inputs}
    found = False
    for x in _read(b):
        i, used = kinds[x.tensor], {d for e in x.index for d in dims_used(e)}
        axis = unit.get(x.tensor, len(i.shape) - 1)
        if along not in used:
            continue
        if axis is None or dims_used(x.index[axis]) != {along}:
            return False
        match i.shape[axis]:
            case Const(int() as n) if (n & -n) * i.dtype.nbytes <= REGISTER and used & {*s.parallel}:
                found = True
    return found


def _registers(b: Block, along: str, extent: int) -> float:
    """Of a thread, of the elements that are read of a row, one each."""
    kinds = {i.name: max(1.0, i.dtype.nbytes / REGISTER) for i in b.inputs}
    return sum(kinds[x.tensor] * -(-extent // WARP) for x in _read(b) if along in dims_used(x))


def _read(b: Block) -> list[Load]:
    """Elements of inputs that are read, once each."""
    names = {i.name for i in b.inputs}
    return [*dict.fromkeys(x for n in nodes_of(b.body) for e in exprs_of(n) for x in loads(e) if x.tensor in names)]
