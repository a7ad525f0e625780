"""What an earlier process fused for a GPU, or decided for a CPU, is read (`kept`): deriving and proving folds, and
planning, take longer.

The key is the program (with the lines of the user's code that errors and explanations name) and what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import tilefold.plan.gpu as plan
from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Index, Load, Size, Sym
from tilefold.algebra.fold import Check, Fold, StateVar, Step
from tilefold.backends.triton.build import expect_jobs
from tilefold.backends.triton.refusals import refused
from tilefold.block.fuse import Fused, FusedKernel
from tilefold.block.group import Group, Grouping, Refusal
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Result, Store, Update
from tilefold.block.stages import Rejection, Stage, StagePlan
from tilefold.block.verify import verify
from tilefold.errors import SourceLoc
from tilefold.plan.hardware import Gpu
from tilefold.plan.memory_orders import without_copies
from tilefold.runtime.kept import Shelf, lines_of
from tilefold.tensor.ir import Compute, Input, Program

FUSED = Shelf("fused", "every process fuses its programs anew")
PLANS = Shelf("plans", "every process plans its programs anew")


@dataclass(frozen=True, slots=True)
class Part:
    """What runs at a place of a program: the kernel of this number with its tiles and the order of its parallel loops
    by canonical dim (None, none: as they are chosen without a plan), or without one the library call of `members`."""

    members: tuple[str, ...]
    kernel: int | None = None
    tiles: tuple[tuple[str, int], ...] | None = None
    order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settled:
    """What is decided of a program for a CPU: its kernels, and what runs one after the other. `planned`: by prices
    (else greedily)."""

    fused: Fused
    parts: tuple[Part, ...]
    planned: bool


@dataclass(frozen=True, slots=True)
class Chosen:
    """Statements of a program, by name."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Turned:
    """A program whose library products take operands as they lie, and those products."""

    program: Program
    products: frozenset[str]


#: All that a file may hold.
_CLASSES = (
    *(Settled, Part, Turned, Fused, FusedKernel, Grouping, Group, Refusal, StagePlan, Stage, Rejection, SourceLoc),
    *(Program, Input, Compute, Cascade, Reduction, Fold, StateVar, Step, Check),
    *(Block, Loop, Let, Init, Update, Accumulate, Store, Result),
    *(Const, Index, Size, Sym, Load, Call, Cast, DType),
)


def fused_for_gpu(
    p: Program,
    target: plan.GpuTarget = plan.USUAL,
    *,
    calls: Collection[tuple[str, ...]] = (),
    decisions: plan.Decisions | None = None,
) -> Fused:
    """`plan.gpu.fuse_for_gpu`, remembered. Nothing is kept of a program that cannot be fused, which raises as there.

    Where the target refuses kernels, that is by the same function of kernels in all processes, but for those that this
    one could not launch.
    """
    asked = (*map(str, sorted(calls)), _asked(target), *refused())
    path = _path(FUSED, p, asked)
    found = FUSED.read(path, Fused, _CLASSES, _sound)
    if found is not None:
        return _named(found, p.name)
    if torch.cuda.is_available():
        expect_jobs()
    found = plan.fuse_for_gpu(p, target, calls=calls, decisions=decisions)
    FUSED.write(path, found)
    return found


def _asked(target: plan.GpuTarget) -> str:
    """What decides about a target, without its functions."""
    return f"{replace(target, refuse=None, predict=None)} {target.refuse is not None} {target.predict is not None}"


def products_for_gpu(p: Program, target: plan.GpuTarget) -> frozenset[str]:
    """`target.products(p)`, remembered: what a fold would keep of its products is known when it has been derived."""

    def sound(found: Chosen) -> None:
        if not found.names <= {c.name for c in p.body}:
            raise ValueError("no such statements")

    path = _path(FUSED, p, ("products", f"{replace(target, refuse=None, predict=None)}"))
    found = FUSED.read(path, Chosen, (Chosen,), sound)
    if found is None:
        found = Chosen(target.products(p))
        FUSED.write(path, found)
    return found.names


def turned_for_gpu(
    p: Program, products: frozenset[str], gpu: Gpu, fixed: Collection[str], given: Collection[str]
) -> tuple[Program, frozenset[str]]:
    """`plan.memory_orders.without_copies`, remembered: it prices orders by the hundred."""
    if products.issubset(fixed):
        return p, products

    def sound(found: Turned) -> None:
        if not found.products <= {c.name for c in found.program.body}:
            raise ValueError("no such statements")

    path = _path(FUSED, p, ("turned", *(str(sorted(names)) for names in (products, fixed, given)), f"{gpu}"))
    found = FUSED.read(path, Turned, _CLASSES, sound)
    if found is None:
        found = Turned(*without_copies(p, products, gpu, fixed, given))
        FUSED.write(path, found)
    return replace(found.program, name=p.name), found.products


def settled_for_cpu(p: Program, asked: Collection[str], settle: Callable[[Program], Settled]) -> Settled:
    """`settle(p)`, remembered. `asked`: lines that decide it together with the program. What it raises is not kept."""
    path = _path(PLANS, p, asked)
    found = PLANS.read(path, Settled, _CLASSES, _sound_plan)
    if found is not None:
        return replace(found, fused=_named(found.fused, p.name))
    found = settle(p)
    PLANS.write(path, found)
    return found


def _path(shelf: Shelf, p: Program, asked: Collection[str]) -> Path:
    """A program's file."""
    return shelf.path([*lines_of(p), *asked])


def _named(found: Fused, name: str) -> Fused:
    return replace(found, program=replace(found.program, name=name))


def _sound(found: Fused) -> None:
    for k in found.kernels:
        verify(k.block)


def _sound_plan(found: Settled) -> None:
    """ValueError where parts are of kernels or statements that there are not."""
    _sound(found.fused)
    names = {c.name for c in found.fused.program.body}
    for part in found.parts:
        if not (part.members and names.issuperset(part.members)):
            raise ValueError("no such statements")
        if part.kernel is not None and not 0 <= part.kernel < len(found.fused.kernels):
            raise ValueError("no such kernel")
