"""Tune the GPU kernels of a compiled program, for the device at hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilefold.backends.triton.space import Effort
from tilefold.runtime.gpu_configs import device_name, table
from tilefold.runtime.step import Step
from tilefold.runtime.steps import AddedStep, GpuStep
from tilefold.runtime.tuner.table import Tuned, key_of
from tilefold.runtime.tuner.tune import Progress, Trial, tune
from tilefold.tensor.sizes import TYPICAL_EXTENT


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """A kernel by name, its winner, and what became of every candidate."""

    name: str
    winner: Tuned
    trials: tuple[Trial, ...]


def tune_steps(
    steps: Iterable[Step],
    effort: Effort,
    progress: Progress = lambda done, of, what: None,
    *,
    again: bool = False,
) -> tuple[TunedKernel, ...]:
    """Time configurations of every kernel among the steps, typical sizes for symbols, and keep the winners in the
    user's table; kernels already there are skipped unless `again`. Kernels that run already use their winner from
    their next call on."""
    known = table(device_name())
    found, seen = [], set()
    for s in steps:
        if not isinstance(s, GpuStep) or isinstance(s, AddedStep):  # which adds to what the last trial left
            continue
        block = s.triton.block
        syms = dict.fromkeys(block.syms, TYPICAL_EXTENT)
        sizes = s.triton.sizes(syms)
        key = key_of(block, sizes)
        if key in seen or (not again and known.exact(key)):
            continue
        seen.add(key)
        winner, trials = tune(block, sizes, syms, effort, progress)
        known.add(key, winner)
        s.triton.choose_again()
        found.append(TunedKernel(s.name, winner, trials))
    return tuple(found)
