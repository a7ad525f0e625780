"""Regions of GPUs in packages (`tapes`), loaded: what a process needs that only runs them, without Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tilefold.backends.triton.counters import counters_of
from tilefold.backends.triton.driver import Image, function_of
from tilefold.frontend.packages.archive import torch_dtype
from tilefold.frontend.packages.form import (
    StoredInstruction,
    StoredOperatorCall,
    StoredSlot,
    StoredTape,
    TapeArgument,
    operator_of,
    value_of,
)
from tilefold.runtime.native.load import stream_of
from tilefold.runtime.operators import form_of
from tilefold.runtime.tape import Instruction, Op, Slot, Tape

#: What kernels are compiled for, in bytes (`backends.triton.build.DIVISOR`).
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class _Again:
    """An operator of a stored tape, called with its tensors."""

    call: StoredOperatorCall
    func: Callable[..., Any]

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        args, kwargs = self.given(tensors)
        made = torch.utils._pytree.tree_leaves(self.func(*args, **kwargs))
        return tuple([made[n] for n in self.call.wanted])

    def given(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its positional arguments and keywords."""
        named = {str(n): x for n, x in enumerate(tensors)}
        return value_of(self.call.args)(named), {k: value_of(v)(named) for k, v in self.call.kwargs.items()}


def tape_of(
    stored: StoredTape,
    device: torch.device,
    data: Callable[[str], bytes],
    tensors: Sequence[torch.Tensor],
    functions: dict[tuple[str, str, int], int],
) -> Tape:
    """The tape on a device, whose context is current. data: kept bytes; functions: kernels that are loaded already, by
    their names, code and bytes of shared memory. ParseError: it is damaged; BackendError: a kernel does not load."""

    def slot(s: StoredSlot) -> Slot:
        like = tensors[s.constant] if s.constant is not None else None
        if like is None and s.dtype is not None:
            like = torch.empty(0, dtype=torch_dtype(s.dtype), device=device)
        return Slot(s.kind, s.source, s.offset, s.sizes, s.strides, like)

    def instruction(i: StoredInstruction) -> Instruction:
        call: Callable[..., object] | None = None
        op, numbers, given = i.op, i.numbers, tuple[object, ...](map(data, i.maps))
        if i.kernel is not None:
            key = (i.kernel.name, i.kernel.code, numbers[3])
            if key not in functions:
                functions[key] = function_of(Image(i.kernel.name, data(i.kernel.code)), numbers[3])
            numbers = (functions[key], *numbers[1:])
            if i.kernel.counter:
                counters = counters_of(device.index)
                counters.reserve()
                call = counters.address
        if i.call is not None:
            call = again = _Again(i.call, operator_of(i.call.target))
            form = form_of(again.func, *again.given([torch.empty(0) for _ in i.slots]))
            op, given = (op, given) if form is None else (Op.NAMED, form)
        return Instruction(op, i.name, i.where, i.slots, numbers, i.scalars, call, given, i.release)

    like = torch.empty(0, dtype=torch.uint8, device=device)
    return Tape(
        tuple(map(slot, stored.slots)), tuple(map(instruction, stored.code)), stored.outputs, stored.arena, like
    )


class TapedRegion:
    """A stored tape, called as the graph of its region. Arguments with other strides, or at addresses that the kernels
    are not compiled for, are copied."""

    def __init__(self, tape: Tape, wanted: Sequence[TapeArgument], module: ModuleType):
        self._tape, self._wanted, self._module = tape, tuple(wanted), module
        on_gpu = tape.like.is_cuda
        self._region = module.region(True, stream_of if on_gpu else None)

    def __call__(self, *args: object) -> Sequence[torch.Tensor | None]:
        return self.boxed(list(args))

    def boxed(self, args: list[object]) -> Sequence[torch.Tensor | None]:
        """A call whose caller gives its arguments up: the list is emptied."""
        made: Sequence[torch.Tensor | None] | None = self._module.run(self._region, args)
        if made is None:
            fitting = [_fitting(x, w) for x, w in zip(args, self._wanted, strict=True)]
            args.clear()
            made = self._module.run(self._region, fitting)
            if made is None:
                self._module.add(self._region, tuple(fitting), *self._tape.packed())
                made = self._module.run(self._region, fitting)
        assert made is not None
        return made


def lies_as(x: torch.Tensor, w: TapeArgument) -> bool:
    """Whether a tensor has the strides that a tape wants, at an address that its kernels take."""
    return x.stride() == w.strides and (not w.aligned or x.data_ptr() % ALIGNED == 0)


def _fitting(x: object, w: TapeArgument) -> object:
    if not isinstance(x, torch.Tensor):
        return x
    if lies_as(x, w):
        return x.detach()
    return torch.empty_strided(w.shape, w.strides, dtype=x.dtype, device=x.device).copy_(x)
