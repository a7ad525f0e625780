"""How long each step of a compiled program takes on its own, and the least time that its bytes take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from tilefold.plan.hardware import gpu_here
from tilefold.plan.machine import this_machine
from tilefold.runtime.program import CompiledProgram

#: Rounds of a measurement, and the seconds after which no further one begins.
ROUNDS, BUDGET = 15, 0.3


def bandwidth(device: str) -> float:
    """Bytes/s of the memory of the machine that kernels for this type of device run on."""
    return (this_machine() if device == "cpu" else gpu_here()).bandwidth


def run_timed(
    compiled: CompiledProgram, inputs: Mapping[str, torch.Tensor], syms: Mapping[str, int]
) -> tuple[dict[str, torch.Tensor], tuple[float, ...]]:
    """The outputs, and seconds of each step: the median of calls that find their operands where the last left them."""
    tensors, seconds = dict(inputs), list[float]()
    device = next((x.device for x in inputs.values()), torch.device("cpu"))
    for step in compiled.steps:
        before = dict(tensors)
        step.run(tensors, syms)  # built by its first call
        seconds.append(_median(lambda s=step, b=before: s.run(dict(b), syms), device))  # type: ignore[misc]
    return {t: tensors[t] for t in compiled.program.outputs}, tuple(seconds)


def _median(call: Callable[[], None], device: torch.device) -> float:
    found: list[float] = []
    end = time.perf_counter() + BUDGET
    while len(found) < ROUNDS and (len(found) < 3 or time.perf_counter() < end):
        found.append(_once(call, device))
    return statistics.median(found)


def _once(call: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(100_000)  # the host is ahead when the kernel begins
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3
