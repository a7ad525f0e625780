"""Programs of GPU kernels alone, planned as one call that needs only addresses.

What is between kernels has no tensors: it lies in one scratch allocation, at offsets that values share whose
lifetimes do not meet. All memory comes from torch's allocator on the current stream, so that calls may be
captured in a CUDA graph; nothing waits for the device. Where the device can, kernels after the first are there
before the one ahead of them has ended (`backends.triton.dependent`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda  # type: ignore[attr-defined]

from tilefold.backends.triton.dependent import ALONE, Place, enabled, places
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.launcher import Plan, picker
from tilefold.backends.triton.views import Like
from tilefold.block.ir import work_of
from tilefold.errors import BackendError
from tilefold.runtime.arena import packed
from tilefold.runtime.launches import launch_of
from tilefold.runtime.spans import profiled, span
from tilefold.runtime.tape import Instruction, Kind, Slot

Shape = Callable[[Mapping[str, int]], tuple[int, ...]]
Start = Callable[[int, Sequence[int]], None]
Pick = Callable[[Sequence[int]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel of a program: the program's names of its tensors, of its symbols, and what it makes."""

    kernel: TritonKernel
    tensors: tuple[str, ...]
    syms: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, torch.dtype, Shape], ...]


@dataclass(frozen=True, slots=True)
class Made:
    """A result that a call allocates: extents and strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class GpuCall:
    """A planned call: plans, each with the slots of its arguments.

    Slots: inputs and constants as the caller gives them, then `made`, then scratch values, which lie at `offsets`
    of `scratch` bytes and have `sizes` bytes. `titles`: of the plans, in a profiler.
    """

    constants: tuple[int, ...]
    made: tuple[Made, ...]
    scratch: int
    offsets: tuple[int, ...]
    launches: tuple[tuple[Plan, tuple[int, ...]], ...]
    titles: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    _starts: tuple[tuple[Start, Pick], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", tuple((plan.start, picker(slots)) for plan, slots in self.launches))

    def run(self, stream: int | None, pointers: list[int]) -> list[torch.Tensor]:
        """Allocate and launch on a stream of the current device (None: on the CPU); `pointers`: of the inputs."""
        empty = _empty_strided_cpu if stream is None else _empty_strided_cuda
        made = [empty(m.shape, m.strides, m.dtype) for m in self.made]
        pointers += self.constants
        pointers += [y.data_ptr() for y in made]
        if self.offsets:
            scratch = empty((self.scratch,), (1,), torch.uint8)
            base = scratch.data_ptr()
            pointers += [base + n for n in self.offsets]
        if self.titles and profiled():
            for title, (start, pick) in zip(self.titles, self._starts, strict=True):
                with span(title):
                    start(stream or 0, pick(pointers))
            return made
        for start, pick in self._starts:
            start(stream or 0, pick(pointers))
        return made

    def written(
        self,
        positions: Sequence[int],
        constants: Sequence[torch.Tensor],
        pointers: Sequence[int],
        where: Sequence[str],
        device: torch.device,
    ) -> tuple[list[Slot], list[Instruction]]:
        """The call for a tape: its slots and launches. positions: of the inputs among the arguments; pointers: the
        slots' addresses in some call; where: for errors, of the steps."""

        def own(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Slot:
            return Slot(Kind.OWN, sizes=shape, strides=strides, like=torch.empty(0, dtype=dtype, device=device))

        slots = [Slot(Kind.ARGUMENT, n) for n in positions]
        slots += [Slot(Kind.CONSTANT, like=x) for x in constants]
        slots += [own(m.shape, m.strides, m.dtype) for m in self.made]
        slots += [own((n,), (1,), torch.uint8) for n in self.sizes]
        titles = self.titles or ("kernel",) * len(self.launches)
        code = [
            launch_of(plan, places, [pointers[n] for n in places], title, at)
            for (plan, places), title, at in zip(self.launches, titles, where, strict=True)
        ]
        return slots, [i for i in code if i is not None]


class GpuProgram:
    """Kernels in order. `outputs`: what the program returns; other results are kept between kernels only. `titles`: of
    the kernels, in a profiler."""

    def __init__(self, outputs: Sequence[str], launches: Sequence[Launch], titles: Sequence[str] = ()):
        self.launches, self.titles = tuple(launches), tuple(titles)
        self.results = {name: (dtype, shape) for k in launches for name, dtype, shape in k.results}
        self.between = tuple(n for n in self.results if n not in outputs)

    def plan(
        self,
        inputs: Mapping[str, torch.Tensor],
        syms: Mapping[str, int],
        made: Mapping[str, Made],
        slots: Mapping[str, int],
        constants: Sequence[int],
        over: Mapping[str, str] = MappingProxyType({}),
    ) -> GpuCall:
        """Compile what a call on such tensors needs; `slots` of inputs and results.

        `made`: how the results are allocated, in the order of their slots, packed memory each. `over`: results that
        are none of these, but are written over inputs.
        """
        shapes = {n: self.results[n][1](syms) for n in self.results}
        sizes = {n: _nbytes(shapes[n], self.results[n][0]) for n in self.between}
        offsets, total = packed(sizes, self._lifetimes())
        device = next(iter(inputs.values())).device
        tensors = dict(inputs)
        scratch = torch.empty(total, dtype=torch.uint8, device=device)
        for n, (dtype, _) in self.results.items():
            if n in over:
                tensors[n] = _written_over(inputs[over[n]], shapes[n])
            elif n in sizes:
                tensors[n] = scratch[offsets[n] : offsets[n] + sizes[n]].view(dtype).view(shapes[n])
            else:
                tensors[n] = torch.empty(shapes[n], dtype=dtype, device=device)
        at = {**slots, **{n: len(slots) + k for k, n in enumerate(self.between)}}
        at |= {n: slots[old] for n, old in over.items()}
        launches = []
        for k, place in zip(self.launches, self._places(shapes, device), strict=True):
            own = {new: syms[old] for new, old in k.syms}
            plan = k.kernel.plan([tensors[n] for n in k.tensors], own, place)
            launches.append((plan, tuple(at[n] for n in k.tensors)))
        order, widths = tuple(offsets[n] for n in self.between), tuple(sizes[n] for n in self.between)
        return GpuCall(tuple(constants), tuple(made.values()), total, order, tuple(launches), self.titles, widths)

    def start_building(self, inputs: Mapping[str, Like], syms: Mapping[str, int], device: torch.device) -> None:
        """Have compiled meanwhile, by other processes, what a call on such tensors needs."""
        shapes = {n: shape(syms) for n, (_, shape) in self.results.items()}
        tensors = dict(inputs) | {n: Like.packed(shapes[n], self.results[n][0], device) for n in self.results}
        placed = zip(self.launches, self._places(shapes, device), strict=True)
        for k, place in sorted(placed, key=lambda x: -work_of(x[0].kernel.block)):
            own = {new: syms[old] for new, old in k.syms}
            k.kernel.start_building([tensors[n] for n in k.tensors], own, place)

    def _places(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> Sequence[Place]:
        launched = [any(0 not in shapes[n] for n, _, _ in k.results) for k in self.launches]
        return places(launched) if enabled(device) else [ALONE] * len(launched)

    def _lifetimes(self) -> dict[str, tuple[int, int]]:
        """First and last kernel that has each scratch value."""
        found: dict[str, tuple[int, int]] = {}
        for at, k in enumerate(self.launches):
            for n in k.tensors:
                found[n] = (found.get(n, (at, at))[0], at)
        return found


def _written_over(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An input as the memory of a result. BackendError where it is not what it was compiled for."""
    if x.shape != shape or not x.is_contiguous():
        raise BackendError(f"an argument to write over has extents {tuple(x.shape)} and strides {x.stride()}")
    return x


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    n = dtype.itemsize
    for extent in shape:
        n *= extent
    return n
