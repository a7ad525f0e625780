"""CPUs: a group is one pass or several, or a split fold; tilings are searched with the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilefold.block.fuse import FusedKernel
from tilefold.block.group import ANY, Group, Limits
from tilefold.block.ir import Block
from tilefold.plan.forms import Form, build_form, forms
from tilefold.plan.hardware import Machine
from tilefold.plan.library import library_products
from tilefold.plan.search import Shape, shapes
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Program
from tilefold.tensor.streams import Room

#: Share of the cache of a core (the second level's) that streams take which a block holds whole.
HELD = 1 / 2


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """See `plan.target.Target`. all_tiles: every tiling of a kernel is priced, else the default."""

    machine: Machine
    limits: Limits = ANY
    library: bool = True
    all_tiles: bool = True

    @property
    def room(self) -> Room:
        """See `Target`."""
        return Room(HELD * self.machine.tiers[1].capacity, self.limits.workers)

    def products(self, p: Program) -> frozenset[str]:
        """Products that are faster as library calls than in any kernel (a bound, so nothing is lost)."""
        return library_products(p, self.machine) if self.library else frozenset()

    def forms(self, g: Graph, group: Group) -> Iterator[tuple[Form, tuple[FusedKernel, ...]]]:
        """One pass, separate passes, split folds."""
        return forms(g, group, self.machine)

    def build(self, g: Graph, group: Group, form: Form) -> tuple[FusedKernel, ...]:
        """See `Target`."""
        return build_form(g, group, form)

    def shapes(self, block: Block, sizes: Mapping[str, int]) -> tuple[Shape, ...]:
        """See `Target`."""
        return shapes(block, sizes, self.machine, all_tiles=self.all_tiles)
