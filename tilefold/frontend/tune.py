"""`tilefold.tune`: time configurations of a function's GPU kernels and remember the best."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilefold.backends.triton.space import Effort
from tilefold.errors import BackendError
from tilefold.frontend.fuse import trace
from tilefold.pipeline import Goal, compile_program
from tilefold.runtime.tuner.program import TunedKernel, tune_steps
from tilefold.runtime.tuner.tune import Progress


def tune(
    fn: Callable[..., object],
    *args: object,
    effort: Effort = "quick",
    progress: Progress = lambda done, of, what: None,
    again: bool = False,
) -> tuple[TunedKernel, ...]:
    """Tune the kernels of `fn` for arguments like these (shapes and dtypes; CUDA, or meta tensors).

    Kernels of `tilefold.fuse` and of torch.compile's backend. Every candidate's results are compared before it is
    timed. Winners are kept in the user's table for this device and toolchain, for all sizes of the same bins; kernels
    already there are skipped unless `again`.
    UnsupportedError: the function is not covered. BackendError: there is no CUDA device to time on.
    """
    if not torch.cuda.is_available():
        raise BackendError(
            "tuning times kernels on a CUDA device, and there is none (torch.cuda.is_available() is false)",
            hint="tables tuned elsewhere can be shared as files; without any, default configurations are used",
        )
    program = trace(fn, *args).program
    # `tilefold.fuse` and torch.compile may have other kernels: the latter leaves products to the library
    goals: tuple[Goal, ...] = ("fused", "fast")
    steps = [s for goal in goals for s in compile_program(program, goal=goal, device="cuda").steps]
    return tune_steps(steps, effort, progress, again=again)
