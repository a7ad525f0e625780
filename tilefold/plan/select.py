"""Exact candidate selection: the cheapest chain of ideals of the operator DAG.

Blockbuster leaves the choice of what to fuse to a selection algorithm that it only announces. Here it is a
shortest path: states are ideals (what is already computed), a step I -> J runs one candidate J \\ I as a kernel
in one of its variants (snapshots, block shapes), and its length is the kernel's cost. Where the
cost of a kernel depends on how a cut tensor was blocked by its producer, the state also carries the *shape*
(any label) of the live cut tensors, and a step pays `transfer` for each tensor that it reads.

Four things keep it small without losing exactness:

- *Forced kernels.* A node none of whose partners is left can only be a kernel by itself, and where it stands
  in the order costs nothing: it runs at once. (Library calls and weight-gradient sinks have no partners.)
- *Independent work in one order.* Of whatever node is ready, the kernels of a plan can be put in an order in which
  that node's kernel comes next, or one that it waits for. Others need not be tried there. It is the node of which
  there is least to try.
- *Pieces.* Members of a candidate are linked: an edge, or an operand read by both. Unlinked parts of a
  kernel would save one launch and nothing else.
- *Lazy costs* (as LazySP, Dellin and Srinivasa 2016): a candidate enters with a lower bound; only candidates of
  an optimistic shortest path are priced, until such a path consists of priced ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from tilefold.errors import PlanError
from tilefold.plan.dag import Dag, bits, connected, piece

#: Sizes of the search beyond which it stops with an error instead of running for minutes.
MOST_IDEALS = 200_000
#: Sets that are grown from one part of the graph, for each that may be looked at: not all of them are.
GROWN = 40
#: Operators of the largest kernel where there are too many sets of more.
SMALLER = (6, 4, 2)
Shapes = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a candidate. `gives`: shape label of each result (by node) that has one; `wants`: of each
    operand from another kernel that it reads best. `what` is the caller's own."""

    seconds: float
    gives: Mapping[int, str] = field(default_factory=dict)
    wants: Mapping[int, str] = field(default_factory=dict)
    what: object = None


@dataclass(frozen=True)
class Problem:
    """`partners[k]`: nodes that may be linked to k in a kernel (symmetric; edges not in it cannot be fused).

    `bound(S)`: a lower bound in seconds of the cost of candidate S, None if S is not legal. `variants(S)`: none
    cheaper than the bound; none at all if S turns out not to be a kernel. `hopeless(S)`: no superset of S is legal
    either. `transfer(node, given, wanted)`: extra seconds to read a tensor with another shape than wanted (not
    negative). `largest`: most nodes of a candidate. `spent()`: no more candidates should be priced than are needed to
    finish: from then on one without a price is taken to cost as much above its bound as the priced ones do on average.
    `most_sets`: sets to look at before smaller kernels have to do (SMALLER). `most_ideals`: beyond which the program is
    too large.
    """

    dag: Dag
    partners: tuple[int, ...]
    bound: Callable[[int], float | None]
    variants: Callable[[int], Sequence[Variant]]
    hopeless: Callable[[int], bool] = lambda s: False
    transfer: Callable[[int, str, str], float] = lambda node, given, wanted: 0.0
    largest: int = 64
    spent: Callable[[], bool] = lambda: False
    most_sets: int | None = None
    most_ideals: int = MOST_IDEALS


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
    search, whole = _start(problem)
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


def _start(problem: Problem) -> tuple[_Search, bool]:
    """A search with the problem's largest kernels, or else (False) with the largest that leave few enough sets."""
    for n, largest in enumerate((problem.largest, *SMALLER)):
        try:
            return _Search(replace(problem, largest=min(largest, problem.largest))), n == 0
        except _TooManySets:
            continue
    return _Search(replace(problem, largest=1, most_sets=None)), False


class _TooManySets(Exception):
    """More sets than `Problem.most_sets`."""


class _Search:
    def __init__(self, problem: Problem):
        self.problem, self.dag = problem, problem.dag
        self.above = self.dag.ancestors()
        near = zip(problem.partners, self.dag.preds, self.dag.succs, strict=True)
        self.joined = tuple(a | b | c for a, b, c in near)
        self.bounds: dict[int, float | None] = {}
        self.priced: dict[int, tuple[Variant, ...]] = {}
        self.steps: dict[int, list[int]] = {}
        self.order: list[int] = []
        self.slack = 1.0
        self._options: dict[int, tuple[Variant, ...]] = {}
        self._within: dict[int, list[int]] = {}
        self._near: dict[int, tuple[bool, int]] = {}
        self._all: set[int] = set()
        self._numbered: list[int] = []  # candidates
        self._ends: list[list[tuple[int, int]]] = []  # numbers of those that start at each ideal, and of where they end
        self._feeds: dict[int, int] = {}
        self._feeds_of: dict[tuple[int, int], int] = {}
        self._build()

    def _build(self) -> None:
        """All ideals reachable by legal candidates, and the candidates that start at each."""
        todo = [(0, self.dag.ready(0))]
        seen = {0}
        while todo:
            ideal, ready = todo.pop()
            self.steps[ideal] = found = self._from(ideal, ready)
            for s in found:
                if ideal | s not in seen:
                    seen.add(ideal | s)
                    todo.append((ideal | s, self.dag.ready_after(ready, s, ideal | s)))
            if len(seen) > self.problem.most_ideals:
                raise PlanError(f"more than {self.problem.most_ideals} ideals", hint="plan the program in parts")
        self.order = sorted(seen, key=int.bit_count)

    def _from(self, ideal: int, ready: int) -> list[int]:
        left = self.dag.everything & ~ideal
        if not left:
            return []
        for k in bits(ready):
            if not self.problem.partners[k] & left:
                return [1 << k]
        soon = min(((1 << k | self._feeding(1 << k, left)) & left for k in bits(ready)), key=int.bit_count)
        return [s for s in self._grown(ideal, ready, soon) if s & soon and self._looked_at(s)]

    def _feeding(self, first: int, left: int) -> int:
        """What leads to something that a kernel of `first` may contain, of the nodes that are left.

        It depends on those within reach of `first` alone: many ideals have them in common.
        """
        reach = self._feeds.get(first)
        if reach is None:
            reach = self._feeds[first] = self._reached(first, self.dag.everything)
        near = reach & left
        found = self._feeds_of.get((first, near))
        if found is None:
            found = self._feeds_of[first, near] = self._united(self.above, self._reached(first, near))
        return found

    def _reached(self, first: int, within: int) -> int:
        """Nodes that as many links as a kernel may have lead to from `first`, through nodes of a set."""
        near, fresh = first, first
        for _ in range(min(self.problem.largest, len(self.dag.names)) - 1):
            fresh = self._united(self.problem.partners, fresh) & within & ~near
            if not fresh:
                break
            near |= fresh
        return near

    @staticmethod
    def _united(masks: Sequence[int], of: int) -> int:
        out = 0
        for k in bits(of):
            out |= masks[k]
        return out

    def _looked_at(self, s: int) -> bool:
        """Whether a set is a candidate. Only sets that the search grows count, not forced kernels."""
        most = self.problem.most_sets
        if most is not None and s not in self.bounds and len(self.bounds) >= most:
            raise _TooManySets
        return self._bound(s) is not None

    def _grown(self, ideal: int, ready: int, soon: int) -> list[int]:
        """Connected sets S such that ideal | S is an ideal, those among them that have a node of `soon`.

        They lie within a part of the region, and depend on the ideal through that part alone: parts that many ideals
        have in common are looked at once.
        """
        region = self._region(ideal, ready)
        out: list[int] = []
        for part in self._parts(region):
            if not part & soon:
                continue
            if part not in self._within:
                self._within[part] = self._sets(part)
            out += self._within[part]
        return out

    def _parts(self, region: int) -> Iterator[int]:
        """The pieces of a region that neither links nor edges join."""
        while region:
            yield (part := piece(region, self.joined))
            region &= ~part

    def _sets(self, region: int) -> list[int]:
        """Connected sets in a region that hold, with each node, all that it depends on there.

        They grow by a linked node and what that one needs: a set of the kind has both or neither, so that every one of
        them is reached.
        """
        todo = [1 << k for k in bits(region) if not self.dag.preds[k] & region]
        seen = set(todo)
        out: list[int] = []
        most = self.problem.most_sets
        while todo:
            if most is not None and len(seen) > GROWN * most:
                raise _TooManySets
            s = todo.pop()
            whole, near = self._linked(s)
            if whole:
                out.append(s)
            for k in bits(near & region & ~s):
                more = s | 1 << k | self.above[k] & region
                if more not in seen and more.bit_count() <= self.problem.largest:
                    seen.add(more)
                    todo.append(more)
        return out

    def _linked(self, s: int) -> tuple[bool, int]:
        """Whether a set is connected, and the nodes linked to it (none where no larger one can be a kernel)."""
        found = self._near.get(s)
        if found is None:
            links, near = self.problem.partners, 0
            if s.bit_count() < self.problem.largest and not self.problem.hopeless(s):
                for k in bits(s):
                    near |= links[k]
            found = self._near[s] = connected(s, links), near
        return found

    def _region(self, ideal: int, ready: int) -> int:
        """Nodes that a candidate starting here could contain: all producers done or in it, some partner left."""
        inside = 0
        left = self.dag.everything & ~ideal
        todo = list(bits(ready))
        while todo:
            k = todo.pop()
            if self.problem.partners[k] & left:
                inside |= 1 << k
                todo += [u for u in bits(self.dag.succs[k]) if self.dag.preds[u] & ~(ideal | inside) == 0]
        return inside

    def _bound(self, s: int) -> float | None:
        if s not in self.bounds:
            self.bounds[s] = self.problem.bound(s)
        return self.bounds[s]

    def price(self, s: int) -> None:
        """Ask for the variants of a candidate; one without any is no candidate."""
        found = tuple(self.problem.variants(s))
        if not found:
            self.bounds[s] = None
            self._all.discard(s)
            for ideal in self.order:
                if s in self.steps[ideal]:
                    self.steps[ideal].remove(s)
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
                bound = self._bound(s)
                found = (Variant(0.0 if bound is None else bound * self.slack),)
            self._options[s] = found
        return found

    def usual_slack(self) -> float:
        """How many times its bound a priced candidate costs: the median."""
        pairs = [(min(v.seconds for v in found), self._bound(s)) for s, found in self.priced.items() if found]
        return median([price / bound for price, bound in pairs if bound] or [1.0])

    def shortest(self) -> list[tuple[int, Variant]]:
        """The path that is cheapest with what is known now."""
        choices = {s: self._choices(s) for s in self._candidates()}
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
            number = {s: k for k, s in enumerate(self._candidates())}
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

    def _candidates(self) -> set[int]:
        """Every candidate that starts somewhere."""
        if not self._all:
            self._all = {s for found in self.steps.values() for s in found}
        return self._all

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
        legal = sum(b is not None for b in self.bounds.values())
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
