"""How long the first plan of a decoder takes, each in a process of its own (caches are cold, imports are done)."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from tilefold.plan.machine import nominal
from tilefold.plan.planner import plan_program
from tilefold.plan.targets.cpu import CpuTarget
from tilefold.suites.blocks.decoder import Decoder, forward_program, training_program

#: Name: layers, and whether the backward pass is part of it.
DECODERS = {"decoder, 7 layers forward": (7, False), "decoder, 3 layers forward and backward": (3, True)}


@dataclass(frozen=True, slots=True)
class Planned:
    """A program of this many operators, planned without a budget in so many seconds of the processor."""

    name: str
    operators: int
    kernels: int
    seconds: float


def first_plan(name: str) -> Planned:
    """Plan one of DECODERS in a new process; KeyError for another name."""
    layers, backward = DECODERS[name]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_plan, name, layers, backward).result()


def _plan(name: str, layers: int, backward: bool) -> Planned:
    p = (training_program if backward else forward_program)(Decoder(layers))
    target = CpuTarget(nominal())
    start = time.process_time()
    plan = plan_program(p, target, budget=None)
    return Planned(name, len(plan.program.body), len(plan.kernels), time.process_time() - start)
