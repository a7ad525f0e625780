"""Groups of a device selected by price, and the prices of fused programs.

A GPU's groups are greedy as long as nobody has measured what others would gain (`GpuTarget.search`): this is the other
way to choose them, and what puts a price on both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tilefold.block.fuse import Fused
from tilefold.block.group import Group, Grouping, Refusal
from tilefold.block.legal import legal
from tilefold.errors import PlanError
from tilefold.plan.attention import attention_call, extents, library_seconds
from tilefold.plan.candidates import Kernels, Snapshot, together
from tilefold.plan.cost import Cost
from tilefold.plan.forms import Form
from tilefold.plan.greedy import ordered
from tilefold.plan.hardware import Gpu
from tilefold.plan.planner import BUDGET, MOST_OPERATORS
from tilefold.plan.select import select
from tilefold.plan.target import Target
from tilefold.tensor.analysis import Graph, out_dims
from tilefold.tensor.ir import Program

Calls = Collection[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Selected:
    """A grouping, and the forms of groups whose price says so (of the others, the target's first)."""

    grouping: Grouping
    forms: Mapping[Group, Form]


@dataclass(frozen=True, slots=True)
class Priced:
    """A kernel, or split kernels, of a fused program: operators, how they run, and the predicted cost."""

    members: tuple[str, ...]
    how: str
    cost: Cost


def selected(
    p: Program, target: Target, apart: frozenset[str], calls: Calls = (), budget: int | None = BUDGET
) -> Selected:
    """The cheapest groups of a program (after `align_reductions`). apart: operators that stay alone, those of one of
    `calls` together. PlanError where the program is too large."""
    if len(p.body) > MOST_OPERATORS:
        raise PlanError(f"{len(p.body)} operators are too many to plan at once")
    made = Kernels(p, target, apart)
    ways: dict[Group, Snapshot] = {}
    for c in select(made.problem(budget), rivals=False).kernels:
        x = made.group(c.members)
        assert x is not None and isinstance(c.variant.what, Snapshot)
        ways[x] = c.variant.what
    whole = {m: Group(call, out_dims(made.graph.by_name[call[-1]])) for call in calls for m in call}
    of = {m: whole.get(m, x) for x in ways for m in x.members}
    groups = ordered(made.graph, list(dict.fromkeys(of.values())), of)
    forms = {x: way.form for x, way in ways.items() if way.form is not None and x in groups}
    return Selected(Grouping(groups, _refusals(made, of, apart)), forms)


def _refusals(made: Kernels, of: Mapping[str, Group], apart: frozenset[str]) -> tuple[Refusal, ...]:
    """Why producers and consumers of different groups are so."""
    out = []
    for c in made.program.body:
        for r in made.graph.producers[c.name]:
            a, b = of[r], of[c.name]
            if a is not b:
                out.append(Refusal(r, c.name, _reason(made, a, b, apart), c.loc))
    return tuple(out)


def _reason(made: Kernels, a: Group, b: Group, apart: frozenset[str]) -> str:
    members = {*a.members, *b.members}
    if apart & members:
        return "a library call computes it"
    both = made.dag.mask(members)
    if not made.dag.convex(both):
        return "another kernel stands between them"
    found = legal(made.graph, made.dag.members(both), made.target.limits)
    return found if isinstance(found, str) else "another plan is predicted faster"


def predicted(fused: Fused, target: Target, calls: Calls) -> float:
    """Seconds of all kernels and calls."""
    return sum(x.cost.seconds for x in priced(fused, target, calls))


def priced(fused: Fused, target: Target, calls: Calls) -> tuple[Priced, ...]:
    """What the kernels of a fused program are predicted to cost, those of library calls included."""
    apart = frozenset(m for call in calls for m in call)
    made = Kernels(fused.program, target, apart)
    g = Graph.of(fused.program)
    done: list[Priced] = []
    for x in dict.fromkeys(k.plan.group.members for k in fused.kernels):
        whole = _attention(g, x, target, made) if x in calls else None
        if whole is not None:
            done.append(Priced(x, "library", whole))
            continue
        call = made.calls.get(x[0]) if x in calls else None
        if call is not None:
            done.append(Priced(x, "library", made.library(call)))
            continue
        kernels = [k for k in fused.kernels if k.plan.group.members == x]
        costs = [made.shapes(k)[0].cost for k in kernels]
        passes = len(kernels[0].plan.stages)
        how = "split" if len(kernels) > 1 else "passes" if passes > 1 else "one pass" if _reduces(g, x) else "maps"
        done.append(Priced(x, how, together(costs)))
    return tuple(done)


def _attention(g: Graph, members: tuple[str, ...], target: Target, made: Kernels) -> Cost | None:
    """The price of a call that is an attention."""
    x, machine = attention_call(g, g.by_name[members[-1]]), target.machine
    if x is None or x.members != members or not isinstance(machine, Gpu):
        return None
    seconds = library_seconds(extents(g, x), machine)
    stages = {"compute": seconds - machine.call}
    return Cost(seconds, stages, machine.call, sum(made.traffic(members).values()))


def _reduces(g: Graph, members: Sequence[str]) -> bool:
    return any(g.by_name[m].reducer is not None for m in members)
