"""Groups that are cut for the sake of memory: at a program's worst moment a kernel holds what it reads beside what it
writes, where two kernels hold less each.

A product to few columns and the next to many are one kernel, which is faster and leaves no room: rows of 32 channels
wait for their last reader while 96 channels of each are written. Apart, the 32 are gone when the 96 come. How much
memory a program takes at its worst is what its largest batch depends on, so that a little time is given for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from tilefold.algebra.expr import tensors_read
from tilefold.block.group import Group, Refusal
from tilefold.plan.cut import Members, cuts
from tilefold.plan.sequence import Run, alive_at, of_least_memory
from tilefold.tensor.analysis import Graph

#: Of the bytes at the worst moment, what cuts must save.
WORTH = 1 / 32
#: Share of a program's time that is given for the share of its memory that is saved.
GIVEN = 0.25
#: Groups that are cut at most, and cuts of each that are forecast.
MOST, MOST_CUTS = 8, 4


@dataclass(frozen=True, slots=True)
class _Way:
    """Groups in an order in which they run, and the bytes of what they make that are alive at each."""

    steps: list[Run[Group]]
    bytes: list[int]

    @property
    def most(self) -> int:
        """Bytes at the worst moment."""
        return max(self.bytes, default=0)


@dataclass(frozen=True)
class Lighter:
    """Cuts groups of a whole program for the sake of its memory.

    calls: groups that are none of ours; seconds: forecast of a group's kernels, not a number where there is none;
    legal: the groups of parts that are all legal, else none; bandwidth: bytes a second."""

    g: Graph
    calls: Collection[Members]
    seconds: Callable[[Group], float]
    legal: Callable[..., Sequence[Group]]
    bandwidth: float

    def groups(self, groups: Sequence[Group]) -> tuple[list[Group], list[Refusal]]:
        """The groups, with those in two that hold most at the worst moment, if that saves enough; and why the two are
        apart. Arguments are taken to stay: they are their caller's."""
        way = usual = self._ordered(groups)
        whole = usual.most + int(self.g.nbytes(i.name for i in self.g.program.inputs))
        best, refusals, found = list(groups), list[Refusal](), list[Refusal]()
        parts, added = list(groups), 0.0
        for _ in range(MOST):
            x = way.steps[way.bytes.index(way.most)].of if way.steps else None
            cut = None if x is None else self._cut(x, way, WORTH * whole)
            if x is None or cut is None:
                break
            a, b, more = cut
            found += self._refusals(a, b)
            added += more
            at = parts.index(x)
            parts[at : at + 1] = [a, b]
            way = self._ordered(parts)
            saved = (usual.most - way.most) / whole
            if saved >= WORTH and added <= GIVEN * saved * self._least(groups):
                best, refusals = list(parts), list(found)
        return best, refusals

    def _ordered(self, groups: Sequence[Group]) -> _Way:
        outputs, sizes = self.g.program.outputs, self._sizes
        steps = of_least_memory([self._run(x) for x in groups], sizes, outputs)
        return _Way(steps, alive_at(steps, sizes, outputs))

    def _run(self, x: Group) -> Run[Group]:
        statements = [self.g.by_name[m] for m in x.members]
        inside = {r for c in statements for r in c.results}
        read = dict.fromkeys(t for c in statements for t in sorted(tensors_read(c.body)) if t not in inside)
        made = (r for c in statements if self.g.escapes(c.name, x.members) for r in c.results)
        return Run(x, tuple(read), tuple(made))

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {r: int(self.g.nbytes([r])) for c in self.g.program.body for r in c.results}

    def _cut(self, x: Group, way: _Way, worth: float) -> tuple[Group, Group, float] | None:
        """The two groups of one that make the worst moment less by `worth` bytes for the least time; seconds more."""
        if len(x.members) == 1 or x.members in self.calls:
            return None
        ways = islice(self._pairs(x, lambda a, b: max(self._beside(a, b, way)) <= way.most - worth), MOST_CUTS)
        found = [(self.seconds(a) + self.seconds(b) - self.seconds(x), n, a, b) for n, (a, b) in enumerate(ways)]
        known = [y for y in found if y[0] == y[0]]
        if not known:
            return None
        more, _, a, b = min(known)
        return a, b, max(more, 0.0)

    def _pairs(self, x: Group, fit: Callable[[Members, Members], bool]) -> Iterator[tuple[Group, Group]]:
        """Cuts in two that fit and are legal, the cheapest first. What fits is asked first, for it is soon known."""
        for parts in cuts(self.g, x.members):
            found = self.legal(*parts) if fit(*parts) else ()
            if len(found) == 2:
                yield found[0], found[1]

    def _beside(self, a: Members, b: Members, way: _Way) -> list[int]:
        """Bytes alive at each of two groups of these members that run in place of the one at the worst moment."""
        at = way.bytes.index(way.most)
        inside = [self._run(Group(x, ())) for x in (a, b)]
        steps = [*way.steps[:at], *inside, *way.steps[at + 1 :]]
        return alive_at(steps, self._sizes, self.g.program.outputs)[at : at + 2]

    def _least(self, groups: Sequence[Group]) -> float:
        """Seconds that a program takes at least: forecasts of its kernels, and the bytes of calls."""
        total = 0.0
        for x in groups:
            step = self._run(x)
            known = 0.0 if x.members in self.calls else self.seconds(x)
            total += max(self.g.nbytes((*step.reads, *step.makes)) / self.bandwidth, 0.0 if known != known else known)
        return total

    def _refusals(self, a: Group, b: Group) -> list[Refusal]:
        why = "one kernel would hold what it reads beside what it writes, at the moment when most memory is taken"
        by_name, producers = self.g.by_name, self.g.producers
        return [Refusal(m, n, why, by_name[n].loc) for m in a.members for n in b.members if m in producers[n]]
