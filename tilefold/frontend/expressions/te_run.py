"""Running tensor expressions: a program on the automatic road, or a schedule as it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from tilefold.algebra.expr import Const
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.tiles import default_config
from tilefold.block.fuse import Fused
from tilefold.block.group import Group, Grouping
from tilefold.block.ir import Block
from tilefold.block.schedule import Schedule, ScheduledKernel
from tilefold.errors import ScheduleError, TilefoldError
from tilefold.pipeline import compile_program
from tilefold.runtime.program import CompiledProgram
from tilefold.runtime.step import Step
from tilefold.runtime.steps import GpuStep, KernelStep, load_all
from tilefold.tensor.gradient import gradient
from tilefold.tensor.interp import bind_syms, run
from tilefold.tensor.ir import Program
from tilefold.tile import ir as tile
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.pieces import power_of_two
from tilefold.tile.verify import verify as verify_tile

Device = Literal["cpu", "cuda", "interpreter"]


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


class ScheduledGpuStep(GpuStep):
    """A kernel of a schedule on a GPU, with the tiles, warps and stages that it gives; the rest by default."""

    def __init__(self, k: ScheduledKernel, *, interpreted: bool):
        super().__init__(k.fused, interpreted=interpreted)
        named = self.canonical.dims
        tiles = {named[d]: n for d, n in k.tiles.items() if d in named}
        stages = max(k.stages.values(), default=None)
        choose = partial(_configured, tiles, k.warps, stages)
        self.triton = TritonKernel(self.canonical.block, choose, interpreted=interpreted)


def _configured(
    tiles: Mapping[str, int], warps: int | None, stages: int | None, block: Block, sizes: Mapping[str, int]
) -> TritonConfig:
    base = default_config(block, sizes)
    known = {d: min(n, power_of_two(sizes[d])) for d, n in tiles.items() if d in base.tiles}
    return replace(base, tiles={**base.tiles, **known}, warps=warps or base.warps, stages=stages or base.stages)


def _honoured(s: Schedule, device: str) -> None:
    """ScheduleError: a hint that the back end of the device does not follow."""
    on_gpu, hints = device != "cpu", s.hints
    refused: dict[str, tuple[Mapping[Any, object], str]] = {
        "place": (hints.placement, "the compiler of a kernel decides where its values are kept"),
        "bind": (hints.grid, "the grid has one axis, over the parallel loops in their order: reorder() changes it"),
    }
    if not on_gpu:
        refused |= {
            "pipeline": (
                hints.stages,
                "the C++ back end leaves reading ahead to the CPU's prefetchers",
            ),
            "warps": (hints.warps, "a CPU has no warps: its threads share the parallel loops"),
        }
    for name, (given, why) in refused.items():
        if given:
            hint = "schedule.portable() leaves such hints out"
            raise ScheduleError(f"{name} is not followed on {'a GPU' if on_gpu else 'a CPU'}: {why}", hint=hint)
    odd = [f"{d}={n}" for (_, d), n in hints.tiles.items() if n & (n - 1)]
    if on_gpu and odd:
        raise ScheduleError(f"tile({', '.join(odd)}): blocks on a GPU have powers of two", hint="tile with one")


def compile_schedule(s: Schedule, *, load: bool = True, device: str = "cpu") -> CompiledProgram:
    """The kernels of a schedule, ready to run; load: compile their code now (on a GPU: when a shape first needs it).

    ScheduleError: a hint that the device's back end does not follow.
    """
    _honoured(s, device)
    kernels, steps = s.kernels, list[Step]()
    if device == "cpu":
        on_cpu = [ScheduledStep(k) for k in kernels]
        steps += on_cpu
        if load:
            load_all(on_cpu)
    else:
        steps += [ScheduledGpuStep(k, interpreted=device == "interpreter") for k in kernels]
    groups = tuple(Group(n.members, n.parallel) for n in s.named.nests)
    fused = Fused(s.program, tuple(k.fused for k in kernels), Grouping(groups, ()))
    return CompiledProgram(s.program, fused, tuple(steps))


Tensors = tuple[torch.Tensor, ...]


class Differentiated(torch.autograd.Function):
    """Runs a compiled function; `pull(arguments, gradients of results)` gives the gradients of floating arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Tensors],
        pull: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        *xs: torch.Tensor,
    ) -> Tensors:
        ctx.pull = pull
        ctx.save_for_backward(*xs)
        made = run(*xs)
        ctx.mark_non_differentiable(*(y for y in made if not y.is_floating_point()))
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        xs = ctx.saved_tensors
        pulled = iter(ctx.pull(xs, [g for g in given if g.is_floating_point()]))
        return (None, None, *(next(pulled) if x.is_floating_point() else None for x in xs))


def differentiated(xs: Sequence[torch.Tensor]) -> bool:
    """Whether somebody wants gradients of a call with these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


class Compiled:
    """A compiled program: call it with its arguments in order; it returns its output, or a tuple of them.

    Where an argument needs a gradient, the gradient of the definitions is compiled as well, on the automatic road, when
    it is first needed; it computes the forward definitions again.

    TilefoldError: arguments of other types or devices, or that need gradients that a definition does not have.
    """

    def __init__(self, run: CompiledProgram, outputs: tuple[str, ...], device: str = "cpu"):
        self.run, self.outputs, self.device = run, outputs, device
        self._gradient: Compiled | None = None

    @property
    def program(self) -> Program:
        """The definitions that run."""
        return self.run.program

    def __call__(self, *args: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        inputs = arguments(self.program, args, "cuda" if self.device == "cuda" else "cpu")
        if differentiated(args):
            gradient(self.program)  # what has none is refused now, not in the backward pass
            made = Differentiated.apply(self._all, self._pulled, *args)
        else:
            made = self._all(*inputs.values())
        return made[0] if len(made) == 1 else made

    def _all(self, *args: torch.Tensor) -> Tensors:
        inputs = arguments(self.program, args, "cuda" if self.device == "cuda" else "cpu")
        done = self.run(inputs, bound(self.program, inputs))
        return tuple(done[n] for n in self.outputs)

    def _pulled(self, xs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Tensors:
        if self._gradient is None:
            p = gradient(self.program).program
            self._gradient = Compiled(compile_program(p, device=self.device), p.outputs, self.device)
        return self._gradient._all(*xs, *given)


def compile(what: Program | Schedule, *, device: Device = "cpu") -> Compiled:
    """Compile a schedule as it is, or a program on the automatic road (fused wherever that is legal).

    device: of the tensors that it will be called with; "interpreter": the GPU's kernels in Triton's interpreter, on CPU
    tensors. ScheduleError: a hint that the device's back end does not follow.
    """
    if device not in ("cpu", "cuda", "interpreter"):
        raise TilefoldError(f"there is no back end for {device!r}", hint="'cpu' or 'cuda'")
    if isinstance(what, Schedule):
        return Compiled(compile_schedule(what, device=device), what.program.outputs, device)
    return Compiled(compile_program(what, goal="fused", device=device), what.outputs, device)


def reference(p: Program) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
    """The program by its defining semantics in float64: slow, and what results are compared with."""

    def call(*args: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        inputs = arguments(p, args)
        return _results(run(p, inputs, exact=True, syms=bound(p, inputs)), p.outputs)

    return call


def arguments(p: Program, args: tuple[torch.Tensor, ...], device: str = "cpu") -> dict[str, torch.Tensor]:
    """Arguments by name, with their types checked."""
    if len(args) != len(p.inputs):
        names = ", ".join(i.name for i in p.inputs)
        raise TilefoldError(f"{p.name} takes {len(p.inputs)} arguments ({names}), not {len(args)}")
    for i, x in zip(p.inputs, args, strict=True):
        if x.dtype is not i.dtype.torch_dtype or x.device.type != device:
            wanted = f"{p.name} takes {i.dtype.value} on {device}"
            hint = None if x.device.type == device else f"te.compile(..., device={x.device.type!r})"
            raise TilefoldError(f"{i.name} is {x.dtype} on {x.device.type}, {wanted}", hint=hint)
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
