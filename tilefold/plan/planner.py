"""The planner: which operators share a kernel, in which form, with which tiles; and the table that says why.

    candidates   sets of operators that are legal kernels, their snapshots and tilings        plan.candidates
    cost         dataflow over the tiers, minimax                                              plan.dataflow, plan.cost
    lattice      what a plan may be made of: ideals, and candidates that start there           plan.lattice
    select       the cheapest chain of ideals                                                  plan.select

Which device it is for, a `plan.target` says. Two ends are fixed before: products that the target leaves to the library
stay alone, and programs too large for the search are grouped greedily (`plan.greedy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain

from tilefold.block.fuse import Fused, FusedKernel, prepare
from tilefold.block.group import Group, Grouping, Refusal
from tilefold.block.legal import legal
from tilefold.errors import PlanError
from tilefold.garbage import collecting_later
from tilefold.plan.candidates import Kernels, Snapshot, together
from tilefold.plan.cost import Cost
from tilefold.plan.forms import Form
from tilefold.plan.greedy import group
from tilefold.plan.library import library_calls
from tilefold.plan.problem import Variant
from tilefold.plan.recompute import Choice, choices, rewritten, solve
from tilefold.plan.select import Chosen, Selection, select
from tilefold.plan.target import Target
from tilefold.tensor import streams
from tilefold.tensor.analysis import out_dims
from tilefold.tensor.hulls import bounded
from tilefold.tensor.ir import Program

#: Different kernels that are priced in a compilation; programs of large products need fewer.
BUDGET = 80
#: Recomputation is looked at in plans of at most this many kernels, with this many variants of them.
MOST_RECOMPUTED, MOST_WAYS = 12, 96
#: Programs of more operators are not planned but grouped greedily.
MOST_OPERATORS = 2000


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel of a plan: its operators, how it runs and what it is predicted to cost.

    `kernels`: its block programs (two where a fold is split, none for a library call), which are built when they are
    first asked for. `rival`: why the best plan without it lost.
    """

    members: tuple[str, ...]
    snapshot: Snapshot
    rival: str
    build: Callable[[], tuple[FusedKernel, ...]] = field(repr=False, compare=False)

    @cached_property
    def kernels(self) -> tuple[FusedKernel, ...]:
        return self.build()

    @property
    def cost(self) -> Cost:
        return self.snapshot.cost


@dataclass(frozen=True, slots=True)
class Plan:
    """The kernels in order. `program` is the program as it was grouped; `selection` has the sizes of the search.

    `made`: the candidates, of which every other grouping is priced under the same laws.
    """

    program: Program
    target: Target
    kernels: tuple[PlannedKernel, ...]
    selection: Selection
    refusals: tuple[Refusal, ...]
    made: Kernels = field(repr=False, compare=False)

    @property
    def seconds(self) -> float:
        """Predicted time of all kernels."""
        return sum(k.cost.seconds for k in self.kernels)

    @property
    def nbytes(self) -> float:
        """Predicted bytes moved between the kernels and memory (or the last cache)."""
        return sum(k.cost.nbytes for k in self.kernels)

    def fused(self) -> Fused:
        """As `block.fuse` gives it: a library call is the kernel of its product alone."""
        groups = tuple(dict.fromkeys(f.plan.group for k in self.kernels for f in k.kernels))
        return Fused(self.program, tuple(f for k in self.kernels for f in k.kernels), Grouping(groups, self.refusals))


def plan_program(
    p: Program,
    target: Target,
    *,
    syms: Mapping[str, int] | None = None,
    budget: int | None = BUDGET,
    rivals: bool = False,
) -> Plan:
    """Plan a normalised tensor program for a device. `budget`: different kernels to price before the search settles for
    what it has (None: never; `selection.exact` tells). `rivals`: also find out why the best plan without each kernel
    lost.

    PlanError where the program is too large for the search.
    """
    with collecting_later():
        return _plan(p, target, syms, budget, rivals)


def _plan(
    p: Program,
    target: Target,
    syms: Mapping[str, int] | None,
    budget: int | None,
    rivals: bool,
) -> Plan:
    p, copies = streams.apart(p, target.room)
    p = bounded(p)
    inside = frozenset[str]().union(*copies)
    if target.machine.kind == "cpu":  # a GPU's products in front of folds are no library calls in any case
        inside |= streams.belongs(p)
    p, calls = library_calls(p, target.products(p) - inside, copied=target.machine.kind == "cpu")
    apart = frozenset(chain.from_iterable(calls))
    p = prepare(p, apart)
    if len(p.body) > MOST_OPERATORS:
        raise PlanError(f"{len(p.body)} operators are too many to plan at once")

    def search(q: Program) -> tuple[Kernels, Selection]:
        made = Kernels(q, target, apart, syms, inside, copies)
        return made, select(made.problem(budget), rivals=rivals)

    made, found = search(p)
    again = _recomputed(made, found)
    if again is not None:
        try:
            other, better = search(again)
        except PlanError:  # with the copies it is too large, or has an operator of no kernel: it stays without them
            better = found
        if better.seconds < found.seconds:
            made, found = other, better
    groups: dict[int, Group] = {}
    if not found.exact:  # the greedy grouping may have larger kernels than the search looked at
        groups = {made.dag.mask(x.members): x for x in group(made.program, apart, target.limits).groups}
        other_way = _total(made, [(s, made.snapshots(x)) for s, x in groups.items()])
        keeps = any(made.mixes(s) or made.stored(s) for s in groups)
        if not keeps and other_way.seconds < found.seconds:
            found = replace(found, kernels=other_way.kernels, seconds=other_way.seconds)
    kernels = _with_calls(made, [_planned(made, found, c, rivals, groups) for c in found.kernels], calls)
    return Plan(made.program, target, kernels, found, _refusals(made, kernels), made)


def _recomputed(made: Kernels, found: Selection) -> Program | None:
    """The program with copies of the maps that are cheaper to compute again than to store; None if there are none."""
    kernels = [made.dag.members(k.members) for k in found.kernels]
    if len(kernels) > MOST_RECOMPUTED:
        return None
    ways = choices(made.program, kernels, made.apart, MOST_WAYS)
    if not any(w.again for w in ways):
        return None

    def cost(w: Choice) -> float:
        assert w.program is not None
        apart = made.apart & {c.name for c in w.program.body}
        alone = Kernels(w.program, made.target, apart, made.syms)
        legal_one = alone.bound(alone.dag.everything) is not None
        priced = alone.variants(alone.dag.everything) if legal_one else ()
        return priced[0].seconds if priced else 1.0  # not one kernel: as good as forbidden

    chosen = solve(made.program, ways, cost)
    return rewritten(made.program, kernels, chosen) if any(w.again for w in chosen) else None


def _planned(made: Kernels, found: Selection, c: Chosen, rivals: bool, groups: Mapping[int, Group]) -> PlannedKernel:
    snapshot = _snapshot(c.variant)
    members = made.group(c.members) or groups.get(c.members)
    assert members is not None
    build = partial(made.build, members, snapshot.form or Form())
    return PlannedKernel(members.members, snapshot, _rival(made, found, c, rivals), build)


def _with_calls(
    made: Kernels, kernels: Sequence[PlannedKernel], calls: Iterable[tuple[str, ...]]
) -> tuple[PlannedKernel, ...]:
    """The kernels with those that one library call computes made one, which is where its last statement was."""
    call_of = {m: members for members in calls for m in members}
    out = []
    for k in kernels:
        members = call_of.get(k.members[-1], k.members)
        if len(members) == 1 or k.snapshot.form is not None:
            out.append(k)
        elif members[-1] == k.members[-1]:
            whole = Group(members, out_dims(made.graph.by_name[members[-1]]))
            out.append(replace(k, members=members, build=partial(made.build, whole, Form())))
    return tuple(out)


def _rival(made: Kernels, found: Selection, c: Chosen, rivals_known: bool) -> str:
    """What the best other plan does with these operators, and what makes it slower."""
    if c.runner_up is None:
        return "no other kernel is legal" if rivals_known else ""
    rivals = [k for k in c.instead if k & c.members]
    ours = [k for k in found.kernels if any(k.members & r for r in rivals)]
    names = " | ".join(short(made.dag.members(r)) for r in rivals)
    cost = together([_snapshot(made.variants(r)[0]).cost for r in rivals])
    mine = together([_snapshot(k.variant).cost for k in ours])
    reasons = []
    if len(rivals) > len(ours):
        reasons.append(f"{len(rivals) - len(ours)} more launches" if len(rivals) > len(ours) + 1 else "a launch more")
    if cost.nbytes > 1.001 * mine.nbytes:
        reasons.append(f"{bytes_text(cost.nbytes - mine.nbytes)} more moved")
    slower = [s for s in cost.stages if cost.stages[s] > 1.001 * mine.stages.get(s, 0.0)]
    slower = [s for s in slower if s == cost.bottleneck]
    reasons += [f"{time_text(cost.stages[s] - mine.stages.get(s, 0.0))} more {s}" for s in slower]
    return f"+{time_text(c.behind)}: {names}" + (f" ({', '.join(reasons)})" if reasons else "")


def _snapshot(v: Variant) -> Snapshot:
    assert isinstance(v.what, Snapshot)
    return v.what


def _refusals(made: Kernels, kernels: Sequence[PlannedKernel]) -> tuple[Refusal, ...]:
    """Why each producer and consumer in different kernels are so."""
    of = {m: k for k in kernels for m in k.members}
    out = []
    for c in made.program.body:
        for r in made.graph.producers[c.name]:
            if of[r] is of[c.name]:
                continue
            out.append(Refusal(r, c.name, _cut(made, of[r], of[c.name]), c.loc))
    return tuple(out)


def _cut(made: Kernels, a: PlannedKernel, b: PlannedKernel) -> str:
    if a.snapshot.form is None or b.snapshot.form is None:
        return "a library call computes it"
    both = made.dag.mask((*a.members, *b.members))
    if not made.dag.convex(both):
        return "another kernel stands between them"
    members = made.dag.members(both)
    found = legal(made.graph, members, made.target.limits)
    if isinstance(found, str):
        return found
    if members in made.refused:
        return made.refused[members]
    more = made.at_least(both) - a.cost.seconds - b.cost.seconds
    return f"one kernel is predicted to take {time_text(more)} more" if more > 0 else "another plan is predicted faster"


def greedy(plan: Plan) -> Selection:
    """The greedy grouping of a plan's program, priced in the same way (for comparison)."""
    made = plan.made
    groups = group(made.program, made.apart, plan.target.limits).groups
    return _total(made, [(made.dag.mask(x.members), made.snapshots(x)) for x in groups])


def unfused(plan: Plan) -> Selection:
    """Every operator of a plan's program a kernel of its own, priced in the same way (for comparison)."""
    made = plan.made
    alone = [1 << k for k in range(len(made.dag.names))]
    return _total(made, [(s, [_snapshot(v) for v in made.variants(s)]) for s in alone])


def _total(made: Kernels, sets: Sequence[tuple[int, Sequence[Snapshot]]]) -> Selection:
    chosen = []
    for s, ways in sets:
        best = min(ways, key=lambda w: w.seconds)
        chosen.append(Chosen(s, Variant(best.seconds + made.storing(s), what=best), None, (), 0.0))
    return Selection(tuple(chosen), sum(c.variant.seconds for c in chosen), 0, len(sets), len(sets))


def moved(found: Selection) -> float:
    """Predicted bytes of a selection whose variants are snapshots."""
    return sum(_snapshot(c.variant).cost.nbytes for c in found.kernels)


def describe(plan: Plan) -> list[tuple[str, str, str, str, str]]:
    """The table of a plan: operators, form and tiles, bytes, time, and why the best plan without the kernel lost."""
    rows = []
    for k in plan.kernels:
        tiles = "; ".join(str(s) for s in k.snapshot.shapes)
        how = f"{k.snapshot}, {tiles}" if tiles else str(k.snapshot)
        rows.append((short(k.members), how, bytes_text(k.cost.nbytes), time_text(k.cost.seconds), k.rival))
    return rows


def short(members: Sequence[str]) -> str:
    """Operators of a kernel, the first and the last of many."""
    if len(members) <= 6:
        return " ".join(members)
    return f"{' '.join(members[:2])} ... {' '.join(members[-2:])} ({len(members)})"


def time_text(seconds: float) -> str:
    """For people."""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def bytes_text(n: float) -> str:
    """For people."""
    return f"{n / 1e6:.2f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"
