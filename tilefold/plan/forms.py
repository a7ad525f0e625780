"""The snapshots of a group: the block programs that it can become, for the cost model to choose from.

one pass    dependent reductions share a pass over their axes (a Fold exists)
passes      each waits for the one before it: the row is read again, nothing is repaired
split n     the fold is cut into n segments, and a second kernel combines them (split-k)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilefold.block.build import Loops, choose_loops
from tilefold.block.fuse import FusedKernel, build_kernels, with_unit
from tilefold.block.group import Group
from tilefold.block.split import SEGMENTS
from tilefold.block.stages import StagePlan, plan_stages
from tilefold.plan.hardware import Machine
from tilefold.tensor.analysis import Graph, is_static, out_dims

#: A fold is cut where its grid has fewer blocks than this a core, and each segment at least SHORTEST elements.
BLOCKS_A_CORE = 2
SHORTEST = 1024


@dataclass(frozen=True, slots=True)
class Form:
    """`joined`: one pass where a Fold exists. `segments`: 0 for one kernel, else the parts of a split fold."""

    joined: bool = True
    segments: int = 0

    def __str__(self) -> str:
        if self.segments:
            return f"split {self.segments}"
        return "one pass" if self.joined else "passes"


def forms(g: Graph, group: Group, machine: Machine) -> Iterator[tuple[Form, tuple[FusedKernel, ...]]]:
    """Every snapshot of a legal group with its kernels; the first is the automatic one without a split."""
    plan = plan_stages(g, with_unit(group))
    loops = choose_loops(g, plan)
    yield Form(), build_kernels(g, plan, loops, None)
    passes = separate(g, plan)
    if passes is not None:
        apart = plan_stages(g, with_unit(group), passes)
        yield Form(joined=False), build_kernels(g, apart, choose_loops(g, apart), None)
    for n in segments(g, plan, loops, machine):
        yield Form(segments=n), build_kernels(g, plan, loops, n)


def build_form(g: Graph, group: Group, form: Form) -> tuple[FusedKernel, ...]:
    """The kernels of one snapshot of a group (one of `forms`)."""
    plan = plan_stages(g, with_unit(group))
    if not form.joined:
        plan = plan_stages(g, with_unit(group), separate(g, plan))
    return build_kernels(g, plan, choose_loops(g, plan), form.segments or None)


def separate(g: Graph, plan: StagePlan) -> tuple[tuple[str, ...], ...] | None:
    """The passes of a plan with dependent reductions taken apart; None if no two of a stage depend on each other."""
    out: list[tuple[str, ...]] = []
    for stage in plan.stages:
        depth: dict[str, int] = {}
        for r in stage.reductions:
            depth[r] = max((depth[d] + 1 for d in depth if d in _above(g, r, plan.group.members)), default=0)
        out += [tuple(r for r in stage.reductions if depth[r] == n) for n in range(max(depth.values()) + 1)]
    return tuple(out) if len(out) > len(plan.stages) else None


def _above(g: Graph, name: str, members: tuple[str, ...]) -> set[str]:
    """Members that a member depends on."""
    found: set[str] = set()
    todo = [name]
    while todo:
        fresh = [r for r in g.producers[todo.pop()] if r in members and r not in found]
        found.update(fresh)
        todo += fresh
    return found


def segments(g: Graph, plan: StagePlan, loops: Loops, machine: Machine) -> tuple[int, ...]:
    """Numbers of segments worth pricing: only a single looping pass over a long axis with few blocks beside it."""
    members = plan.group.members
    if len(plan.stages) != 1 or loops.stages[0] is None or set(plan.inner) & set(members):
        return ()
    axis, axes = loops.stages[0], set(plan.stages[0].axes)
    if any(g.escapes(m, members) and axes & set(out_dims(g.by_name[m])) for m in members):
        return ()  # a result that streams along the axis
    parallel = plan.group.parallel
    if g.points(parallel) >= BLOCKS_A_CORE * machine.cores or not all(is_static(g.program.sizes[d]) for d in parallel):
        return ()
    most = g.extent(axis) // SHORTEST
    return tuple(n for n in dict.fromkeys((machine.cores, SEGMENTS)) if 1 < n <= most)
