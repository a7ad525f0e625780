"""Running tensor expressions: a program on the automatic road, or a schedule as it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tilefold.algebra.expr import Const
from tilefold.block.fuse import Fused
from tilefold.block.legal import Group, Grouping
from tilefold.block.schedule import Schedule, ScheduledKernel
from tilefold.errors import TilefoldError
from tilefold.pipeline import compile_program
from tilefold.runtime.program import CompiledProgram
from tilefold.runtime.steps import KernelStep, load_all
from tilefold.tensor.interp import bind_syms, run
from tilefold.tensor.ir import Program
from tilefold.tile import ir as tile
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.verify import verify as verify_tile


class ScheduledStep(KernelStep):
    """A kernel of a schedule, lowered with the tile sizes that the schedule gives."""

    def __init__(self, k: ScheduledKernel):
        super().__init__(k.fused)
        named, block = self.canonical.dims, self.canonical.block
        sizes = {named[d]: n for d, n in k.tiles.items() if d in named}
        fixed = {d: int(e.value) for d, e in block.sizes.items() if isinstance(e, Const)}
        self.tiles = {d: max(1, min(n, fixed.get(d, n))) for d, n in sizes.items()}

    def kernel(self, units: tuple[int | None, ...] | None = None) -> tile.Kernel:
        """The tile kernel for the axes of stride 1 of the tensors it reads."""
        units = self.usual_units() if units is None else units
        found = self.kernels.get(units)
        if found is None:
            block = self.canonical.block
            unit = dict(zip((i.name for i in block.inputs), units, strict=True))
            found = self.kernels[units] = verify_tile(lower(block, LowerOptions(unit=unit, tiles=self.tiles)))
        return found


def compile_schedule(s: Schedule, *, load: bool = True) -> CompiledProgram:
    """The kernels of a schedule, ready to run; load: compile their code now."""
    kernels = s.kernels
    steps = tuple(ScheduledStep(k) for k in kernels)
    if load:
        load_all(steps)
    groups = tuple(Group(n.members, n.parallel) for n in s.named.nests)
    return CompiledProgram(s.program, Fused(s.program, tuple(k.fused for k in kernels), Grouping(groups, ())), steps)


class Compiled:
    """A compiled program: call it with its arguments in order; it returns its output, or a tuple of them."""

    def __init__(self, run: CompiledProgram, outputs: tuple[str, ...]):
        self.run, self.outputs = run, outputs

    @property
    def program(self) -> Program:
        """The definitions that run."""
        return self.run.program

    def __call__(self, *args: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        inputs = arguments(self.program, args)
        done = self.run(inputs, bound(self.program, inputs))
        return _results(done, self.outputs)


def compile(what: Program | Schedule) -> Compiled:
    """Compile a schedule as it is, or a program on the automatic road (fused wherever that is legal)."""
    if isinstance(what, Schedule):
        return Compiled(compile_schedule(what), what.program.outputs)
    return Compiled(compile_program(what, goal="fused"), what.outputs)


def reference(p: Program) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
    """The program by its defining semantics in float64: slow, and what results are compared with."""

    def call(*args: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        inputs = arguments(p, args)
        return _results(run(p, inputs, exact=True, syms=bound(p, inputs)), p.outputs)

    return call


def arguments(p: Program, args: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Arguments by name, with their types checked."""
    if len(args) != len(p.inputs):
        names = ", ".join(i.name for i in p.inputs)
        raise TilefoldError(f"{p.name} takes {len(p.inputs)} arguments ({names}), not {len(args)}")
    for i, x in zip(p.inputs, args, strict=True):
        if x.dtype is not i.dtype.torch_dtype or x.device.type != "cpu":
            raise TilefoldError(f"{i.name} is {x.dtype} on {x.device.type}, {p.name} takes {i.dtype.value} on cpu")
    return {i.name: x for i, x in zip(p.inputs, args, strict=True)}


def bound(p: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Values of the program's sizes; TilefoldError where shapes contradict it."""
    try:
        return bind_syms(p, inputs)
    except ValueError as why:
        raise TilefoldError(f"{p.name}: {why}") from None


def _results(tensors: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    found = tuple(tensors[n] for n in names)
    return found[0] if len(found) == 1 else found
