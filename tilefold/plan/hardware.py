"""What the planner knows of a machine: tiers in bytes and bytes/s, rates in FLOP/s, times in seconds.

A *tier* is a level of the memory hierarchy, fastest first. Its bandwidth is what all cores together move between it
and the level above (closer to the arithmetic). Descriptions are frozen; `plan.machine` measures that of the CPU we are
on, the GPUs are described from measurements and data sheets, cited at each number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tilefold.algebra.dtypes import DType

TierName = Literal["register", "L1", "shared", "cluster", "L2", "L3", "global"]


@dataclass(frozen=True, slots=True)
class Tier:
    """`capacity`: bytes of one instance, which `sharing` cores share. `bandwidth`: bytes/s out of all instances
    together. `latency`: seconds of one access. `source`: where the numbers are from."""

    name: TierName
    capacity: float
    bandwidth: float
    latency: float
    sharing: int
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """A device.

    `tiers`: fastest first, the last is memory. `cores`: units that run blocks (cores, streaming multiprocessors).
    `own`, `library`: matrix product rates by operand dtype, of generated code and of the library. `vector`:
    element-wise rate of all cores in units of `dataflow.element_units` a second. `launch`: of a kernel; `step`:
    of one tile statement. `source`: of the rates. `folded`: share of the library's rate that a generated product
    reaches whose result, or operand, a reduction makes in the same kernel.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    tiers: tuple[Tier, ...]
    cores: int
    launch: float
    step: float
    vector: float
    own: Mapping[DType, float]
    library: Mapping[DType, float]
    source: str
    folded: float = 1.0

    @property
    def bandwidth(self) -> float:
        """Bytes/s of memory."""
        return self.tiers[-1].bandwidth

    @property
    def last_cache(self) -> Tier:
        """The largest tier above memory."""
        return self.tiers[-2]

    def gemm_rate(self, dtype: DType, *, library: bool) -> float:
        """FLOP/s of a matrix product with operands of this type (unlisted types: the slowest listed)."""
        table = self.library if library else self.own
        return table.get(dtype, min(table.values()))

    def home(self, nbytes: float) -> Tier:
        """Where a whole tensor stays between kernels: the fastest tier shared by all cores with room for it and as
        much again."""
        for t in self.tiers:
            if t.sharing >= self.cores and 2 * nbytes <= t.capacity:
                return t
        return self.tiers[-1]


_LOCAL = "measured on one H100 80GB: own micro-benchmark, every SM reading 64 KB by 16-byte loads"
_SHEET = "NVIDIA H100 / H200 data sheets"
_CLOCK = 1.755e9  # boost of the SXM part, for latencies given in cycles

H100 = Machine(
    name="h100",
    kind="cuda",
    tiers=(
        Tier("register", 256 << 10, 120e12, 0.0, 1, "256 KB an SM; bandwidth nominal, never the bottleneck"),
        Tier("shared", 227 << 10, 31.5e12, 44 / _CLOCK, 1, _LOCAL),
        Tier("cluster", 8 * (227 << 10), 3.39e12, 221 / _CLOCK, 8, _LOCAL + ", a neighbour's in a cluster of 8"),
        Tier("L2", 50 << 20, 5.5e12, 270 / _CLOCK, 132, "capacity: " + _SHEET + "; bandwidth and latency nominal"),
        Tier("global", 80e9, 3.0e12, 600 / _CLOCK, 132, "measured on one H100 80GB: reads 3.0, copies 2.42 TB/s"),
    ),
    cores=132,
    launch=1.15e-6,
    step=0.2e-6,
    vector=16e12,
    own={DType.F64: 30e12, DType.F32: 30e12, DType.BF16: 560e12, DType.F16: 560e12, DType.E4M3: 900e12},
    library={DType.F64: 50e12, DType.F32: 45e12, DType.BF16: 780e12, DType.F16: 780e12, DType.E4M3: 1285e12},
    source="bf16 and fp8 library rates at 4096 to 8192 and an empty kernel in a CUDA graph: measured on one H100 80GB; "
    "own bf16: the best Triton attention measured there; the others nominal; folded: log-sum-exp of 4096 x 50257 "
    "logits of 2048 bf16 features in 2.64 ms on one H200, 2026-11",
    folded=0.42,
)

H200 = Machine(
    name="h200",
    kind="cuda",
    tiers=(*H100.tiers[:-1], Tier("global", 141e9, 4.3e12, 600 / _CLOCK, 132, "H100's share of the sheet's 4.8 TB/s")),
    cores=H100.cores,
    launch=H100.launch,
    step=H100.step,
    vector=H100.vector,
    own=H100.own,
    library=H100.library,
    source="same processor as the H100; " + _SHEET,
    folded=H100.folded,
)


def gpu_here() -> Machine:
    """The current CUDA device; an H100 where there is none (kernels that are only looked at, or interpreted)."""
    if not torch.cuda.is_available():
        return H100
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return gpu_named(properties.name, properties.multi_processor_count)


def gpu_named(name: str, cores: int) -> Machine:
    """The description nearest to the GPU of this name (as the driver says it) with this many multiprocessors."""
    return replace(H200 if "H200" in name else H100, cores=cores)
