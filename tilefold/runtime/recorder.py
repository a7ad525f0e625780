"""A call of a region as a tape (`runtime.tape`): the Python that defines the call runs once and is written down.

Below Python every operator of torch passes `__torch_dispatch__`, with extents and strides that are numbers by then:
views become views of slots, products go to their `out=` variants with memory that the tape chooses, copies and
conversions to `copy_`. Kernels of ours are no operators of torch: their steps say what they launched. Whatever has no
instruction is called as it was, from Python. A result that depends on a tensor of unknown origin is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tilefold import config
from tilefold.runtime.operators import form_of
from tilefold.runtime.tape import GIVEN, NOTHING, Instruction, Kind, Op, Slot, Tape, finished

aten = torch.ops.aten
#: Operators whose result is new memory that nothing has been written to.
_EMPTY = (
    *(aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default),
    aten.empty_like.default,
)
_COPIES = (aten.clone.default, aten._to_copy.default)
_PRODUCTS = {
    **{aten.mm.default: Op.MM, aten.mm.out: Op.MM, aten.bmm.default: Op.BMM, aten.bmm.out: Op.BMM},
    **{aten.addmm.default: Op.ADDMM, aten.addmm.out: Op.ADDMM},
    **{aten.baddbmm.default: Op.BADDBMM, aten.baddbmm.out: Op.BADDBMM},
}
_CHANGING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of torch as a function of its tensors alone. leaves: its flat arguments, tensors left out, which
    belong at `places` of them; wanted: the flat results that are tensors."""

    func: Any
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    spec: TreeSpec
    wanted: tuple[int, ...]

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        args, kwargs = self.given(tensors)
        made, _ = tree_flatten(self.func(*args, **kwargs))
        return tuple([made[n] for n in self.wanted])

    def given(self, tensors: Sequence[object]) -> tuple[Any, Any]:
        """Its positional arguments and keywords."""
        leaves = list(self.leaves)
        for n, x in zip(self.places, tensors, strict=True):
            leaves[n] = x
        return tree_unflatten(leaves, self.spec)  # type: ignore[return-value]


class Recorder(TorchDispatchMode):
    """Records what runs while it is entered, on these arguments. `refused`: why there can be no tape."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch wraps the hook in what imports all of Dynamo, two seconds of a process that only loads packages.
        Dynamo does not look into compiled regions."""
        return False

    def __init__(self, args: Sequence[object], constants: Iterable[torch.Tensor]):
        super().__init__()
        self.refused = ""
        self._slots: list[Slot] = []
        self._code: list[Instruction] = []
        self._known: dict[int, tuple[ref[torch.Tensor], int]] = {}
        self._offsets: list[int] = []  # storage offset of each slot, in elements
        self._extents: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # and its extents and strides
        self._results: dict[int, int] = {}  # bytes of what the library allocates
        self._same: dict[int, int] = {}  # views that show all of a slot as it is
        self._step = "", ""
        self._aside = False
        self._device: torch.device | None = None
        for n, x in enumerate(args):
            if isinstance(x, torch.Tensor):
                self._new(x, Slot(Kind.ARGUMENT, n))
        self.constants(constants)

    def constants(self, xs: Iterable[torch.Tensor]) -> None:
        """Tensors that are the same in every call."""
        for x in xs:
            if self._slot(x) is None:
                self._new(x, Slot(Kind.CONSTANT, like=x))

    def step(self, name: str, where: str) -> None:
        """The step that runs next."""
        self._step = name, where

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs meanwhile is not written down: a launcher's own operators."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def kernel(self, address: int, outside: int, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """A C function was called with the addresses of these tensors and integers. outside: address of the function
        that says whether an index was out of range, or 0."""
        self._add(Op.KERNEL, self.slots(tensors), (address, outside, *numbers))

    def opaque(self, run: Callable[..., Sequence[object]], args: Sequence[object]) -> Sequence[object]:
        """The results of a callable that a call of the tape calls as it is: another compiler's code."""
        with self.aside(), _disable_current_modes():
            made = run(*args)
        if not self.refused:
            self._call(run, tuple(args), {}, tuple(made))
        return made

    @property
    def at(self) -> tuple[str, str]:
        """Name and line of the step that runs."""
        return self._step

    def add(self, instruction: Instruction | None) -> None:
        """What a step has called, written down by itself for the slots of its tensors; None: nothing."""
        if instruction is not None and not self.refused:
            self._code.append(instruction)

    def tape(self, outputs: Sequence[object]) -> Tape | None:
        """The record of a call that returned these; None where it was refused. Results that are no tensors are those of
        every call: numbers that follow from the arguments' sizes."""
        fixed: list[object] = []
        found: list[int | None] = []
        for x in outputs:
            if x is None or isinstance(x, torch.Tensor):
                found.append(NOTHING if x is None else self._slot(x))
            else:
                found.append(GIVEN - len(fixed))
                fixed.append(x)
        slots = [n for n in found if n is not None]
        if len(slots) < len(found):
            self.refused = self.refused or "a result that no recorded operator made"
        if self.refused or self._device is None:
            return None
        like = torch.empty(0, dtype=torch.uint8, device=self._device)
        return finished(self._slots, self._code, slots, like, fixed, self._results)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.refused and not self._aside:
            try:
                self._ran(func, args, kwargs, out)
            # Hidden: an operator whose form the recorder has not foreseen. The call has its result either way; the
            # region then stays in Python and says so.
            except Exception as err:
                if config.load().strict:
                    raise
                self.refused = f"{func} cannot be recorded: {err}"
        return out

    def _ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        operands = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        written = func._schema.is_mutable and isinstance(out, torch.Tensor) and self._slot(out) is not None
        if not written and any(self._slot(x) is None for x in operands):
            return  # a result that depends on it is known to nobody, and refused
        if any(tag in func.tags for tag in _CHANGING) and not _by_places(func, operands):
            self.refused = f"{func} depends on values of tensors"
        elif not isinstance(out, torch.Tensor):
            self._several(func, args, kwargs, out)
        elif (slot := self._slot(out)) is not None:
            self._written(func, args, kwargs, out, slot)
        elif (base := self._viewed(args, out)) is not None:
            self._view(base, out)
        elif func in _EMPTY:
            self._memory(out)
        elif func in _PRODUCTS:
            self._product(func, args, kwargs, self._memory(out))
        elif func in _COPIES and out.device == args[0].device:
            reads = self.slots(args[:1])
            self._add(Op.COPY, (self._memory(out), *reads))
        elif func is aten.convolution.default:
            self._convolution(args, out)
        elif func is aten._scaled_mm.default and _by_scales(args, kwargs):
            self._scaled(args, kwargs, out)
        else:
            self._call(func, args, kwargs, out)

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor, slot: int) -> None:
        """An operator that wrote into a tensor, or gave one back."""
        if not func._schema.is_mutable:
            return
        if func in _PRODUCTS:
            self._product(func, args, kwargs, slot)
        elif func is aten.copy_.default and args[1].device == out.device:
            self._add(Op.COPY, (slot, *self.slots(args[1:2])))
        else:
            self._call(func, args, kwargs, None)

    def _several(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operator with several results, or with none that is a tensor: a size, which the arguments' decide."""
        made = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
        bases = [self._viewed(args, x) for x in made]
        if None not in bases and made:
            for base, x in zip(bases, made, strict=True):
                self._view(base, x)  # type: ignore[arg-type]
        elif made or func._schema.is_mutable:
            self._call(func, args, kwargs, out)

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: int) -> None:
        scalars = tuple(float(kwargs.get(name, 1)) for name in ("beta", "alpha"))
        self._add(_PRODUCTS[func], (out, *self.slots(args)), scalars=scalars)

    def _convolution(self, args: tuple[Any, ...], out: torch.Tensor) -> None:
        x, w, bias, stride, padding, dilation, transposed, output_padding, groups = args
        dims = x.dim() - 2
        reads = self.slots([x, w] if bias is None else [x, w, bias])
        lists = [_whole(v, dims) for v in (stride, padding, dilation, output_padding)]
        numbers = (dims, groups, int(transposed), *(n for v in lists for n in v))
        self._add(Op.CONVOLUTION, (self._new(out, Slot(Kind.RESULT)), *reads), numbers)

    def _scaled(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
        given = [*args, *[kwargs[n] for n in ("scale_a", "scale_b") if n in kwargs]][:4]
        fast = kwargs.get("use_fast_accum", args[7] if len(args) > 7 else False)
        self._add(Op.SCALED_MM, (self._memory(out), *self.slots(given)), (int(fast),))

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """What has no instruction: the operator itself, of tensors in their places."""
        leaves, spec = tree_flatten((args, kwargs))
        places = [n for n, a in enumerate(leaves) if isinstance(a, torch.Tensor)]
        reads = self.slots([leaves[n] for n in places])
        results, _ = tree_flatten(out)
        wanted = [n for n, x in enumerate(results) if isinstance(x, torch.Tensor)]
        memory = {leaves[n].untyped_storage()._cdata for n in places}
        if any(results[n].untyped_storage()._cdata in memory for n in wanted):
            self.refused = f"{func} gives several views, or one of another type"
            return
        fixed = tuple(None if isinstance(a, torch.Tensor) else a for a in leaves)
        call = Operator(func, fixed, tuple(places), spec, tuple(wanted))
        made = tuple(self._new(results[n], Slot(Kind.RESULT)) for n in wanted)
        form = form_of(func, args, kwargs)
        if form is None:
            self._add(Op.CALL, reads, made, call=call)
        else:
            self._add(Op.NAMED, reads, made, call=call, arguments=form)

    def _viewed(self, args: tuple[Any, ...], out: torch.Tensor) -> int | None:
        """The slot of an operand that has the result's memory."""
        here = out.untyped_storage()._cdata
        for x in tree_flatten(args)[0]:
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata == here and x.dtype is out.dtype:
                return self.slots([x])[0] if not self.refused else None
        return None

    def _view(self, base: int, out: torch.Tensor) -> None:
        while self._slots[base].kind is Kind.VIEW:
            base = self._slots[base].source
        offset, shape = int(out.storage_offset()) - self._offsets[base], tuple(out.shape)
        n = self._new(out, Slot(Kind.VIEW, base, offset, shape, out.stride()))
        if (offset, shape, out.stride()) == (0, *self._extents[base]):
            self._same[n] = base

    def _memory(self, out: torch.Tensor) -> int:
        return self._new(out, Slot(Kind.OWN, sizes=tuple(out.shape), strides=out.stride(), like=_like(out)))

    def _new(self, x: torch.Tensor, slot: Slot) -> int:
        n = len(self._slots)
        self._slots.append(slot)
        self._offsets.append(int(x.storage_offset()))
        self._extents.append((tuple(x.shape), x.stride()))
        if slot.kind is Kind.RESULT:
            self._results[n] = x.untyped_storage().nbytes()
        self._known[id(x)] = ref(x), n
        self._device = x.device if self._device is None or self._device.type == "cpu" else self._device
        return n

    def _slot(self, x: torch.Tensor) -> int | None:
        known = self._known.get(id(x))
        return known[1] if known is not None and known[0]() is x else None

    def slots(self, xs: Iterable[object]) -> tuple[int, ...]:
        """Of tensors, in their order; the call is refused where one comes from nowhere."""
        found = [self._slot(x) if isinstance(x, torch.Tensor) else None for x in xs]
        if None in found:
            self.refused = self.refused or f"{self._step[0]} reads a tensor that no recorded operator made"
        return tuple(self._same.get(n, n) for n in found if n is not None)

    def _add(
        self,
        op: Op,
        slots: tuple[int, ...],
        numbers: tuple[int, ...] = (),
        scalars: tuple[float, ...] = (),
        call: Callable[..., object] | None = None,
        arguments: tuple[object, ...] = (),
    ) -> None:
        if not self.refused:
            name, where = self._step
            self._code.append(Instruction(op, name, where, slots, numbers, scalars, call, arguments))


def _by_places(func: Any, operands: Sequence[torch.Tensor]) -> bool:
    """Whether elements are picked by their places, not by a mask of them: as many as there are places."""
    masks = (torch.bool, torch.uint8)
    return func is aten.index.Tensor and all(x.dtype not in masks for x in operands[1:])


def _by_scales(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an 8-bit product has no bias and no scale of its result."""
    return not any(kwargs.get(n) is not None for n in ("bias", "scale_result")) and not any(
        x is not None for x in args[4:6]
    )


def _like(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor of the same type and device."""
    return torch.empty(0, dtype=x.dtype, device=x.device)


def _whole(v: Sequence[int], dims: int) -> tuple[int, ...]:
    """A setting of a convolution for every axis."""
    return tuple(v) * dims if len(v) == 1 else tuple(v)
