"""The compiler from a tensor program to something that runs, as a list of named steps.

    plan       which operators share a kernel, and how   plan.planner
    fuse       tensor program -> block programs          block.fuse
    lower      block program  -> tile kernel             tile.lower
    load       tile kernel    -> callable                runtime.executor

`CompiledProgram` runs the kernels in order and keeps everything it was made from for `explain`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from tilefold.backends.triton.launch import TritonKernel
from tilefold.block.canonical import canonical
from tilefold.block.fuse import Fused, FusedKernel, fuse
from tilefold.block.group import ENOUGH_PARALLEL
from tilefold.block.interchange import interchanged
from tilefold.errors import BackendError, PlanError
from tilefold.plan.gpu import Given
from tilefold.plan.gpu_library import gpu_library_products
from tilefold.plan.hardware import H100, Machine, gpu_named
from tilefold.plan.library import library_products
from tilefold.plan.machine import this_machine
from tilefold.plan.planner import Plan, plan_program
from tilefold.plan.scaled import ScaledProduct, scaled_products
from tilefold.runtime.executor import load_kernel
from tilefold.runtime.fused_programs import fused_for_gpu
from tilefold.runtime.gpu_configs import chooser
from tilefold.runtime.gpu_program import GpuProgram, Launch
from tilefold.runtime.library import LibraryStep, ScaledStep
from tilefold.runtime.tuner.compiler import usual_units
from tilefold.tensor.ir import Program
from tilefold.tensor.operands import plain_operands
from tilefold.tensor.product import library_product
from tilefold.tensor.sizes import shape_function
from tilefold.tile import ir as tile
from tilefold.tile.layout import unit_axis
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.text import show
from tilefold.tile.verify import verify as verify_tile

log = logging.getLogger("tilefold")

#: "fused": one kernel wherever it is legal. "fast": what the planner predicts to be fastest, products in the library
#: where they are faster there. "greedy": the same libraries, all else fused wherever it is legal (for comparison).
Goal = Literal["fused", "fast", "greedy"]
#: Parallel blocks that fusion preserves on machines with many cores.
MOST_WORKERS = 16


def compile_program(
    p: Program, *, goal: Goal = "fast", load: bool = True, device: str = "cpu", given: Given | None = None
) -> CompiledProgram:
    """Compile a tensor program (normalised: `tensor.passes`). TilefoldError where that is impossible.

    load: also compile the kernels' code now (else when they first run). device: type of the device that the
    tensors are on; on "cuda", kernels are always compiled when a shape first needs them. "interpreter": the GPU's
    kernels in Triton's interpreter, on CPU tensors (tests). given: what studies decide for the GPU's kernels.
    """
    if device != "cpu":
        return _for_gpu(p, goal, interpreted=device == "interpreter", given=given)
    compiled = (_planned(p) if goal == "fast" else None) or _greedy(p, goal)
    if load:
        load_all([s for s in compiled.steps if isinstance(s, KernelStep)])
    return compiled


def _workers() -> int:
    return max(ENOUGH_PARALLEL, min(MOST_WORKERS, torch.get_num_threads()))


def _planned(p: Program) -> CompiledProgram | None:
    """As the planner has it; None where the program is too large for the search."""
    try:
        plan = plan_program(p, this_machine(), workers=_workers())
    except PlanError as err:
        log.info("%s is grouped greedily: %s", p.name, err.message)
        return None
    fused = plan.fused()
    named = {c.name: c for c in fused.program.body}
    steps: list[KernelStep | LibraryStep] = []
    for k in plan.kernels:
        if k.snapshot.form is None:
            steps.append(LibraryStep(named[k.members[0]], fused.program.sizes))
        else:
            steps += [KernelStep(f, dict(s.tiles), s.order) for f, s in zip(k.kernels, k.snapshot.shapes, strict=True)]
    return CompiledProgram(fused.program, fused, tuple(steps), plan)


def _greedy(p: Program, goal: Goal) -> CompiledProgram:
    apart = frozenset() if goal == "fused" else library_products(p, this_machine())
    fused = fuse(p, apart, workers=_workers())
    return CompiledProgram(fused.program, fused, tuple(_step(fused.program, k) for k in fused.kernels))


def _for_gpu(p: Program, goal: Goal, *, interpreted: bool, given: Given | None) -> CompiledProgram:
    p = plain_operands(p)
    scaled = {} if interpreted else {x.out: x for x in scaled_products(p)}
    machine = _gpu_here()
    apart = gpu_library_products(p, machine) if goal == "fast" else frozenset()
    apart |= {n for x in scaled.values() for n in (x.out, x.product)}
    while True:
        fused = fused_for_gpu(p, apart, units=machine.cores, given=given)
        steps = _gpu_steps(fused, scaled, given, interpreted=interpreted)
        if goal != "fast":
            break
        unfit = {m for s in steps if isinstance(s, GpuStep) and not s.fits() for m in s.fused.plan.group.members}
        if unfit <= apart:
            break
        log.info("%s: kept apart, for no kernel could be made of them together: %s", p.name, ", ".join(sorted(unfit)))
        apart |= unfit
    return CompiledProgram(fused.program, fused, tuple(steps), whole=_whole(fused.program, steps))


def _gpu_steps(
    fused: Fused, scaled: Mapping[str, ScaledProduct], given: Given | None, *, interpreted: bool
) -> list[Step]:
    steps: list[Step] = []
    for k in fused.kernels:
        (name,) = k.plan.group.members if len(k.plan.group.members) == 1 else ("",)
        if name in scaled:
            steps.append(ScaledStep(scaled[name], fused.program))
        elif name not in {x.product for x in scaled.values()}:
            step = _step(fused.program, k)
            steps.append(step if isinstance(step, LibraryStep) else GpuStep(k, given, interpreted=interpreted))
    return steps


def _gpu_here() -> Machine:
    """The current CUDA device; an H100 where there is none (kernels that are only looked at, or interpreted)."""
    if not torch.cuda.is_available():
        return H100
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return gpu_named(properties.name, properties.multi_processor_count)


def _whole(p: Program, steps: Sequence[Step]) -> GpuProgram | None:
    """The steps as one call, where all are kernels."""
    kernels = [s for s in steps if isinstance(s, GpuStep)]
    if len(kernels) != len(steps) or not set(p.outputs) <= {name for s in kernels for name, _, _ in s.results}:
        return None
    return GpuProgram(p.outputs, [s.launch() for s in kernels])


def load_all(steps: Sequence[KernelStep]) -> None:
    """Compile kernels side by side (the compiler runs in processes of its own), equal ones once."""
    first = {show(s.kernel()): s for s in reversed(steps)}
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        list(pool.map(KernelStep.load, first.values()))


def _step(p: Program, k: FusedKernel) -> KernelStep | LibraryStep:
    members = k.plan.group.members
    if len(members) == 1:
        c = next(c for c in p.body if c.name == members[0])
        if library_product(c) is not None:
            return LibraryStep(c, p.sizes)
    return KernelStep(k)


class KernelStep:
    """A fused kernel. It is lowered and loaded once per pattern of unit strides.

    `tiles`, `order`: by canonical dim, where the planner chose them; of the parallel loops, outermost first. Kernels
    are compiled under canonical names: equal layers of a model share one.
    """

    def __init__(self, fused: FusedKernel, tiles: Mapping[str, int] | None = None, order: Sequence[str] = ()):
        self.fused, self.tiles = fused, tiles
        self.canonical = canonical(fused.block)
        if order:
            self.canonical = replace(self.canonical, block=interchanged(self.canonical.block, order))
        block, named = self.canonical.block, self.canonical.tensors
        self.name = fused.block.name
        self.reads = tuple(named[i.name] for i in block.inputs)
        self.results = tuple(
            (named[r.name], r.dtype.torch_dtype, shape_function([fused.block.sizes[d] for d in dims]))
            for r, dims in zip(block.results, [r.dims for r in fused.block.results], strict=True)
        )
        self._tensors = tuple(named.items())
        self._syms = tuple(self.canonical.syms.items())
        self._loaded: dict[tuple[int | None, ...], Callable[..., None]] = {}
        self.kernels: dict[tuple[int | None, ...], tile.Kernel] = {}

    def usual_units(self) -> tuple[int | None, ...]:
        """Every input with its last axis contiguous."""
        return tuple(len(i.shape) - 1 if i.shape else None for i in self.canonical.block.inputs)

    def kernel(self, units: tuple[int | None, ...] | None = None) -> tile.Kernel:
        """The tile kernel for the axes of stride 1 of `reads` (default: each last axis)."""
        units = self.usual_units() if units is None else units
        found = self.kernels.get(units)
        if found is None:
            block = self.canonical.block
            unit = dict(zip((i.name for i in block.inputs), units, strict=True))
            options = LowerOptions(unit=unit, tiles=self.tiles)
            found = self.kernels[units] = verify_tile(lower(block, options))
        return found

    def load(self, units: tuple[int | None, ...] | None = None) -> Callable[..., None]:
        """Compile (or find in the cache) the kernel for these unit axes."""
        units = self.usual_units() if units is None else units
        launch = self._loaded.get(units)
        if launch is None:
            launch = self._loaded[units] = load_kernel(self.kernel(units))
        return launch

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        units = tuple([unit_axis(tensors[t]) for t in self.reads])
        launch = self._loaded.get(units) or self.load(units)
        for name, dtype, shape in self.results:
            if name not in tensors:
                tensors[name] = torch.empty(shape(syms), dtype=dtype)
        launch({new: tensors[old] for new, old in self._tensors}, {new: syms[old] for new, old in self._syms})


class GpuStep(KernelStep):
    """A fused kernel on a CUDA device: `backends.triton` chooses tiles and compiles a shape at a time."""

    def __init__(self, fused: FusedKernel, given: Given | None = None, *, interpreted: bool = False):
        super().__init__(fused)
        self.triton = TritonKernel(self.canonical.block, chooser(given), interpreted=interpreted)

    def fits(self) -> bool:
        """Whether the kernel can be rendered. Not asked where only a call tells the sizes, and of single operators."""
        block = self.canonical.block
        if block.syms or len(self.fused.plan.group.members) == 1:
            return True
        try:
            self.triton.variant(usual_units(block), self.triton.sizes({}), tf32=False, interpreted=False)
        except BackendError:
            return False
        return True

    def launch(self) -> Launch:
        """The kernel with the program's names of its tensors."""
        syms = tuple((new, old) for new, old in self._syms)
        return Launch(self.triton, tuple(old for _, old in self._tensors), syms, self.results)

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        device = tensors[self.reads[0]].device if self.reads else next(iter(tensors.values())).device
        for name, dtype, shape in self.results:
            if name not in tensors:
                tensors[name] = torch.empty(shape(syms), dtype=dtype, device=device)
        self.triton.launch([tensors[old] for _, old in self._tensors], {new: syms[old] for new, old in self._syms})


#: What a compiled program runs, in order.
Step = KernelStep | LibraryStep | ScaledStep


@dataclass(frozen=True)
class CompiledProgram:
    """A program ready to run: what it was made from, and the steps in order. `plan`: if it was planned.

    `whole`: the steps for `frontend.direct`, which runs them with less work for Python.
    """

    program: Program
    fused: Fused
    steps: tuple[Step, ...]
    plan: Plan | None = None
    whole: GpuProgram | None = None
    _last_use: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for at, s in enumerate(self.steps):
            self._last_use.update(dict.fromkeys(s.reads, at))
        for name in (*self.program.outputs, *(i.name for i in self.program.inputs)):
            self._last_use.pop(name, None)

    def __call__(
        self,
        inputs: Mapping[str, torch.Tensor],
        syms: Mapping[str, int],
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Outputs by name. `out` gives tensors (any strides) that named results are written into."""
        tensors = {**inputs, **(out or {})}
        for at, s in enumerate(self.steps):
            s.run(tensors, syms)
            for t in s.reads:
                if self._last_use.get(t) == at:
                    tensors.pop(t, None)
        return {name: tensors[name] for name in self.program.outputs}
