"""Ideals of an operator DAG and the candidates that start at each: all that a plan may be made of.

An ideal is what is already computed; a candidate is a set of nodes that may be one kernel. What leads from one ideal to
another, and nothing that no plan needs:

- *Forced kernels.* A node none of whose partners is left can only be a kernel by itself, and where it stands
  in the order costs nothing: it runs at once. (Library calls and weight-gradient sinks have no partners.)
- *Independent work in one order.* Of whatever node is ready, the kernels of a plan can be put in an order in which
  that node's kernel comes next, or one that it waits for. Others need not be tried there. It is the node of which
  there is least to try.
- *Pieces.* Members of a candidate are linked: an edge, or an operand read by both. Unlinked parts of a
  kernel would save one launch and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilefold.errors import PlanError
from tilefold.plan.dag import bits, connected, piece
from tilefold.plan.problem import Problem

#: Sets that are grown from one part of the graph, for each that may be looked at: not all of them are.
GROWN = 40
#: Operators of the largest kernel where there are too many sets of more.
SMALLER = (6, 4, 2)


def lattice_of(problem: Problem) -> tuple[Lattice, bool]:
    """That of the problem's largest kernels, or else (False) of the largest that leave few enough sets. PlanError: the
    program is too large."""
    for n, largest in enumerate((problem.largest, *SMALLER)):
        try:
            return Lattice(replace(problem, largest=min(largest, problem.largest))), n == 0
        except TooManySets:
            continue
    return Lattice(replace(problem, largest=1, most_sets=None)), False


class TooManySets(Exception):
    """More sets than `Problem.most_sets`."""


class Lattice:
    """`steps`: the candidates that start at each ideal; `order`: the ideals, smaller ones first; `bounds`: of each set
    that was looked at the least that it costs in seconds, None of those that are no candidates."""

    def __init__(self, problem: Problem):
        self.problem, self.dag = problem, problem.dag
        self.bounds: dict[int, float | None] = {}
        self.steps: dict[int, list[int]] = {}
        self.order: list[int] = []
        self._above = self.dag.ancestors()
        near = zip(problem.partners, self.dag.preds, self.dag.succs, strict=True)
        self._joined = tuple(a | b | c for a, b, c in near)
        self._within: dict[int, list[int]] = {}
        self._near: dict[int, tuple[bool, int]] = {}
        self._feeds: dict[int, int] = {}
        self._feeds_of: dict[tuple[int, int], int] = {}
        self._build()

    def candidates(self) -> set[int]:
        """Every candidate that starts somewhere."""
        return {s for found in self.steps.values() for s in found}

    def drop(self, s: int) -> None:
        """A set that turned out to be no kernel."""
        self.bounds[s] = None
        for ideal in self.order:
            if s in self.steps[ideal]:
                self.steps[ideal].remove(s)

    def bound(self, s: int) -> float | None:
        """The least that a set costs; None if it is no candidate."""
        if s not in self.bounds:
            self.bounds[s] = self.problem.bound(s)
        return self.bounds[s]

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
            found = self._feeds_of[first, near] = self._united(self._above, self._reached(first, near))
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
            raise TooManySets
        return self.bound(s) is not None

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
            yield (part := piece(region, self._joined))
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
                raise TooManySets
            s = todo.pop()
            whole, near = self._linked(s)
            if whole:
                out.append(s)
            for k in bits(near & region & ~s):
                more = s | 1 << k | self._above[k] & region
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
