"""The automatic road as a sequence of laws: the steps that lead from the unfused program to what `block.fuse` makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilefold.block.build import Loops, choose_loops
from tilefold.block.fuse import Fused, with_unit
from tilefold.block.group import Group
from tilefold.block.laws.nests import feeding
from tilefold.block.split import SEGMENTS, worth_splitting
from tilefold.block.stages import StagePlan, plan_stages
from tilefold.tensor.analysis import Graph, out_dims


@dataclass(frozen=True, slots=True)
class Step:
    """One application of the law called `law`; `at` is the axis of a fusion of passes."""

    law: str
    args: tuple[str | int, ...]
    at: str | None = None

    def __str__(self) -> str:
        args = [repr(a) for a in self.args] + ([f"at={self.at!r}"] if self.at else [])
        return f"{self.law}({', '.join(args)})"


def steps_of(f: Fused) -> Iterator[Step]:
    """The decisions of the automatic road, kernel by kernel."""
    g = Graph.of(f.program)
    for group in f.grouping.groups:
        plan = plan_stages(g, with_unit(group))
        loops = choose_loops(g, plan)
        if len(group.members) > 1:
            yield Step("fuse", group.members)
        yield from _parallel(g, group)
        yield from _passes(g, plan)
        yield from _loops(g, plan, loops)
        if worth_splitting(g, plan):
            axis = loops.stages[0]
            assert axis is not None
            yield Step("split_k_update", (plan.stages[0].reductions[0], axis, SEGMENTS))


def _parallel(g: Graph, group: Group) -> Iterator[Step]:
    """Dims that some members are repeated over."""
    computes = [g.by_name[m] for m in group.members]
    for d in group.parallel:
        having = [c for c in computes if d in out_dims(c)]
        if len(having) < len(computes):
            yield Step("extend", (having[-1].name, d))


def _passes(g: Graph, plan: StagePlan) -> Iterator[Step]:
    """Reductions that share a pass, one joining after the other."""
    for stage in plan.stages:
        first, *rest = stage.reductions
        joined = [first]
        for r in rest:
            if feeding(g, r, frozenset(joined)):
                yield Step("rolling_update", (r, stage.axes[0]))
            else:
                yield Step("fuse", (first, r), at=stage.axes[0])
            joined.append(r)


def _loops(g: Graph, plan: StagePlan, loops: Loops) -> Iterator[Step]:
    for stage, dim in zip(plan.stages, loops.stages, strict=True):
        if dim is not None:
            yield Step("tile", (stage.reductions[0], dim))
    for name, dim in loops.rows.items():
        if dim is not None and (g.by_name[name].reducer is None or name in plan.inner):
            yield Step("tile", (name, dim))
