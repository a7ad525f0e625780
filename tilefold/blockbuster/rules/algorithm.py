"""The fusion algorithm of Blockbuster, section 4: rules by priority, breadth first, with snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilefold.blockbuster.ir import Path, Program, graph_at, inner_paths
from tilefold.blockbuster.rules.duplicate import DuplicateMappedScale
from tilefold.blockbuster.rules.elementwise import FuseElementwise
from tilefold.blockbuster.rules.extend import ExtendMap, PeelFirstIteration
from tilefold.blockbuster.rules.fuse_maps import FuseConsecutiveMaps, FuseSiblingMaps
from tilefold.blockbuster.rules.fuse_reduction import FuseMapReduction
from tilefold.blockbuster.rules.law import Law, Match, places, rewrite
from tilefold.blockbuster.rules.swap_dot import SwapScaleDot, SwapShiftDot

#: Rules 8-4-5-9-3-1-2: the first that matches is applied.
PRIORITY: tuple[Law, ...] = (
    DuplicateMappedScale(),
    SwapScaleDot(),
    SwapShiftDot(),
    FuseElementwise(),
    FuseMapReduction(),
    FuseConsecutiveMaps(),
    FuseSiblingMaps(),
)
#: What is tried when none of them matches any more: rule 6, or rule 7 where repeated work is unwanted.
EXTENSION: Law = ExtendMap()
PEELING: Law = PeelFirstIteration()
#: Laws of the paper by number.
RULES: dict[int, Law] = {law.number: law for law in (*PRIORITY, EXTENSION, PEELING)}


@dataclass(frozen=True, slots=True)
class Step:
    """One application: of `match.law`, in the graph at `path`, giving `after`."""

    path: Path
    match: Match
    after: Program

    @property
    def law(self) -> Law:
        return self.match.law


@dataclass(frozen=True, slots=True)
class Fusion:
    """What the algorithm did: the steps in order, and the snapshots it offers for selection.

    `snapshots` are counted in steps: the program after so many. The last is the most fused.
    """

    start: Program
    steps: tuple[Step, ...]
    snapshots: tuple[int, ...]

    def after(self, steps: int) -> Program:
        """The program after this many steps."""
        return self.steps[steps - 1].after if steps else self.start

    @property
    def programs(self) -> tuple[Program, ...]:
        """The snapshots themselves, least fused first."""
        return tuple(self.after(k) for k in self.snapshots)

    @property
    def result(self) -> Program:
        """The last snapshot."""
        return self.after(self.snapshots[-1])


class _Run:
    def __init__(self, p: Program, priority: tuple[Law, ...]):
        self.p, self.priority = p, priority
        self.steps: list[Step] = []

    def apply(self, path: Path, m: Match) -> None:
        self.p = rewrite(self.p, path, m)
        self.steps.append(Step(path, m, self.p))

    def fuse_no_extend(self, path: Path) -> None:
        """Apply rules to one graph until none matches."""
        while True:
            g = graph_at(self.p.graph, path)
            m = next((m for law in self.priority if (m := law.first(g)) is not None), None)
            if m is None:
                return
            self.apply(path, m)

    def breadth_first(self, visit: Callable[[Path], bool]) -> bool:
        """Visit graphs, outer ones first, until a visit says that it is enough."""
        queue: list[Path] = [()]
        while queue:
            path = queue.pop(0)
            if visit(path):
                return True
            queue += inner_paths(self.p.graph, path)
        return False

    def fuse_all(self) -> None:
        def visit(path: Path) -> bool:
            self.fuse_no_extend(path)
            return False

        self.breadth_first(visit)

    def extend(self, law: Law) -> bool:
        """Apply the extension once, at the first place; False if there is none."""

        def visit(path: Path) -> bool:
            m = law.first(graph_at(self.p.graph, path))
            if m is not None:
                self.apply(path, m)
            return m is not None

        return self.breadth_first(visit)


def fuse(p: Program, *, priority: tuple[Law, ...] = PRIORITY, extension: Law | None = EXTENSION) -> Fusion:
    """Run the algorithm. `extension`: rule 6 (default), rule 7, or None for no repeated work at all."""
    run = _Run(p, priority)
    run.fuse_all()
    snapshots = [len(run.steps)]
    while extension is not None and run.extend(extension):
        run.fuse_all()
        snapshots.append(len(run.steps))
    return Fusion(p, tuple(run.steps), tuple(snapshots))


def fuse_reductions(p: Program) -> Program:
    """Rule 3 wherever it applies: no list of partial sums is left that only a reduction reads."""
    law = RULES[3]
    while (found := next(places(p, law), None)) is not None:
        p = rewrite(p, *found)
    return p
