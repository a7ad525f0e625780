"""Tiles for many sums of short rows, one after the other: states of a recurrence that is written out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.tilings import BUSY
from tilefold.backends.triton.traffic import WARP, Traffic
from tilefold.backends.triton.work import MOST, REGISTERS
from tilefold.block.ir import Block, Let
from tilefold.block.ir import walk as nodes_of
from tilefold.plan.hardware import H100

if TYPE_CHECKING:
    from tilefold.backends.triton.tiles import Shape

#: Sums from which they are many; fewest registers of a thread that has them, and how many are given at a time.
MANY, LEAST, UNIT = 8, 128, 8


def for_sums(c: TritonConfig, s: Shape, b: Block, t: Traffic, local: Mapping[str, int]) -> TritonConfig:
    """Where multiprocessors have few warps: one warp a block, for its sums are without barriers, over which no load
    moves; and as few rows as leave each thread an element. What is computed of rows alone, all threads of a row
    compute, for each row that they have elements of.

    A selective scan of 32 steps, 16 states each, of 4,096 rows, 16 by two warps, is 8,680 instructions and 255
    registers, of which 312 bytes spilled, and took 40 us on an H100; two rows by one warp are 2,672 and 168. Nor
    so many registers that some blocks wait for others to end, as long as that spills nothing: of 168 there are 12 of
    these blocks at a time, of 128 16, which is all.
    """
    sums = [n for n in nodes_of(b.body) if isinstance(n, Let) and n.rdims]
    whole = all(d in local and d not in c.tiles for n in sums for d in n.rdims)
    if s.streamed or len(sums) < MANY or not whole or any(math.prod(local[d] for d in n.rdims) > WARP for n in sums):
        return c
    if t.blocks(c.tiles) * c.warps >= BUSY * H100.cores:
        return c
    tiles = dict(c.tiles)
    while s.area({**local, **tiles}) > WARP:
        d = max(s.parallel, key=lambda d: tiles.get(d, 1), default=None)
        if d is None or tiles.get(d, 1) == 1:
            break
        tiles[d] //= 2
    together = -(-t.blocks(tiles) // H100.cores)
    registers = REGISTERS // (WARP * together) // UNIT * UNIT
    return replace(c, tiles=tiles, warps=1, registers=registers if LEAST <= registers < MOST else c.registers)
