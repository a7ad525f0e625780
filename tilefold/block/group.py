"""Groups of operators that share a kernel, what refuses them, and what the kernels of a device keep to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilefold.errors import SourceLoc


@dataclass(frozen=True, slots=True)
class Group:
    """Members in program order and the dims their kernel is parallel over (order of the last member)."""

    members: tuple[str, ...]
    parallel: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a producer and its consumer do not share a kernel."""

    producer: str
    consumer: str
    reason: str
    loc: SourceLoc | None = None


@dataclass(frozen=True, slots=True)
class Grouping:
    groups: tuple[Group, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class Operands:
    """What it costs to compute an operand of a product that a fold streams, in each of the blocks of rows that read it.

    rows: of a product that share a block. As bytes of memory: cached, a byte out of the last cache; flop, arithmetic of
    a product; vector, arithmetic of a map; kernel, one more of them. neighbours: columns of a block that reduces down
    them whole; kept: elements of these that it keeps meanwhile, at most.
    """

    rows: int
    cached: float
    flop: float
    kernel: float
    vector: float = 0.0
    neighbours: int = 32
    kept: float = math.inf


@dataclass(frozen=True, slots=True)
class Limits:
    """What the kernels of a device keep to. Extents and blocks are counted, sizes are of elements.

    workers: independent blocks that a kernel must have, if one of its parts had them. both: blocks that must be left
    where each of its parts has so many (sums over rows and sums over columns have none in common). in_registers: what
    a kernel computes is read where it was computed, as values in registers are.
    local: elements, over one index of the parallel dims, that a block may keep of one value. lost: extent that may
    change from parallel to local because another member lacks the dim. held: elements that a block may keep for all of
    its life beside its tiles (None: any).
    repeat_share: repeated work that is accepted, as a share of the work that it sits beside. repeat_block: length of a
    block along a parallel dim that repeated members are charged for. little: bytes between parts that are not worth
    fewer blocks, as a share of what the first part reads.
    operands: of streamed products; None: computing them again costs nothing.
    readers: blocks that together read at the memory's rate, where fewer read at less; segment: elements of an axis that
    is summed over that are worth a block of their own.
    few_blocks, long_axis: fewer blocks than that are worth cutting along a reduced axis of at least so many elements.
    """

    workers: int = 2
    both: int = 1
    in_registers: bool = False
    local: int = 2048
    lost: int = 512
    held: int | None = None
    repeat_share: float = 1 / 16
    repeat_block: int = 128
    little: float = 1 / 16
    operands: Operands | None = None
    readers: int = 1
    segment: int = 256
    few_blocks: int = 4
    long_axis: int = 1 << 16


#: Of a device that nothing is known of.
ANY = Limits()
