"""`tilefold bench planner --device cuda`: how well predictions for GPUs rank programs, and whether they choose well.

The programs are those of `suites.programs`: nothing in the prices was fitted to them. Each is planned greedily and by
predicted time; where these differ, both plans run. The figures: Spearman's rank correlation of predicted and measured
time over the programs, in all and a class, and in how many of the programs with two plans the one that is predicted to
be faster is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table

from tilefold.errors import TilefoldError
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program, gpu_kernels
from tilefold.plan.hardware import Gpu
from tilefold.plan.selected import predicted
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.suites.bench_planner import spearman
from tilefold.suites.gpu.case import GpuCase
from tilefold.suites.gpu.measure import Timer
from tilefold.suites.programs.all import PROGRAMS
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import estimate

#: Rounds and seconds of a plan.
ROUNDS, SECONDS = 30, 0.05
#: Runs a program on tensors by name; as `pipeline.compile_program` gives it.
Compiled = Callable[[Mapping[str, torch.Tensor], Mapping[str, int]], object]


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """Kernels and calls of a plan, and its seconds."""

    kernels: int
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class GpuPlannerRow:
    """A program. `selected`: the plan by predicted time, where it is another than the greedy one."""

    name: str
    family: str
    greedy: TimedPlan
    selected: TimedPlan | None = None

    @property
    def right(self) -> bool | None:
        """Whether the plan that is predicted to be faster is; None where there is one plan."""
        if self.selected is None:
            return None
        return (self.selected.predicted < self.greedy.predicted) == (self.selected.measured < self.greedy.measured)


@dataclass(frozen=True, slots=True)
class GpuPlannerReport:
    """Rows, and the programs that were not timed with the reason."""

    machine: str
    policy: str
    rows: tuple[GpuPlannerRow, ...]
    left: tuple[tuple[str, str], ...] = ()

    def correlation(self, family: str | None = None) -> float:
        """Of the greedy plans of a class, or of all. NaN for fewer than two."""
        chosen = [r.greedy for r in self.rows if family in (None, r.family)]
        return spearman([p.predicted for p in chosen], [p.measured for p in chosen])

    @property
    def choices(self) -> tuple[int, int]:
        """Programs with two plans of which the faster one was predicted, and all programs with two plans."""
        known = [r.right for r in self.rows if r.right is not None]
        return sum(known), len(known)


def run(
    machine: Gpu,
    timer: Timer,
    *,
    device: str = "cuda",
    names: Sequence[str] | None = None,
    small: bool = False,
    compiled: Callable[..., Compiled] = compile_program,
    progress: Callable[[str], None] = lambda text: None,
) -> GpuPlannerReport:
    """Time the programs whose name or class contains one of `names` (None: all). TilefoldError where none does.

    compiled: makes a plan run; `search=True` asks for the one by predicted time.
    """
    cases = [p.case(small=small) for p in PROGRAMS]
    cases = [c for c in cases if names is None or any(n.lower() in f"{c.family}: {c.row}".lower() for n in names)]
    if not cases:
        raise TilefoldError(f"no program is called {', '.join(names or ())}")
    rows, left = [], []
    for c in cases:
        progress(c.row)
        try:
            rows.append(_row(c, machine, timer, device, compiled))
        except (TilefoldError, RuntimeError) as err:  # not covered, cannot be captured, too large: said in the report
            left.append((c.row, str(err).splitlines()[0]))
        timer.release()
    return GpuPlannerReport(machine.name, timer.policy, tuple(rows), tuple(left))


def _row(c: GpuCase, machine: Gpu, timer: Timer, device: str, compiled: Callable[..., Compiled]) -> GpuPlannerRow:
    placed = c.placed("meta")
    torch._dynamo.reset()  # it makes sizes dynamic that it saw change
    args = [x.to("meta") for x in c.args(device)]
    p = trace(placed.fn, *args).program
    inputs = _inputs(p, device)
    plans, kept = [], []
    for search in (False, True):
        target = GpuTarget(machine, search=search)
        made = gpu_kernels(p, target)
        groups = [k.plan.group.members for k in made.fused.kernels]
        if groups in kept:
            break
        kept.append(groups)
        run_it = compiled(p, device=device, search=search)
        ready = timer.ready(partial(_call, run_it, inputs))
        measured = timer.rounds({"": ready}, most=ROUNDS, budget=SECONDS)[""].median
        plans.append(TimedPlan(len(groups), predicted(made.fused, target, made.every_call), measured))
    return GpuPlannerRow(c.row, c.family, *plans)


def _call(compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> object:
    return compiled(dict(inputs), {})


def _inputs(p: Program, device: str) -> dict[str, torch.Tensor]:
    """Normal numbers; indices and masks are zeros."""
    found: dict[str, torch.Tensor] = {}
    for i in p.inputs:
        shape, dtype = [estimate(e) for e in i.shape], i.dtype.torch_dtype
        made: Any = torch.randn(shape, device=device).to(dtype) if i.dtype.is_float else None
        found[i.name] = torch.zeros(shape, dtype=dtype, device=device) if made is None else made
    return found


def table(report: GpuPlannerReport) -> Table:
    """One row a program, those that are predicted worst first: microseconds."""
    out = Table(title=f"{report.machine}: {report.policy}", title_justify="left")
    out.add_column("program")
    for head in ("kernels", "predicted", "measured", "by price: kernels", "predicted", "measured"):
        out.add_column(head, justify="right")
    for r in sorted(report.rows, key=lambda r: -abs(math.log(r.greedy.predicted / r.greedy.measured))):
        out.add_row(r.name, *_cells(r.greedy), *(("", "", "") if r.selected is None else _cells(r.selected)))
    return out


def _cells(p: TimedPlan) -> tuple[str, str, str]:
    return str(p.kernels), f"{1e6 * p.predicted:.1f}", f"{1e6 * p.measured:.1f}"


def summary(report: GpuPlannerReport) -> Iterator[str]:
    """The figures in lines."""
    right, known = report.choices
    yield f"{len(report.rows)} programs: rank correlation of predicted and measured time {report.correlation():.3f}"
    for family in dict.fromkeys(r.family for r in report.rows):
        yield f"  {family}: {report.correlation(family):.3f}"
    yield f"of {known} programs with two plans, the one that is predicted to be faster is in {right}"
    yield from (f"not timed: {name}: {why}" for name, why in report.left)
