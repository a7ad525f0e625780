"""Timing contenders side by side: they take turns, so that a slow moment of the machine hits all of them.

Ratios are taken round by round (the calls of a round are neighbours in time, in orders that are fair to all) and
their median is reported; the whole series is done twice, and a difference inside the spread is no difference.

Results of tens of megabytes are fresh memory for the C library's allocator each time, and the page
faults then cost more than the arithmetic, in every contender alike. `kept_memory` makes the
allocator keep its pages, as a program that reuses its buffers does.
"""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

Call = Callable[[], object]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # parameters of glibc's mallopt
_DEFAULT_TRIM, _DEFAULT_MMAPS = 128 * 1024, 65536


@dataclass(frozen=True, slots=True)
class Series:
    """Seconds a call, one entry a round, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def over(self, other: Series) -> float:
        """How many times longer this one takes: the median of the rounds' own ratios."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


def in_turn(names: tuple[str, ...], n: int) -> tuple[str, ...]:
    """The order of round n. Over a cycle of rounds (as many as names, twice that where they are odd in number) each
    contender has each place, and follows each other one, equally often: balanced Latin squares (Williams 1949). The
    rounds of a cycle are shuffled, so that what ends a round is not always followed by the same beginning.
    """
    count = len(names)
    if count < 2:
        return names
    cycle, place = divmod(n, count * (1 + count % 2))
    rounds = list(range(count * (1 + count % 2)))
    random.Random(cycle).shuffle(rounds)
    shift, back = divmod(rounds[place], 2) if count % 2 else (rounds[place], 0)
    zigzag = [-((k + 1) // 2) if k % 2 == 0 else (k + 1) // 2 for k in range(count)]  # 0, 1, -1, 2, -2, ...
    order = tuple(names[(shift + z) % count] for z in zigzag)
    return order[::-1] if back else order


def interleave(contenders: Mapping[str, Call], *, budget: float, rounds: int, warmup: int = 2) -> dict[str, Series]:
    """Call each in turn, round by round, until `rounds` or `budget` seconds are used (3 rounds at least)."""
    for _ in range(warmup):
        for call in contenders.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    start = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - start > budget:
            break
        for name in in_turn(tuple(contenders), done):
            begin = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: Series(tuple(s)) for name, s in seconds.items()}


@contextmanager
def kept_memory() -> Iterator[bool]:
    """Freed memory stays with the process (glibc only; elsewhere nothing changes). Yields whether it does."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        yield False
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield True
    finally:
        mallopt(_M_MMAP_MAX, _DEFAULT_MMAPS)
        mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM)
