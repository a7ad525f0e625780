"""What the planner asks of a device: its machine and limits, the forms that a group can run in, and what they cost.

`plan.candidates`, `plan.select`, recomputation, rivals and the table of a plan are the same for all devices.
`plan.targets` has one module a device. A form that only some devices have (a cluster's blocks that exchange states, a
mesh of devices, a product with an epilogue) is one more `Form` that its target yields and builds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from tilefold.block.fuse import FusedKernel
from tilefold.block.group import Group, Limits
from tilefold.block.ir import Block
from tilefold.plan.forms import Form
from tilefold.plan.hardware import Machine
from tilefold.plan.search import Shape
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Program
from tilefold.tensor.streams import Room


class Target(Protocol):
    """A device, as the planner sees it. `library`: whether products and convolutions may be library calls."""

    @property
    def machine(self) -> Machine: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def library(self) -> bool: ...
    @property
    def room(self) -> Room | None:
        """Of streams that blocks hold whole, so that one kernel makes all that is made of them; None: they do not."""

    def products(self, p: Program) -> frozenset[str]:
        """Statements of `p` that are left to the library before anything is planned."""

    def forms(self, g: Graph, group: Group) -> Iterator[tuple[Form, tuple[FusedKernel, ...]]]:
        """Every way to make kernels of a legal group; the first is the one that is taken without prices."""

    def build(self, g: Graph, group: Group, form: Form) -> tuple[FusedKernel, ...]:
        """The kernels of a group in one of its forms."""

    def shapes(self, block: Block, sizes: Mapping[str, int]) -> tuple[Shape, ...]:
        """Tilings of a kernel (canonical names) with their cost, the cheapest first; at least one."""
