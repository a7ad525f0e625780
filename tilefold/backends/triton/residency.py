"""How many thread blocks of a kernel with matrix products a multiprocessor holds at a time, and what its warps hide.

A thread has its share of the results of the products of a body, of the operands that are computed (rounded, to 16 bits
where the product is of those) and of what one statement reads beside them; operands that are read are in shared memory,
once for each stage that copies are ahead. What the registers of a thread do not hold is spilled.

A scheduler with one warp or two waits where it reads, then where it multiplies, then where it computes; in a long loop
copies are ahead, and products beside arithmetic. Where warps share a row that is reduced, they meet twice.

Microseconds on an H100: measured (forecast by a quarter of all stages but the longest; so). A product of short depth, a
bias and a gelu 41.8 (27.0; 35.3); a layer, its bias, and three sums over its columns, 256 blocks of 205 KB, 33.8 (26.5;
36.2); attention of one query over 500 places, 64 blocks of 8 warps, 74 (24.7; 43.9); gradients of an activation in
tiles of 128 x 128, four warps, 65 (32.6; 52.5).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilefold.backends.triton.work import MOST
from tilefold.plan.hardware import Gpu

#: Registers of a thread beside its shares of tiles: addresses, masks, what is computed meanwhile.
OWN = 32
#: Warps of a multiprocessor with which all stages but the longest would take their whole time, and turns of a loop that
#: halve it; share that they take at least.
SERIAL, AHEAD, HIDDEN = 6, 8, 1 / 4
#: Rows of a tile that a warp has to itself where its threads reduce them alone, and seconds of a reduction for each
#: warp beyond.
OWNED, MEETING = 16, 0.06e-6
#: A thread's registers are dealt by eights.
DEALT = 8


@dataclass(slots=True)
class Body:
    """What the products of one body need. elements: registers' worth, of a block; read: the same, by the statement
    beside them that reads the most; shared: bytes of shared memory."""

    elements: float = 0.0
    read: float = 0.0
    shared: float = 0.0


@dataclass(slots=True)
class Resident:
    """The most that a body of a kernel needs: registers' worth of elements, and bytes of shared memory, of a block."""

    elements: float = 0.0
    shared: float = 0.0

    def add(self, b: Body, threads: int) -> float:
        """Count what a body needs; elements that the registers of a block's threads do not hold of it."""
        if not b.elements:
            return 0.0
        self.elements = max(self.elements, b.elements + b.read)
        self.shared = max(self.shared, b.shared)
        return max(0.0, b.elements + b.read - threads * (MOST - OWN))

    def blocks(self, threads: int, machine: Gpu) -> int:
        """Thread blocks of a multiprocessor."""
        each = min(MOST + 1, -(-int(OWN + self.elements / threads) // DEALT) * DEALT)
        room = min(machine.blocks, machine.threads // threads, machine.registers // (each * threads))
        if self.shared:
            room = min(room, int(machine.tiers[1].capacity // self.shared))
        return max(1, room)


def exposed(warps: float, turns: float) -> float:
    """Share of the stages beside the longest that so many warps of a multiprocessor do not hide, in so many turns."""
    return min(1.0, max(HIDDEN, SERIAL / max(1.0, warps) * AHEAD / (AHEAD + turns)))


def meetings(rows: int, warps: int) -> float:
    """Seconds that the warps of a block wait for one another where a tile of so many rows is reduced."""
    return MEETING * max(0, warps - max(1, rows // OWNED))
