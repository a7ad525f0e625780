"""Groups for a GPU: greedy or selected by price, then made to fit kernels.

Groups share the test, the laws and the Folds with the CPU's (`block.legal`, `plan.select`). On a GPU they are then
changed where that is estimated faster: products inside folds are split in two steps, what is written along a reduced
axis gets a kernel of its own, and what no kernel can hold is cut.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Load, dims_used, loads
from tilefold.block.fuse import UNIT, Fused, FusedKernel
from tilefold.block.group import Group, Grouping, Limits, Refusal
from tilefold.block.legal import one_kernel
from tilefold.block.twins import Decided, Known, Named, Renaming, Twins
from tilefold.errors import PlanError, TilefoldError
from tilefold.plan.cut import components, cuts
from tilefold.plan.few_rows import feeding_products
from tilefold.plan.folded import call_seconds
from tilefold.plan.forms import Form
from tilefold.plan.gpu_again import computed_again
from tilefold.plan.gpu_folds import separated
from tilefold.plan.gpu_forms import Predicted, split_contractions
from tilefold.plan.gpu_library import lone_product
from tilefold.plan.gpu_lookups import lookups_apart
from tilefold.plan.gpu_states import states_apart
from tilefold.plan.gpu_taps import windows_under_sums
from tilefold.plan.greedy import MOST_READ, group, ordered
from tilefold.plan.lighter import Lighter
from tilefold.plan.nearer import nearer
from tilefold.plan.selected import Calls, Selected, predicted, selected
from tilefold.plan.shared_heads import of_results, of_several_heads
from tilefold.plan.short_products import of_few_sums
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.plan.whole_sums import whole_sums
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Program
from tilefold.tensor.product import product_of
from tilefold.tensor.reduction_laws import align_reductions, as_memory_lies

#: Cuts of a group that does not fit whose parts are tried, the cheapest first.
MOST_CUTS = 24
#: Members of a group that does not fit from which a small part that does not fit either is looked for first.
MANY = 16
#: Of the time of two kernels that one of both takes at most, to be taken for them: of a map and what sums it; of two
#: that read the same, of which one then has the other's tiles. On an H200, forecast and measured, of whole training
#: steps: 0.49 to 0.69 0.4 to 6.5 % less, 0.80 1 % less and 4 % more, 0.86 3 % more.
LESS, ALIKE = 0.9, 0.78
log = logging.getLogger("tilefold")

#: How groups are chosen: of a program for a target, with operators that stay alone and library calls.
Grouper = Callable[[Program, GpuTarget, frozenset[str], Calls], Selected]
#: An H100, greedy groups.
USUAL = GpuTarget()


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a group is made, and why not one kernel."""

    groups: tuple[Group, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class Decisions:
    """What was decided of groups for one target: it holds for their twins in the same program, planned again."""

    against: Known[str | None] = field(default_factory=dict)
    forecasts: Known[Predicted | None] = field(default_factory=dict)
    parts: Known[_Parts] = field(default_factory=dict)
    near: Known[_Parts] = field(default_factory=dict)


def fuse_for_gpu(
    p: Program, target: GpuTarget = USUAL, *, calls: Calls = (), decisions: Decisions | None = None
) -> Fused:
    """Fuse `p` for a device. The statements of one of `calls` become a kernel of their own, which the caller replaces
    by a library's. decisions: of an earlier plan for the same target, which takes those of this one.

    Groups that no kernel can be made of (`GpuTarget.against`) are cut where that adds the least traffic, until what is
    left fits; single operators are taken as they are. Groups are greedy; a target that searches takes those of the
    least price instead, where all that is made of them is predicted to be faster.
    """
    decisions = Decisions() if decisions is None else decisions
    usual = _fused(p, target, calls, _greedy, decisions)
    if not target.search:
        return usual
    try:
        other = _fused(p, target, calls, _by_price, decisions)
    except PlanError as err:
        log.info("%s is grouped greedily: %s", p.name, err.message)
        return usual
    return min(usual, other, key=lambda found: predicted(found, target, calls))


def _fused(p: Program, target: GpuTarget, calls: Calls, groups_of: Grouper, decisions: Decisions) -> Fused:
    apart = frozenset(m for call in calls for m in call)
    machine = target.machine
    p = as_memory_lies(align_reductions(replace(p, sizes={**p.sizes, UNIT: Const(1, DType.I64)}), apart))
    p = of_results(p)
    g = Graph.of(p)
    windows = windows_under_sums(g, machine, apart)
    apart |= feeding_products(g, machine) | frozenset(c.name for c in p.body if of_few_sums(g, c)) | windows
    apart |= of_several_heads(g)
    chosen = groups_of(p, target, apart, calls)
    p, alone = split_contractions(p, g, chosen.grouping.groups, machine)
    if alone:
        g = Graph.of(p)
        chosen = groups_of(p, target, apart | alone, calls)
    groups = list(chosen.grouping.groups)
    if target.given is None:
        p, groups = whole_sums(p, groups, target.limits)
        g = Graph.of(p)
        whole = _Fitting(g, target, frozenset(calls), chosen.forms, decisions)
        p, groups = separated(p, g, groups, machine, frozenset(calls), whole.fits)
        p, groups = computed_again(p, groups, machine, target.limits, frozenset(calls), windows)
        p, groups = states_apart(p, groups, machine, target.limits, frozenset(calls))
    refusals: list[Refusal] = []

    def fitting_of(p: Program) -> _Fitting:
        return _Fitting(Graph.of(p), target, frozenset(calls), chosen.forms, decisions)

    def fit(fitting: _Fitting, groups: Sequence[Group], *, near: bool = True) -> list[Group]:
        refusals[:] = chosen.grouping.refusals
        parts = [x for members in groups for x in fitting.parts(members, refusals)]
        return [y for x in parts for y in fitting.near(x)] if near else parts

    fitting, usual = fitting_of(p), target.given is None
    for near in (False, True) if usual else ():
        fitted = fit(fitting, groups, near=near)
        if len(fitted) > len(groups):
            # parts are groups too, those behind a product that is cut off before they are asked how long they take
            other, parts = separated(p, fitting.g, fitted, machine, frozenset(calls), fitting.fits)
            if len(parts) > len(fitted):
                p, groups, fitting = other, parts, fitting_of(other)
    fitted = fit(fitting, groups)
    if usual:
        other, parts = lookups_apart(p, fitted, machine, target.limits, frozenset(calls))
        if len(parts) > len(fitted):
            p, fitting = other, fitting_of(other)
            fitted = fit(fitting, parts)
    fitted, heavy = fitting.lighter(fitting.joined(fitted))
    kernels = tuple(k for x in fitted for k in fitting.kernels(x))
    return Fused(p, kernels, Grouping(tuple(fitted), (*refusals, *heavy)))


def _greedy(p: Program, target: GpuTarget, apart: frozenset[str], calls: Calls) -> Selected:
    return Selected(group(p, apart, target.limits, calls=calls), {})


def _by_price(p: Program, target: GpuTarget, apart: frozenset[str], calls: Calls) -> Selected:
    return selected(p, target, apart, calls)


def _of_twin(g: Graph, found: _Parts, names: Renaming) -> _Parts:
    """What the twin of a group is made."""
    loc = {b: g.by_name[b].loc for r in found.refusals for b in names.tensors((r.consumer,))}
    refusals = [(*names.tensors((r.producer, r.consumer)), names.text(r.reason)) for r in found.refusals]
    return _Parts(tuple(map(names.group, found.groups)), tuple(Refusal(a, b, why, loc[b]) for a, b, why in refusals))


class _Fitting:
    """Groups made to fit kernels. What was built is remembered: several cuts have the same part. What fits and what
    does not is the same for groups that differ in names only. decisions: of other fittings for the same target."""

    def __init__(
        self,
        g: Graph,
        target: GpuTarget,
        calls: frozenset[tuple[str, ...]],
        forms: Mapping[Group, Form],
        decisions: Decisions | None = None,
    ):
        known = Decisions() if decisions is None else decisions
        self.g, self.target, self.calls, self.forms = g, target, calls, forms
        self._built: dict[Group, tuple[FusedKernel, ...]] = {}
        self._unfit: list[frozenset[str]] = []
        self._given: dict[Group, frozenset[Load]] = {}
        self._twins = Twins(g)
        self._against = Decided[str | None](lambda found, names: found and names.text(found), known.against)
        self._forecasts = Decided[Predicted | None](lambda found, names: found, known.forecasts)
        of_twin = partial(_of_twin, g)  # no method: a fitting is done with at once, without a collector
        self._parts = Decided(of_twin, known.parts)
        self._near = Decided(of_twin, known.near)

    def kernels(self, x: Group) -> tuple[FusedKernel, ...]:
        """Of a group that fits."""
        why = self.refusal(x)
        assert why is None, why
        return self._build(x)

    def parts(self, x: Group, refusals: list[Refusal]) -> tuple[Group, ...]:
        """The group, or what it is cut into: the cheapest two parts that both fit; if there are none, the parts of the
        cheapest cut."""
        found = self._parts.of(*self._known_by(x), lambda: self._cut(x))
        refusals += found.refusals
        return found.groups

    def fits(self, x: Group) -> bool:
        """Whether kernels can be made of a group."""
        return self.refusal(x) is None

    def _known_by(self, x: Group) -> tuple[Named, Hashable]:
        """What decides about a group, without names."""
        named, parallel = self._twins.keyed(x)
        return named, (parallel, x.members in self.calls, self.forms.get(x))

    def _cut(self, x: Group) -> _Parts:
        why = self.refusal(x)
        if why is None:
            return _Parts((x,), ())
        ways = cuts(self.g, x.members)
        if len(x.members) > MANY:
            self._halve(x, ways)
        fit = next(((way, found) for way in ways[:MOST_CUTS] if (found := self._fit(*way))), None)
        (first, second), found = fit or (ways[0], [])
        refusals = [
            Refusal(a, b, why, self.g.by_name[b].loc) for a in first for b in second if a in self.g.producers[b]
        ]
        if not found:
            found = [y for part in (first, second) for z in self._legal(part) for y in self.parts(z, refusals)]
            found = self._put_back(found)
        return _Parts(tuple(z for y in found for z in self._product_alone(y)), tuple(refusals))

    def _halve(self, x: Group, ways: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]) -> None:
        """Find out which members of a group do not fit, half by half: cuts that leave them together are not tried then
        (of the gradients of a recurrence, all that cut off a step)."""
        while True:
            halves = min(ways, key=lambda way: abs(len(way[0]) - len(way[1])))
            apart = (one_kernel(self.g, y, self.target.limits) for half in halves for y in components(self.g, half))
            unfit = next((y for y in apart if isinstance(y, Group) and not self._fits(y)), None)
            if unfit is None or len(unfit.members) == 1:
                return
            ways = cuts(self.g, unfit.members)

    def near(self, x: Group) -> tuple[Group, ...]:
        """A group that fits, or parts that are forecast to take less time."""
        if self.target.predict is None or self.target.given is not None or x.members in self.calls:
            return (x,)

        def cut() -> _Parts:
            return _Parts(tuple(nearer(self.g, x, self.target.machine, self._forecast, self._legal_parts)[0]), ())

        return self._near.of(*self._known_by(x), cut).groups

    def joined(self, parts: list[Group]) -> list[Group]:
        """The groups, with a map made part of a kernel that sums it, or reads what it reads, where that is forecast to
        take less: it is not read again (the gradient in front of a batch norm, which a residual passes on; the average
        of gradients beside the step that is scaled by a mean of signs). The test of legality has a price that is right
        for most (`block.legal`): so it asks that of no group. A call of the library stays one: it was chosen by rates
        that were measured (weights' gradients of depthwise convolutions, in kernels with what is in front of them 280
        us each on an H100, which were forecast 30 to 80)."""
        if self.target.predict is None or self.target.given is not None:
            return parts
        g = self.g
        own = [x for x in parts if x.members not in self.calls]
        for y in own:
            reads = {r for m in y.members if g.by_name[m].reducer for r in self._along(m)} - {*y.members}
            for x in own:
                sums = not reads.isdisjoint(x.members)
                if x is y or any(g.by_name[m].reducer for m in x.members) or not (sums or self._alike(x, y)):
                    continue
                if self._between(x, y, parts) or (not sums and self._between(y, x, parts)):
                    continue
                whole = one_kernel(g, self._in_order(x, y), Limits(in_registers=True))
                most = (LESS if sums else ALIKE) * (self._seconds(x) + self._seconds(y))
                if isinstance(whole, Group) and self._seconds(whole) < most:
                    made = [whole if z is y else z for z in parts if z is not x]
                    return self.joined(list(ordered(g, made, {m: z for z in made for m in z.members})))
        return parts

    def _alike(self, x: Group, y: Group) -> bool:
        """Whether two groups, neither of which reads the other, have elements in common that take so long to read that
        one kernel of both could be faster."""
        g, common = self.g, self._read(x) & self._read(y)
        if not common or any(u in b.members for a, b in ((x, y), (y, x)) for m in a.members for u in g.consumers[m]):
            return False
        first, second = ({ld.tensor for ld in self._read(z)} for z in (x, y))
        if len(first | second) > max(MOST_READ, len(first), len(second)):
            return False
        saved = g.nbytes({ld.tensor for ld in common}) / self.target.machine.bandwidth
        return saved > (1 - LESS) * (self._seconds(x) + self._seconds(y))  # beside a launch

    def _read(self, x: Group) -> frozenset[Load]:
        """What the members of a group read of what others made."""
        if x not in self._given:
            made = {r for m in x.members for r in self.g.by_name[m].results}
            every = (ld for m in x.members for ld in loads(self.g.by_name[m].body))
            self._given[x] = frozenset(ld for ld in every if ld.tensor not in made)
        return self._given[x]

    def lighter(self, parts: list[Group]) -> tuple[list[Group], list[Refusal]]:
        """The groups of the whole program, with some cut for the sake of its memory; and why (`plan.lighter`)."""
        if self.target.predict is None or self.target.given is not None:
            return parts, []
        bandwidth = self.target.machine.bandwidth
        return Lighter(self.g, self.calls, self._seconds, self._legal_parts, bandwidth).groups(parts)

    def _seconds(self, x: Group) -> float:
        """What a group is forecast to take; not a number, and so no less than any, where that is not known."""
        found = self._forecast(x)
        return math.nan if found is None else found.seconds

    def _along(self, name: str) -> set[str]:
        """What a sum reads along what it sums; of a matrix product nothing."""
        c = self.g.by_name[name]
        of = product_of(c)
        if of is not None and of.is_matrix():
            return set()
        return {ld.tensor for ld in loads(c.body) if {*c.rdims} & {*dims_used(ld)}}

    def _forecast(self, x: Group) -> Predicted | None:
        """What the kernels of a group are forecast to take, if it fits; asked again of the parts of a cut."""
        if self.target.library and x.members == (lone_product(self.g, x.members, self.target.machine),):
            seconds = call_seconds(self.g, self.g.by_name[x.members[0]], self.target.machine)
            return Predicted(seconds, seconds)
        if not self._fits(x):
            return None
        return self._forecasts.of(*self._known_by(x), lambda: self.target.predicted(self.kernels(x)))

    def _fits(self, x: Group) -> bool:
        """Whether kernels can be made of a group; if not, it is known, and no group that has its members is tried."""
        fits = self.fits(x)
        if not fits and (members := frozenset(x.members)) not in self._unfit:
            self._unfit.append(members)
        return fits

    def _put_back(self, parts: list[Group]) -> list[Group]:
        """Parts, with those that were cut apart in vain joined again: a kernel less."""
        g = self.g
        for y in parts:
            for z in parts:
                if y is z or not any(u in z.members for m in y.members for u in g.consumers[m]):
                    continue
                members = self._in_order(y, z)
                if self._between(y, z, parts) or any(unfit.issubset(members) for unfit in self._unfit):
                    continue
                whole = one_kernel(g, members, self.target.limits)
                if isinstance(whole, Group) and self.refusal(whole) is None:
                    joined = [whole if part is z else part for part in parts if part is not y]
                    of = {m: part for part in joined for m in part.members}
                    return self._put_back(list(ordered(g, joined, of)))  # others may read y in front of z
                self._unfit.append(frozenset(members))
        return parts

    def _in_order(self, *groups: Group) -> tuple[str, ...]:
        """The members of groups as the program has them."""
        return tuple(m for m in self.g.by_name if any(m in x.members for x in groups))

    def _between(self, y: Group, z: Group, parts: Sequence[Group]) -> bool:
        """Whether a path from y to z runs through other parts: what one member of a part reads waits for all of it."""
        of = {m: part for part in parts for m in part.members}

        def after(x: Group) -> set[Group]:
            return {of[u] for m in x.members for u in self.g.consumers[m] if u in of} - {x}

        left = after(y) - {z}
        seen = set(left)
        while left:
            found = after(left.pop())
            if z in found:
                return True
            left |= found - seen
            seen |= found
        return False

    def _product_alone(self, x: Group) -> list[Group]:
        """A part of what does not fit; where its only reduction is a product now, that apart, which a library computes,
        and what is in front of it and behind."""
        m = lone_product(self.g, x.members, self.target.machine) if self.target.library else None
        if m is None or len(x.members) == 1:
            return [x]
        above = self.g.above(m)
        front = tuple(y for y in x.members if y in above)
        behind = tuple(y for y in x.members if y != m and y not in above)
        return self._fit(front, (m,), behind) or [x]

    def _fit(self, *parts: tuple[str, ...]) -> list[Group]:
        """The groups of parts that all fit; else none."""
        found = self._legal_parts(*parts)
        return found if all(map(self._fits, found)) else []

    def _legal_parts(self, *parts: tuple[str, ...]) -> list[Group]:
        """The groups of parts that are all legal; else none. What holds members that did not fit by themselves is not
        tried: a group of many layers is one for the sake of what they add up, and its cuts leave most layers whole."""
        found: list[Group] = []
        for part in (x for p in parts for x in components(self.g, p)):
            if any(unfit.issubset(part) for unfit in self._unfit):
                return []
            x = one_kernel(self.g, part, self.target.limits)
            if isinstance(x, str):
                return []
            found.append(x)
        return found

    def _legal(self, members: tuple[str, ...]) -> list[Group]:
        """The group of a part, or those of its parts where it is none: a dim that more members kept local may be
        parallel in a kernel of less."""
        apart = components(self.g, members)
        if len(apart) == 1:
            found = one_kernel(self.g, members, self.target.limits)
            if not isinstance(found, str):
                return [found]
            apart = list(cuts(self.g, members)[0])
        return [x for part in apart for x in self._legal(part)]

    def refusal(self, x: Group) -> str | None:
        """Why kernels cannot be made of several operators, as it was found for twins of theirs, which are not built
        again to be asked. TilefoldError: of a single one."""
        return self._against.of(*self._known_by(x), lambda: self._refused(x))

    def _refused(self, x: Group) -> str | None:
        whole = len(x.members) == 1 or x.members in self.calls
        try:
            made = self._build(x)
        except TilefoldError as err:
            if whole:
                raise
            return err.message
        return None if whole else next((r for r in map(self.target.against, made) if r is not None), None)

    def _build(self, x: Group) -> tuple[FusedKernel, ...]:
        if x not in self._built:
            self._built[x] = self.target.build(self.g, x, self.forms.get(x))
        return self._built[x]
