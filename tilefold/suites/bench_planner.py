"""`tilefold bench planner`: predicted against measured time of fused kernels, and how good the chosen tiling is.

For each of 60 programs (20 kernels at three sizes) the eight tilings that the cost model likes best are compiled, their
results compared with the first's, and timed in turns. The figures: rank correlation (Spearman) of predicted and
measured time of the chosen tilings over all programs, and the share of programs in which the chosen tiling is within
5 % of the fastest of its eight. And how long planning takes itself: see `planning_time`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tilefold.block.fuse import FusedKernel, prepare
from tilefold.errors import TilefoldError
from tilefold.plan.candidates import Kernels
from tilefold.plan.forms import Form
from tilefold.plan.hardware import Machine
from tilefold.plan.machine import this_machine
from tilefold.plan.search import Shape
from tilefold.plan.targets.cpu import CpuTarget
from tilefold.runtime.steps import KernelStep, load_all
from tilefold.suites.gpu.environment import commit_here
from tilefold.suites.planner_programs import FAMILIES, Family
from tilefold.suites.planning_time import DECODERS, Planned, first_plan
from tilefold.suites.timing import interleave
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import estimate

TOP = 8
#: A choice counts as good if it takes at most this much longer than the fastest of its eight.
WITHIN = 1.05
#: Rounds whose fastest call is a tiling's time: other processes only ever slow one down.
ROUNDS = 24


@dataclass(frozen=True, slots=True)
class Timed:
    """A tiling: predicted and measured seconds."""

    tiles: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class PlannerRow:
    """One program at one size; `tilings` in the order of prediction, the first is the planner's choice."""

    name: str
    sizes: str
    tilings: tuple[Timed, ...]

    @property
    def choice(self) -> Timed:
        return self.tilings[0]

    @property
    def behind(self) -> float:
        """Time of the choice over that of the fastest."""
        return self.choice.measured / min(t.measured for t in self.tilings)


@dataclass(frozen=True, slots=True)
class PlannerReport:
    """All rows of a run, the machine description that they were predicted with, what planning took, and the commit."""

    machine: str
    threads: int
    rows: tuple[PlannerRow, ...]
    planned: tuple[Planned, ...] = ()
    commit: str = ""

    @property
    def correlation(self) -> float:
        """Spearman's, of predicted and measured time of the choices."""
        return spearman([r.choice.predicted for r in self.rows], [r.choice.measured for r in self.rows])

    @property
    def within(self) -> float:
        """Share of programs whose choice is within 5 % of the best of its eight."""
        return sum(r.behind <= WITHIN for r in self.rows) / len(self.rows) if self.rows else float("nan")


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Rank correlation of two samples; equal values share their mean rank. NaN for fewer than two."""
    if len(xs) < 2:
        return float("nan")
    a, b = (torch.tensor(_ranks(v), dtype=torch.float64) for v in (xs, ys))
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()))


def _ranks(xs: Sequence[float]) -> list[float]:
    return [sum(y < x for y in xs) + (sum(y == x for y in xs) - 1) / 2 for x in xs]


def run(
    names: Sequence[str] | None = None,
    *,
    top: int = TOP,
    commit: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> PlannerReport:
    """Time the families, and plan the decoders, whose name contains one of `names` (None: all).

    TilefoldError where none does.
    """

    def asked(name: str) -> bool:
        return names is None or any(n.lower() in name.lower() for n in names)

    chosen, decoders = [f for f in FAMILIES if asked(f.name)], [d for d in DECODERS if asked(d)]
    if not chosen and not decoders:
        raise TilefoldError(f"no program is called {names}", hint="; ".join([*(f.name for f in FAMILIES), *DECODERS]))
    tell = progress or (lambda _: None)
    machine = this_machine()
    rows: list[PlannerRow] = []
    planned: list[Planned] = []
    for d in decoders:
        tell(f"{d}: planning")
        planned.append(first_plan(d))
    with torch.no_grad():
        for f in chosen:
            tell(f"{f.name}: compiling the tilings")
            rows += family_rows(f, machine, top, tell)
    return PlannerReport(machine.name, torch.get_num_threads(), tuple(rows), tuple(planned), commit or commit_here())


def family_rows(
    f: Family, machine: Machine, top: int = TOP, tell: Callable[[str], None] = lambda _: None
) -> list[PlannerRow]:
    """A row for each size of a family."""
    p = prepare(f.program(), frozenset())
    ranked = [(k, found[:top]) for k, found in (tilings(p, machine, sizes) for sizes in f.sizes)]
    steps: dict[str, KernelStep] = {}
    for k, found in ranked:
        for s in found:
            steps.setdefault(str(s), KernelStep(k, dict(s.tiles), s.order))
    load_all(list(steps.values()))
    rows = []
    for sizes, (_, found) in zip(f.sizes, ranked, strict=True):
        tell(f"{f.name}: timing {_text(sizes)}")
        rows.append(_row(f, p, sizes, found, steps))
    return rows


def tilings(p: Program, machine: Machine, sizes: Mapping[str, int]) -> tuple[FusedKernel, tuple[Shape, ...]]:
    """The one kernel that a program is fused to, and its tilings, the one predicted to be fastest first."""
    made = Kernels(p, CpuTarget(machine), syms=sizes)
    group = made.group(made.dag.everything)
    assert group is not None
    form, (kernel,) = next(made.target.forms(made.graph, group))
    assert form == Form()
    return kernel, made.shapes(kernel)


def _row(
    f: Family, p: Program, sizes: Mapping[str, int], found: Sequence[Shape], steps: Mapping[str, KernelStep]
) -> PlannerRow:
    gen = torch.Generator().manual_seed(0)
    inputs = {
        i.name: torch.randn([estimate(e, sizes) for e in i.shape], generator=gen).to(i.dtype.torch_dtype)
        for i in p.inputs
    }
    held = [dict(inputs) for _ in found]
    calls = {str(s): (lambda s=s, t=t: steps[str(s)].run(t, sizes)) for s, t in zip(found, held, strict=True)}
    for call in calls.values():
        call()
    for name in p.outputs:
        for other in held[1:]:
            if not torch.allclose(other[name], held[0][name], rtol=1e-3, atol=1e-3, equal_nan=True):
                raise TilefoldError(f"{f.name} {_text(sizes)}: tilings disagree on {name}")
    series = interleave(calls, budget=1.0, rounds=ROUNDS)
    timed = tuple(Timed(str(s), s.cost.seconds, min(series[str(s)].seconds)) for s in found)
    return PlannerRow(f.name, _text(sizes), timed)


def _text(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{k}={n}" for k, n in sizes.items())
