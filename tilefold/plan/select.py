"""Exact candidate selection: the cheapest chain of ideals of the operator DAG.

Blockbuster leaves the choice of what to fuse to a selection algorithm that it only announces. Here it is a
shortest path: states are ideals (what is already computed), a step I -> J runs one candidate J \\ I as a kernel
in one of its variants (snapshots, block shapes), and its length is the kernel's cost. Where the
cost of a kernel depends on how a cut tensor was blocked by its producer, the state also carries the *shape*
(any label) of the live cut tensors, and a step pays `transfer` for each tensor that it reads.

The states and steps are those of `plan.lattice`. What candidates cost is asked late (as LazySP, Dellin and Srinivasa
2016): a candidate enters with a lower bound; only candidates of an optimistic shortest path are priced, until such a
path consists of priced ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from tilefold.errors import PlanError
from tilefold.plan.dag import Dag, bits
from tilefold.plan.lattice import Lattice, lattice_of
from tilefold.plan.problem import Problem, Variant

Shapes = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A kernel of the plan, and the best plan without it: its candidate that overlaps this kernel, all its
    kernels, and how many seconds it takes more (None, nothing and inf where there is no other plan)."""

    members: int
    variant: Variant
    runner_up: int | None
    instead: tuple[int, ...]
    behind: float


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernels in order and their total cost; sizes of the search. `exact`: no plan is cheaper."""

    kernels: tuple[Chosen, ...]
    seconds: float
    ideals: int
    candidates: int
    priced: int
    exact: bool = True


def select(problem: Problem, *, rivals: bool = True) -> Selection:
    """The cheapest partition into legal candidates. PlanError where none covers the program, or it is too large.

    rivals: also find out for each kernel the best plan without it (prices more candidates).
    """
    lattice, whole = lattice_of(problem)
    search = _Search(lattice)
    while True:
        path = search.shortest()
        fresh = [s for s, _ in path if s not in search.priced]
        if not fresh:
            break
        for s in fresh:
            search.price(s)
        if search.slack == 1.0 and problem.spent():
            search.settle()
    found = search.result(path, rivals)
    return found if whole else replace(found, exact=False)


class _Search:
    """Shortest paths through a lattice. `priced`: the variants of the candidates that were asked for them; `slack`: how
    many times their bounds the others are taken to cost."""

    def __init__(self, lattice: Lattice):
        self.lattice, self.dag, self.problem = lattice, lattice.dag, lattice.problem
        self.order, self.steps = lattice.order, lattice.steps
        self.priced: dict[int, tuple[Variant, ...]] = {}
        self.slack = 1.0
        self._all = lattice.candidates()
        self._options: dict[int, tuple[Variant, ...]] = {}
        self._numbered: list[int] = []  # candidates
        self._ends: list[list[tuple[int, int]]] = []  # numbers of those that start at each ideal, and of where they end

    def price(self, s: int) -> None:
        """Ask for the variants of a candidate; one without any is no candidate."""
        found = tuple(self.problem.variants(s))
        if not found:
            self.lattice.drop(s)
            self._all.discard(s)
        self.priced[s] = found
        self._options.pop(s, None)

    def settle(self) -> None:
        """From now on expect what is not priced to cost as much above its bound as what is."""
        self.slack = max(1.0, self.usual_slack())
        self._options.clear()

    def _choices(self, s: int) -> tuple[Variant, ...]:
        """Variants of a priced candidate that may be on a shortest path, or its lower bound as if it had no shapes."""
        found = self._options.get(s)
        if found is None:
            if s in self.priced:
                found = _undominated(self.priced[s])
            else:
                bound = self.lattice.bound(s)
                found = (Variant(0.0 if bound is None else bound * self.slack),)
            self._options[s] = found
        return found

    def usual_slack(self) -> float:
        """How many times its bound a priced candidate costs: the median."""
        pairs = [(min(v.seconds for v in found), self.lattice.bound(s)) for s, found in self.priced.items() if found]
        return median([price / bound for price, bound in pairs if bound] or [1.0])

    def shortest(self) -> list[tuple[int, Variant]]:
        """The path that is cheapest with what is known now."""
        choices = {s: self._choices(s) for s in self._all}
        if not any(v.wants or v.gives for found in choices.values() for v in found):
            return self._shortest_without_shapes({s: found[0] for s, found in choices.items() if found})
        best: dict[int, dict[Shapes, tuple[float, _Back | None]]] = {i: {} for i in self.order}
        best[0][()] = (0.0, None)
        for ideal in self.order:
            ways = [(s, ideal | s, v) for s in self.steps[ideal] for v in choices[s]]
            for shapes, (so_far, _) in best[ideal].items():
                for s, end, v in ways:
                    there = so_far + v.seconds + (self._moved(shapes, v) if v.wants else 0.0)
                    kept = self._kept(end, shapes, s, v) if shapes or v.gives else ()
                    held = best[end].get(kept)
                    if held is None or there < held[0]:
                        best[end][kept] = there, (ideal, shapes, s, v)
        goal = best.get(self.dag.everything) or {}
        if not goal:
            raise PlanError("no partition into legal kernels covers the program")
        shapes = min(goal, key=lambda k: goal[k][0])
        path: list[tuple[int, Variant]] = []
        back = goal[shapes][1]
        while back is not None:
            ideal, shapes, s, v = back
            path.append((s, v))
            back = best[ideal][shapes][1]
        return path[::-1]

    def _shortest_without_shapes(self, choice: Mapping[int, Variant]) -> list[tuple[int, Variant]]:
        """The same where no price depends on shapes; each candidate has one variant, the cheapest (`_undominated`)."""
        if not self._ends:
            at = {ideal: n for n, ideal in enumerate(self.order)}
            number = {s: k for k, s in enumerate(self._all)}
            self._numbered = list(number)
            self._ends = [[(number[s], at[ideal | s]) for s in self.steps[ideal]] for ideal in self.order]
        seconds = [choice[s].seconds if s in choice else _INF for s in self._numbered]
        length = [0.0] + [_INF] * (len(self.order) - 1)
        back: list[tuple[int, int]] = [(0, 0)] * len(self.order)
        for n, steps in enumerate(self._ends):
            here = length[n]
            for k, end in steps:
                there = here + seconds[k]
                if there < length[end]:
                    length[end], back[end] = there, (n, k)
        if self.order[-1] != self.dag.everything or length[-1] == _INF:
            raise PlanError("no partition into legal kernels covers the program")
        path: list[tuple[int, Variant]] = []
        n = len(self.order) - 1
        while n:
            n, k = back[n]
            path.append((self._numbered[k], choice[self._numbered[k]]))
        return path[::-1]

    def _moved(self, shapes: Shapes, v: Variant) -> float:
        given = dict(shapes)
        return sum(self.problem.transfer(k, given[k], want) for k, want in v.wants.items() if k in given)

    def _kept(self, end: int, shapes: Shapes, s: int, v: Variant) -> Shapes:
        """Shapes of the tensors that something after `end` still reads."""
        if not shapes and not v.gives:
            return ()
        live = {**dict(shapes), **{k: g for k, g in v.gives.items() if s >> k & 1}}
        return tuple(sorted((k, g) for k, g in live.items() if self.dag.succs[k] & ~end))

    def result(self, path: list[tuple[int, Variant]], rivals: bool) -> Selection:
        """The path as a selection."""
        others = self._rivals(path) if rivals else {}
        kernels = tuple(Chosen(s, v, *others.get(s, (None, (), _INF))) for s, v in path)
        total, ideal = 0.0, 0
        shapes: Shapes = ()
        for s, v in path:
            total += v.seconds + self._moved(shapes, v)
            ideal |= s
            shapes = self._kept(ideal, shapes, s, v)
        legal = sum(b is not None for b in self.lattice.bounds.values())
        return Selection(kernels, total, len(self.order), legal, len(self.priced), self.slack == 1.0)

    def _rivals(self, path: list[tuple[int, Variant]]) -> dict[int, tuple[int | None, tuple[int, ...], float]]:
        """For each kernel, the best candidate that overlaps it, the best plan through that one, and how much longer
        it is. Lengths ignore shapes. What these plans are made of is priced until all of it is.
        """
        chosen = [s for s, _ in path]
        while True:
            ways = self._ways()
            best: dict[int, tuple[float, int, int]] = {}
            for ideal in self.order:
                for s in self.steps[ideal]:
                    length = ways.ahead[ideal][0] + self._cheapest(s) + ways.behind[ideal | s][0]
                    for k in chosen if length < _INF and s not in chosen else ():
                        if k & s and (k not in best or length < best[k][0]):
                            best[k] = (length, ideal, s)
            plans = {k: ways.through(ideal, s) for k, (_, ideal, s) in best.items()}
            fresh = {s for plan in plans.values() for s in plan if s not in self.priced}
            for s in fresh:
                self.price(s)
            if not fresh:
                break
        total = ways.behind[0][0]
        none = (None, (), _INF)
        return {k: (best[k][2], plans[k], max(0.0, best[k][0] - total)) if k in best else none for k in chosen}

    def _cheapest(self, s: int) -> float:
        return min(v.seconds for v in self._choices(s))

    def _ways(self) -> _Ways:
        ahead = dict.fromkeys(self.order, (_INF, 0)) | {0: (0.0, 0)}
        behind = dict.fromkeys(self.order, (_INF, 0)) | {self.dag.everything: (0.0, 0)}
        for ideal in self.order:
            for s in self.steps[ideal]:
                ahead[ideal | s] = min(ahead[ideal | s], (ahead[ideal][0] + self._cheapest(s), s))
        for ideal in reversed(self.order):
            for s in self.steps[ideal]:
                behind[ideal] = min(behind[ideal], (self._cheapest(s) + behind[ideal | s][0], s))
        return _Ways(ahead, behind)


def _undominated(variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """Of the variants without shapes only the cheapest."""
    plain = [v for v in variants if not v.gives and not v.wants]
    best = min(plain, key=lambda v: v.seconds, default=None)
    return tuple(v for v in variants if v is best or v.gives or v.wants)


_INF = float("inf")
#: How a state was reached: the ideal and its shapes before, the step and its variant.
_Back = tuple[int, Shapes, int, Variant]


@dataclass(frozen=True, slots=True)
class _Ways:
    """Length of the shortest way from nothing to each ideal, and from it to the end; its last or first step."""

    ahead: Mapping[int, tuple[float, int]]
    behind: Mapping[int, tuple[float, int]]

    def through(self, ideal: int, s: int) -> tuple[int, ...]:
        """The best plan that runs s after `ideal`."""
        before: list[int] = []
        at = ideal
        while at:
            before.append(self.ahead[at][1])
            at &= ~before[-1]
        after = [s]
        at = ideal | s
        while self.behind[at][1]:
            after.append(self.behind[at][1])
            at |= after[-1]
        return (*reversed(before), *after)


def is_chain(dag: Dag, kernels: Sequence[int]) -> bool:
    """Whether the kernels, in this order, run every node once and after its producers."""
    done = [0]
    for s in kernels:
        if s & done[-1] or any(dag.preds[k] & ~(done[-1] | s) for k in bits(s)):
            return False
        done.append(done[-1] | s)
    return done[-1] == dag.everything and all(a < b for a, b in pairwise(done))
