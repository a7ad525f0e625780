"""Laws applied until no law lowers the cost.

Greedy: the laws are swept in order, each applied at its best match for as long as that lowers the
cost of the program (with partials taken wherever they can be). Where none
does, the ENABLING laws are tried with another law after each. Every step is kept, with the program
after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilefold.block.epilogue.cost import Cost, Target
from tilefold.block.epilogue.kernels import Kernels, cut_into_kernels
from tilefold.tensor.ir import Program
from tilefold.tensor.laws import partials
from tilefold.tensor.laws.adjoint import TRANSPOSE
from tilefold.tensor.laws.law import Law, Match
from tilefold.tensor.laws.normal import normal
from tilefold.tensor.laws.one_hot import COLLAPSE, SELECT
from tilefold.tensor.laws.partials import PARTIALS
from tilefold.tensor.laws.rank_one import RANK_ONE
from tilefold.tensor.laws.scale import COLUMN_SCALE, ROW_SCALE
from tilefold.tensor.laws.stack import CONCATENATE, INTERLEAVE, STACK

#: The algebraic laws, in the order in which they are tried; PARTIALS comes after them.
LAWS: tuple[Law, ...] = (
    RANK_ONE, ROW_SCALE, TRANSPOSE, SELECT, INTERLEAVE, STACK, CONCATENATE, COLUMN_SCALE, COLLAPSE,
)  # fmt: skip
#: Laws that may pay only together with the one after them: a mean leaves the operand, then its scale can;
#: two gradients are packed for one product, then the products of the weights' gradients read them so too.
ENABLING: tuple[Law, ...] = (RANK_ONE, CONCATENATE)
#: Most steps of a search.
MOST_STEPS = 40


@dataclass(frozen=True, slots=True)
class Step:
    """One law applied: the program after it and the cost of its kernels (partials taken)."""

    law: Law
    match: Match
    program: Program
    cost: Cost


@dataclass(frozen=True, slots=True)
class Rewritten:
    """`start` is the program in normal form, `before` its kernels with no law applied; `result` the kernels found."""

    start: Program
    before: Kernels
    steps: tuple[Step, ...]
    result: Kernels

    @property
    def laws(self) -> tuple[str, ...]:
        """Names of the laws that fired, in order."""
        return tuple(s.law.name for s in self.steps)


def rewrite(p: Program, target: Target, laws: tuple[Law, ...] = LAWS) -> Rewritten:
    """Apply laws to a fixpoint and cut the result into kernels."""
    start = normal(p)
    before = cut_into_kernels(start, target)
    search = _Search(target, laws)
    steps: list[Step] = []
    now, cost = start, search.cost(start)
    while len(steps) < MOST_STEPS:
        found = search.sweep(now, cost) or search.best_after(now, cost)
        if not found:
            break
        steps += found
        now, cost = found[-1].program, found[-1].cost
    cutting = taken_partials(now, target)
    result = cut_into_kernels(cutting[-1].program if cutting else now, target)
    steps += [replace(s, cost=result.cost) for s in cutting]
    return Rewritten(start, before, tuple(steps), result)


def taken_partials(p: Program, target: Target) -> list[Step]:
    """Partials along every dim that has any."""
    steps: list[Step] = []
    while found := partials.matches(p, target.tile):
        match = partials.together(found)
        p = normal(partials.apply(p, match))
        steps.append(Step(PARTIALS, match, p, Cost()))
    return steps


class _Search:
    def __init__(self, target: Target, laws: tuple[Law, ...]):
        self.target, self.laws = target, laws

    def cost(self, p: Program) -> Cost:
        """Cost of the kernels with partials taken."""
        steps = taken_partials(p, self.target)
        return cut_into_kernels(steps[-1].program if steps else p, self.target).cost

    def steps(self, p: Program, law: Law) -> list[Step]:
        """Every match of a law applied by itself."""
        out = []
        for match in law.matches(p):
            after = normal(law.apply(p, match))
            if after != p:
                out.append(Step(law, match, after, self.cost(after)))
        return out

    def sweep(self, p: Program, cost: Cost) -> list[Step]:
        """Each law in turn, its best match for as long as that lowers the cost."""
        taken: list[Step] = []
        for law in self.laws:
            while found := self.best(law, p, cost):
                taken.append(found)
                p, cost = found.program, found.cost
        return taken

    def best(self, law: Law, p: Program, cost: Cost) -> Step | None:
        """The law's best match, None where it does not lower the cost."""
        found = min(self.steps(p, law), key=lambda s: s.cost.total, default=None)
        return found if found is not None and found.cost.total < cost.total else None

    def best_after(self, p: Program, cost: Cost) -> list[Step]:
        """An enabling step and one after it that together lower the cost."""
        for law in ENABLING:
            for first in self.steps(p, law) if law in self.laws else ():
                for then in self.laws:
                    second = self.best(then, first.program, cost)
                    if second is not None:
                        return [first, second]
        return []
