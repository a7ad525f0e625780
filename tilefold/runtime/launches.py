"""Kernels of GPUs as instructions of a tape: by the driver where that is known, else by Triton's launcher."""

from __future__ import annotations

from collections.abc import Sequence

from tilefold.backends.triton.driver import Address, Counter, Launched, TensorMap
from tilefold.backends.triton.launcher import STREAM, Plan
from tilefold.runtime.native.load import native
from tilefold.runtime.tape import CURRENT, FIXED, Instruction, Is, Op


def launch_of(plan: Plan, slots: Sequence[int], pointers: Sequence[int], name: str, where: str) -> Instruction | None:
    """The launch of a plan with the addresses of these slots; None of one without thread blocks. pointers: the
    addresses of some call."""
    if plan.grid == 0:
        return None
    how = plan.launched(pointers) if native().has_driver() else None
    return _by_triton(plan, slots, name, where) if how is None else _by_driver(plan, how, slots, name, where)


def _by_triton(plan: Plan, slots: Sequence[int], name: str, where: str) -> Instruction:
    call, before, after = plan.replayed()
    numbers = (*(CURRENT if a is STREAM else FIXED for a in before), *slots, *[FIXED] * len(after))
    fixed = (*(None if a is STREAM else a for a in before), *[None] * len(slots), *after)
    return Instruction(Op.LAUNCH, name, where, (), numbers, call=call, arguments=fixed)


def _by_driver(plan: Plan, how: Launched, slots: Sequence[int], name: str, where: str) -> Instruction:
    numbers = [how.handle.function, how.grid, how.handle.threads, how.handle.shared]
    numbers += [int(how.handle.dependent), int(how.handle.cooperative)]
    maps: list[bytes] = []
    for p in how.parameters:
        match p:
            case Address(position):
                numbers += [int(Is.ADDRESS), position]
            case TensorMap(position, template):
                numbers += [int(Is.MAP), position]
                maps.append(template)
            case Counter():
                numbers += [int(Is.COUNTER), 0]
            case int():
                numbers += [int(Is.NUMBER), p]
    counter = None if plan.counters is None else plan.counters.address
    # the plan is among the arguments for its kernel, which lives as long as the tape
    return Instruction(Op.START, name, where, tuple(slots), tuple(numbers), call=counter, arguments=(plan, *maps))
