"""Calls of graphs that are GPU kernels alone: planned once for arguments of a kind, then allocations and launches.

A view of an argument or a result costs as much as a launch, and only moves extents and strides. Views are
made when a call is planned; results are allocated in the shape that the graph returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from tilefold.backends.triton import launch
from tilefold.backends.triton.build import DIVISOR
from tilefold.backends.triton.views import Like
from tilefold.frontend.operators.bindings import Lowered, OutputBinding
from tilefold.frontend.regions.alike import Alike
from tilefold.frontend.regions.early import attempt, static
from tilefold.frontend.regions.execute import Executable, Runner
from tilefold.frontend.regions.real import on_real_tensors
from tilefold.frontend.regions.replay import Replayed
from tilefold.runtime.gpu_program import GpuCall, GpuProgram, Made
from tilefold.runtime.program import CompiledProgram
from tilefold.runtime.tape import NOTHING, Instruction, Kind, Op, Slot, Tape, finished
from tilefold.runtime.writing import writing
from tilefold.tensor.sizes import shape_function

#: Calls remembered a graph; dynamic shapes make new ones.
CALLS = 4096


def executable(lowered: Lowered, runner: Runner, over: Mapping[str, int] = MappingProxyType({})) -> Executable:
    """The graph as a callable: the direct one where its program runs as one call. over: results of the program that
    take the place of arguments, and the positions of these (`regions.replaced`)."""
    if not isinstance(runner, CompiledProgram):
        return Executable(lowered, runner)
    if runner.whole is not None and any(b.position is not None for b in lowered.inputs):
        return Direct(lowered, runner, runner.whole, over)
    return Replayed(lowered, runner, writes=bool(over))


def expect_kernels(values: Sequence[object]) -> None:
    """Have what compiles kernels start while a graph of these arguments is captured: none was compiled before."""
    devices = (v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda)
    device = next(devices, None)
    if device is not None and torch.cuda.is_available():  # a pretended device has nothing to compile for
        launch.expect_kernels(device)


def start_building(run: Executable, values: Sequence[object]) -> None:
    """Have the kernels of a graph compiled by other processes while the rest of a model is planned.

    values: its arguments, fake ones. Nothing where sizes are only known when it is called.
    """
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if isinstance(run.runner, CompiledProgram) and not run.lowered.syms and static(tensors):
        with attempt(run.lowered.program.name):
            like = {name: Like.of(read(values, {})) for name, read in run.inputs}
            with on_real_tensors():  # rendering evaluates some
                run.runner.start_building(like, {})


@dataclass(frozen=True, slots=True)
class _Known:
    """A planned call, and the tensors that it is for: alignments of their addresses, and all else."""

    call: GpuCall
    aligned: list[int]
    alike: Alike


class Direct(Replayed):
    """An `Executable` whose program is one planned call."""

    aligned = True

    def __init__(
        self,
        lowered: Lowered,
        runner: CompiledProgram,
        whole: GpuProgram,
        over: Mapping[str, int] = MappingProxyType({}),
    ):
        super().__init__(lowered, runner, writes=bool(over))
        self._over = over
        self._where = runner.where
        self.whole = whole
        self._positions = tuple(dict.fromkeys(b.position for b in lowered.inputs if b.position is not None))
        self._straight = self._positions == tuple(range(len(self._positions)))
        self._numbers = tuple(b.position for b in lowered.syms if b.axis is None)
        self._extents = tuple(
            dict.fromkeys(b.position for b in lowered.syms if b.axis is not None and b.position not in self._positions)
        )
        self._made = {n: self._alone(n) for n in dict.fromkeys(lowered.program.outputs) if n not in over}
        returned = [o.name for o in lowered.outputs]
        self._plain = returned == list(self._made) and all(o is not None for o in self._made.values())
        self._known: dict[tuple[object, ...], _Known] = {}
        self._last: _Known | None = None

    def _alone(self, name: str) -> OutputBinding | None:
        """The only result of the graph that is a program's result, if it may be allocated as it is returned."""
        counts = Counter(o.name for o in self.lowered.outputs)
        (first, *_) = [o for o in self.lowered.outputs if o.name == name]
        return first if counts[name] == 1 and not first.gaps and first.offset is None else None

    def in_python(self, args: Sequence[object]) -> tuple[torch.Tensor | None, ...]:
        """See `Replayed`."""
        made = self.again(args)
        return self._planned_call(args)[0] if made is None else made

    def _planned_call(self, args: Sequence[object]) -> tuple[tuple[torch.Tensor | None, ...], GpuCall, list[int]]:
        """The results, the call that made them, and the addresses of all its slots."""
        xs: list[torch.Tensor] = [args[n] for n in self._positions]  # type: ignore[misc]
        pointers = [x.data_ptr() for x in xs]
        call = self._looked_up(args, xs, [p % DIVISOR for p in pointers])
        return self._made_by(call, args, xs, pointers), call, pointers

    def written(self, args: Sequence[object]) -> tuple[tuple[torch.Tensor | None, ...], Tape | None, str]:
        """See `Replayed`."""
        made, call, pointers = self._planned_call(args)
        with writing(bool(self._over)):
            return made, self._tape(args, call, pointers), ""

    def _tape(self, args: Sequence[object], call: GpuCall, pointers: Sequence[int]) -> Tape:
        syms, first = self.symbols(args), args[self._positions[0]]
        assert isinstance(first, torch.Tensor)
        slots, code = call.written(self._positions, self._constants, pointers, self._where, first.device)
        of = {name: len(self._positions) + len(self._constants) + k for k, name in enumerate(self._made)}
        outputs = [self._output(o, slots, code, of, syms) for o in self.lowered.outputs]
        return finished(slots, code, outputs, torch.empty(0, dtype=torch.uint8, device=first.device))

    def _output(
        self,
        o: OutputBinding,
        slots: list[Slot],
        code: list[Instruction],
        made: Mapping[str, int],
        syms: Mapping[str, int],
    ) -> int:
        """The slot of a result of the graph, which may be new: an argument, or a view or a copy of what was made."""
        if o.position is not None:
            slots.append(Slot(Kind.ARGUMENT, o.position))
        elif o.name is None:
            return NOTHING
        elif o.name in self._over:
            slots.append(Slot(Kind.ARGUMENT, self._over[o.name]))
        elif self._made[o.name] is not None:
            return made[o.name]
        else:
            n, size, strides = made[o.name], shape_function(o.shape)(syms), shape_function(o.strides)(syms)
            first = 0 if o.offset is None else shape_function([o.offset])(syms)[0]
            slots.append(Slot(Kind.VIEW, n, first, size, packed_strides(size) if o.gaps else strides))
            if o.gaps:
                slots.append(Slot(Kind.OWN, sizes=size, strides=strides, like=slots[n].like))
                code.append(Instruction(Op.COPY, "copy", "", (len(slots) - 1, len(slots) - 2)))
        return len(slots) - 1

    def again(self, args: Sequence[object]) -> tuple[torch.Tensor | None, ...] | None:
        """The results, if all tensors are like those of the last call; else None, and nothing has happened."""
        last = self._last
        if last is None:
            return None
        straight = self._straight and len(args) == len(self._positions)
        xs: Sequence[torch.Tensor] = args if straight else [args[n] for n in self._positions]  # type: ignore
        if not last.alike(xs):
            return None
        pointers = [x.data_ptr() for x in xs]
        if [p % DIVISOR for p in pointers] != last.aligned:
            return None
        return self._made_by(last.call, args, xs, pointers)

    def reads(self, n: int) -> bool:
        """Whether the graph's arguments are n tensors, all of which the program reads."""
        return sorted(self._positions) == list(range(n))

    def _made_by(
        self, call: GpuCall, args: Sequence[object], xs: Sequence[torch.Tensor], pointers: list[int]
    ) -> tuple[torch.Tensor | None, ...]:
        if not self._over:
            made = self._run_planned(call, xs[0].get_device(), pointers)
        else:
            with writing():
                made = self._run_planned(call, xs[0].get_device(), pointers)
        return tuple(made) if self._plain else self._viewed(args, made)

    def _run_planned(self, call: GpuCall, device: int, pointers: list[int]) -> list[torch.Tensor]:
        if device < 0:
            return call.run(None, pointers)
        if device == torch._C._cuda_getDevice():
            return call.run(torch._C._cuda_getCurrentRawStream(device), pointers)
        with torch.cuda.device(device):
            return call.run(torch._C._cuda_getCurrentRawStream(device), pointers)

    def _looked_up(self, args: Sequence[object], xs: Sequence[torch.Tensor], aligned: list[int]) -> GpuCall:
        """The call for such arguments, which becomes the last one where tensors alone decide."""
        shapes, strides, kinds = [x.shape for x in xs], [x.stride() for x in xs], [x.dtype for x in xs]
        key = (xs[0].get_device(), *aligned, *shapes, *strides, *kinds)
        if self._numbers or self._extents:
            key += (*[args[n] for n in self._numbers], *[args[n].shape for n in self._extents])  # type: ignore[attr-defined]
        found = self._known.get(key)
        if found is None:
            found = _Known(self._planned(args), aligned, Alike(xs))
            if len(self._known) >= CALLS:
                self._known.clear()
            self._known[key] = found
        if not (self._numbers or self._extents):
            self._last = found  # one assignment: other threads may be here too
        return found.call

    def _viewed(self, args: Sequence[object], made: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Results that are arguments, copies into other strides, or several views of one memory."""
        syms = self.symbols(args)
        results = dict(zip(self._made, made, strict=True))
        results |= {name: args[position] for name, position in self._over.items()}  # type: ignore[misc]
        return tuple(
            results[o.name]
            if o.name is not None and (o.name in self._over or self._made[o.name] is not None)
            else view(args, results, syms)
            for o, view in zip(self.lowered.outputs, self._outputs, strict=True)
        )

    def _planned(self, args: Sequence[object]) -> GpuCall:
        syms = self.symbols(args)
        inputs = {name: read(args, syms) for name, read in self.inputs}
        slots = {b.name: self._positions.index(b.position) for b in self.lowered.inputs if b.position is not None}
        fixed = [b.name for b in self.lowered.inputs if b.position is None]
        slots |= {n: len(self._positions) + k for k, n in enumerate((*fixed, *self._made))}
        made = {n: self._allocation(n, syms) for n in self._made}
        names = {b.position: b.name for b in self.lowered.inputs}
        over = {n: names[position] for n, position in self._over.items()}
        return self.whole.plan(inputs, syms, made, slots, [inputs[n].data_ptr() for n in fixed], over)

    def _allocation(self, name: str, syms: dict[str, int]) -> Made:
        dtype, shape = self.whole.results[name]
        o = self._made[name]
        if o is not None:
            return Made(shape_function(o.shape)(syms), shape_function(o.strides)(syms), dtype)
        packed = shape(syms)
        return Made(packed, packed_strides(packed), dtype)


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a row-major tensor of this shape."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides[: len(shape)]))
