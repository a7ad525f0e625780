"""Predicted time of a kernel: the slowest stage, as FlashFuser's minimax (eqs. 1-2), plus what does not overlap.

    stage   = compute, and the traffic of each tier / its bandwidth
    seconds = launch + uneven * (max stage + UNHIDDEN * (the other stages)) + steps * step / cores

`compute` is the products at their rate, with the cost of packing their operands, and the element-wise work; `uneven`
is how much longer the core with most blocks works than the average one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from tilefold.algebra.dtypes import DType
from tilefold.block.ir import Block
from tilefold.plan.dataflow import Dataflow, MatrixWork, analyse
from tilefold.plan.hardware import Machine
from tilefold.plan.library_rates import Kind, Sizes

#: Rows and columns of the generated products' register block (`tilefold_gemm.h`, AVX2); ragged ones run as if full.
MICRO_ROWS, MICRO_COLS = 6, 16
#: Element-wise units that packing one element of an operand takes.
PACK_UNITS = 0.4
#: Share of the stages beside the slowest that is not hidden behind it (0: pure minimax).
UNHIDDEN = 0.1


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by stage: `stages[name]` for "compute" and each tier. `nbytes`: moved to and from memory or the last
    cache, each tensor at its home; `bottleneck` names the slowest stage."""

    seconds: float
    stages: Mapping[str, float]
    overhead: float
    nbytes: float

    @property
    def bottleneck(self) -> str:
        return max(self.stages, key=lambda s: self.stages[s])


def kernel_cost(block: Block, sizes: Mapping[str, int], tiles: Mapping[str, int], machine: Machine) -> Cost:
    """Cost of a block program (arranged) with these tiles."""
    return cost_of(analyse(block, sizes, tiles, machine), block_bytes(block, sizes), machine)


def block_bytes(block: Block, sizes: Mapping[str, int]) -> dict[str, float]:
    """Bytes of each whole tensor that a block program reads or writes, as indexed by dims (results) or given."""
    whole: dict[str, float] = {}
    for r in block.results:
        n = float(r.dtype.nbytes)
        for d in r.dims:
            n *= sizes[d]
        whole[r.name] = n
    return whole


def cost_of(flow: Dataflow, whole: Mapping[str, float], machine: Machine) -> Cost:
    """`whole`: bytes of whole tensors, where they are known to differ from what is moved (results)."""
    stages = {"compute": compute_seconds(flow, machine)}
    below = machine.tiers[1:]
    nbytes = 0.0
    for k, tier in enumerate(below):
        moved = flow.traffic[k]
        if tier is machine.tiers[-1]:
            # what the last cache holds from one kernel to the next is not read from memory
            moved = {t: x for t, x in moved.items() if machine.home(max(x, whole.get(t, 0.0))) is machine.tiers[-1]}
        if k == len(below) - 1:
            nbytes = sum(flow.traffic[k].values())
        stages[tier.name] = sum(moved.values()) / tier.bandwidth
    share = ceil(flow.blocks / machine.cores) * machine.cores / max(1, flow.blocks)
    busy = min(machine.cores, max(1, flow.blocks))
    overhead = machine.launch + flow.steps * machine.step / busy
    return Cost(overhead + share * slowest(stages), stages, overhead, nbytes)


def slowest(stages: Mapping[str, float]) -> float:
    """Seconds of stages that run at the same time, nearly."""
    worst = max(stages.values())
    return worst + UNHIDDEN * (sum(stages.values()) - worst)


def compute_seconds(flow: Dataflow, machine: Machine) -> float:
    """Arithmetic of all cores together."""
    seconds = flow.units / machine.vector
    for p in flow.products:
        seconds += product_seconds(p, machine)
    return seconds


def product_seconds(p: MatrixWork, machine: Machine) -> float:
    """Products of tiles: full register blocks, and packing of both operands at every call."""
    rows, cols = p.rows, p.cols
    if machine.kind == "cpu":
        if rows < cols or cols % MICRO_COLS:  # turned so that the longer side is contiguous
            rows, cols = (rows, cols) if cols % MICRO_COLS == 0 else (cols, rows)
        rows, cols = _up(rows, MICRO_ROWS), _up(cols, MICRO_COLS)
    flops = 2.0 * p.calls * rows * cols * p.depth
    packed = p.calls * p.depth * (p.rows + p.cols)
    return flops / machine.gemm_rate(p.dtype, library=False) + PACK_UNITS * packed / machine.vector


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def library_cost(
    kind: Kind, sizes: Sizes, nbytes: Mapping[str, float], dtype: DType, machine: Machine, launches: int = 1
) -> Cost:
    """A product that the library computes: its rate, and each operand and the result moved once. `launches`: times
    that of a kernel which the call takes to reach it (batched products go through an einsum)."""
    compute = sizes.flops / machine.call_rate(kind, dtype, sizes)
    stages = {"compute": compute}
    for tier in machine.tiers[1:]:
        at = sum(x for x in nbytes.values() if machine.home(x).bandwidth <= tier.bandwidth or tier.sharing == 1)
        stages[tier.name] = at / tier.bandwidth
    launch = launches * machine.launch
    return Cost(launch + slowest(stages), stages, launch, sum(nbytes.values()))
