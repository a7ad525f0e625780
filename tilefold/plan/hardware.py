"""What the planner knows of a machine: rates in FLOP/s and bytes/s, times in seconds.

The CPU figures are ratios measured by `bench/microkernel.py` against the library that torch
calls, scaled to a nominal core; only their quotients decide anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType


@dataclass(frozen=True, slots=True)
class Machine:
    """`own` and `library`: matrix product rates by operand dtype; `bandwidth` of memory; `launch` of a kernel."""

    name: str
    bandwidth: float
    launch: float
    own: Mapping[DType, float]
    library: Mapping[DType, float]

    def gemm_rate(self, dtype: DType, *, library: bool) -> float:
        """FLOP/s of a matrix product with operands of this type (unlisted types: the slowest listed)."""
        table = self.library if library else self.own
        return table.get(dtype, min(table.values()))
