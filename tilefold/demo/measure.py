"""Side-by-side timing: contenders take turns, so that a slow moment of the machine hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call. `spread` is the distance between the quartiles over the median."""

    median: float
    spread: float
    rounds: int


def interleaved(
    contenders: Mapping[str, Callable[[], object]], *, budget: float = 20.0, rounds: int = 15, warmup: int = 2
) -> dict[str, Timing]:
    """Time each contender in turn, round by round, for at most `rounds` rounds or about `budget` seconds.

    At least three rounds are always taken; warm-up calls are not counted.
    """
    for _ in range(warmup):
        for call in contenders.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    start = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - start > budget:
            break
        for name, call in contenders.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return {name: _timing(s) for name, s in seconds.items()}


def _timing(seconds: list[float]) -> Timing:
    low, mid, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(mid, (high - low) / mid, len(seconds))
