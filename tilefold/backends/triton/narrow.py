"""Operands of matrix products that are read element by element: 16-bit rows of odd lengths.

A copy from memory to shared memory that goes on beside products takes 4 bytes at least, a tensor map rows of multiples
of 16. What lies at multiples of 2 goes through registers: an access a thread for every element, which is waited for,
packed and stored, in front of the product that wants it. Nothing hides that. Lanes lie along a row; but where a tile of
the same lanes is read by 16 bytes, Triton 3.6 gives both its layout, so that a warp's 32 elements are 16 bytes apart:
as many sectors for each, eight times.

Microseconds of an H100, 294,912 rows of fp16, relu(x w^T + b), forecast without this, with it, and measured: of 39
features by 256 columns, both operands narrow, 126, 264 and 264; of 256 features beside 3 others, by 128 columns, where
the weight is, 234, 720 and 722.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilefold.backends.triton.memory import SECTOR
from tilefold.plan.hardware import Gpu

if TYPE_CHECKING:
    from tilefold.backends.triton.touched import Touch

#: Bytes of the shortest copy that is not waited for; accesses of an element each for one of 16 bytes.
LEAST, EACH = 4, 8


def narrow(touches: Sequence[Touch], machine: Gpu) -> float:
    """Seconds of a multiprocessor for such accesses of a thread block."""
    wide = {x.lanes for x in touches if not x.stored and not x.narrow and len(x.lanes) > 1}
    seconds = 0.0
    for x in touches:
        if x.narrow:
            sent = EACH * x.sectors if x.lanes in wide else x.sent
            seconds += x.times * (x.narrow * machine.narrow + sent / SECTOR * machine.narrow_sector)
    return seconds
