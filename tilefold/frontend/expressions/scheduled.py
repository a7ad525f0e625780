"""`tilefold.schedule(fn, *args)`: a PyTorch function as definitions with names, to be scheduled by hand.

f = tilefold.schedule(attention, q, k, v)
print(f)                                            # the definitions and their names
run = f.compile(f.schedule.fuse("p", "s", "m"))     # called as the function
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilefold.block.schedule import Schedule
from tilefold.errors import TilefoldError
from tilefold.frontend.expressions.te_run import Device, Differentiated, Tensors, compile_schedule, differentiated
from tilefold.frontend.fuse import Fn, Fused, check_arguments, check_function, plain
from tilefold.frontend.regions.execute import Executable
from tilefold.frontend.registered.custom_op import Captured, capture, distinct, identifier
from tilefold.frontend.registered.fused import pullback_of
from tilefold.frontend.registered.operator import Checked
from tilefold.tensor.text import show


@dataclass(frozen=True, slots=True)
class FunctionSchedule:
    """A captured function. `schedule`: unfused, a kernel for each definition; its steps give further ones."""

    name: str
    fn: Fn
    captured: Captured
    schedule: Schedule

    def __str__(self) -> str:
        return show(self.schedule.program)

    def compile(self, schedule: Schedule | None = None, *, device: Device | None = None) -> ScheduledFunction:
        """The function as a schedule has it (None: unfused). device: None, where the arguments were; "interpreter":
        a GPU's kernels in Triton's interpreter. TilefoldError: a schedule of something else.
        """
        chosen = self.schedule if schedule is None else schedule
        mine, other = self.schedule.program, chosen.program
        if (mine.inputs, mine.outputs) != (other.inputs, other.outputs):
            hint = "start from its `schedule`, whose steps give new ones"
            raise TilefoldError(f"the schedule is of {other.name}, not of {self.name}", hint=hint)
        where: Any = device or self.captured.vals[0].device.type
        run = Executable(self.captured.lowered, compile_schedule(chosen, device=where))
        return ScheduledFunction(Checked.of(self.name, run, self.captured.vals), self.captured, self.fn)


class ScheduledFunction:
    """A function compiled as its schedule says, for tensors of the captured extents and types.

    Its gradient is the function's, compiled as `tilefold.fuse` does when it is first needed: no schedule arranges it.

    TilefoldError: other arguments; gradients of parameters that the function holds.
    """

    def __init__(self, run: Checked, captured: Captured, fn: Fn):
        self._run, self._captured = run, captured
        self._count = len(captured.vals) - len(captured.held)
        self._gradient = Fused(pullback_of(fn, self._count), strict=False)

    def __call__(self, *xs: torch.Tensor) -> Any:
        if len(xs) != self._count:
            raise TilefoldError(f"{self._run.name} takes {self._count} tensors, not {len(xs)}")
        if differentiated(self._captured.held):
            hint = "give them as arguments; or call it under torch.no_grad()"
            raise TilefoldError(f"{self._run.name} has no gradient for tensors that it holds", hint=hint)
        made = Differentiated.apply(self._all, self._pulled, *xs) if differentiated(xs) else self._all(*xs)
        return made[0] if self._captured.single else made

    def _all(self, *xs: torch.Tensor) -> Tensors:
        return tuple([y for y in self._run(*xs, *self._captured.held) if y is not None])

    def _pulled(self, xs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Tensors:
        return self._gradient.run(*xs, *given)  # type: ignore[no-any-return]


def schedule(fn: Fn, *examples: torch.Tensor) -> FunctionSchedule:
    """Capture a function of tensors, for schedules. UnsupportedError: it is not covered whole."""
    if not examples or not all(isinstance(x, torch.Tensor) for x in examples):
        raise TilefoldError("a schedule is of a function of tensors", hint="bind the rest: functools.partial")
    fn = plain(fn)
    check_function(fn, "schedule")
    check_arguments(fn, examples, {})
    captured = capture(fn, distinct(examples), dynamic=None)
    return FunctionSchedule(identifier(fn), fn, captured, Schedule.of(captured.lowered.program))
