"""Regions of GPUs in packages: the tape of their call (`runtime.tape`), with the machine code of its kernels.

A call on a GPU is fixed by the extents of its arguments, so that a tape is all of it: a process that loads one renders
and compiles nothing, needs no Triton, and runs the region in C++, by the module that the package brings along.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from tilefold.backends.triton.launcher import Plan
from tilefold.errors import UnsupportedError
from tilefold.frontend.packages.form import (
    Ref,
    StoredInstruction,
    StoredKernelCode,
    StoredOperatorCall,
    StoredSlot,
    StoredTape,
    TapeArgument,
    written,
)
from tilefold.frontend.packages.taped import ALIGNED
from tilefold.runtime.recorder import Operator
from tilefold.runtime.tape import Instruction, Kind, Op, Slot, Tape

HINT = "torch.compile(model, backend='tilefold') compiles it in the process that runs it"


def stored_tape(
    tape: Tape,
    args: Sequence[object],
    keep: Callable[[bytes], str],
    constant: Callable[[torch.Tensor], int],
    namespaces: Collection[str] = ("aten",),
) -> StoredTape:
    """The form of a tape that was recorded for these arguments. keep: bytes, by their digest; constant: a tensor, by
    its number; namespaces: of operators that are known where it is read. UnsupportedError: it holds what has no form.
    """

    def slot(s: Slot) -> StoredSlot:
        number = constant(s.like) if s.kind is Kind.CONSTANT and s.like is not None else None
        dtype = None if s.like is None else str(s.like.dtype)
        return StoredSlot(s.kind, s.source, s.offset, s.sizes, s.strides, dtype, number)

    def instruction(i: Instruction) -> StoredInstruction:
        kernel, call, maps = None, None, tuple(keep(a) for a in i.arguments if isinstance(a, bytes))
        if i.op is Op.START:
            (plan,) = [a for a in i.arguments if isinstance(a, Plan)]
            handle = plan.launcher.handle
            if handle is None or handle.image is None:
                raise UnsupportedError(f"{i.name} has no machine code", hint=HINT)
            kernel = StoredKernelCode(handle.image.name, keep(handle.image.code), i.call is not None)
        elif i.op in (Op.CALL, Op.NAMED):
            call = _operator(i.call, namespaces)
        elif i.op is Op.LAUNCH:
            raise UnsupportedError(f"{i.name} is started by Triton's own launcher", hint=HINT)
        elif i.op is Op.KERNEL:
            raise UnsupportedError(f"{i.name} is a kernel of the CPU, known by its address", hint=HINT)
        numbers = i.numbers if kernel is None else (0, *i.numbers[1:])
        op = Op.CALL if i.op is Op.NAMED else i.op
        return StoredInstruction(op, i.name, i.where, i.slots, numbers, i.scalars, i.release, kernel, maps, call)

    if tape.fixed:
        raise UnsupportedError("a result is no tensor", hint=HINT)
    slots, code = tuple(map(slot, tape.slots)), tuple(map(instruction, tape.code))
    return StoredTape(slots, code, tape.outputs, tape.arena, tuple(map(_argument, args)))


def _argument(x: object) -> TapeArgument:
    if not isinstance(x, torch.Tensor):
        return TapeArgument(None)
    return TapeArgument(str(x.dtype), tuple(x.shape), x.stride(), x.data_ptr() % ALIGNED == 0)


def _operator(call: object, namespaces: Collection[str]) -> StoredOperatorCall:
    ours = isinstance(call, Operator) and isinstance(call.func, torch._ops.OpOverload)
    if not isinstance(call, Operator) or not ours or call.func.namespace not in namespaces:
        raise UnsupportedError(f"{getattr(call, 'func', call)} cannot be packaged", hint=HINT)
    args, kwargs = call.given([Ref(str(n)) for n in range(len(call.places))])
    try:
        given, named = written(tuple(args)), {k: written(v) for k, v in kwargs.items()}
    except TypeError as err:
        raise UnsupportedError(f"{call.func} cannot be packaged: {err}", hint=HINT) from None
    return StoredOperatorCall(str(call.func).removeprefix("aten."), given, named, call.wanted)
