"""Where values lie that live between the steps of a call: one allocation, at offsets that values share whose lifetimes
do not meet.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilefold.plan.sequence import Lifetime

#: Bytes that starts of values are multiples of.
ALIGNED = 256


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNED`."""
    return -(-nbytes // ALIGNED) * ALIGNED


def packed(sizes: Mapping[str, int], lifetimes: Mapping[str, Lifetime]) -> tuple[dict[str, int], int]:
    """Offsets for values of so many bytes, and the bytes of all: values alive at once do not overlap.

    Large values first, each at the lowest offset that is free for all of its life.
    """
    offsets: dict[str, int] = {}
    for n in sorted(sizes, key=lambda n: -sizes[n]):
        first, last = lifetimes[n]
        rivals = [o for o in offsets if lifetimes[o][0] <= last and first <= lifetimes[o][1]]
        at = 0
        for start, stop in sorted((offsets[o], offsets[o] + sizes[o]) for o in rivals):
            if at + sizes[n] <= start:
                break
            at = max(at, aligned(stop))
        offsets[n] = at
    return offsets, max((offsets[n] + sizes[n] for n in sizes), default=0)


def peak(sizes: Mapping[str, int], lifetimes: Mapping[str, Lifetime]) -> int:
    """Most bytes alive at once where each value is allocated when it is made and freed after its last step."""
    changes: dict[int, int] = {}
    for n, size in sizes.items():
        first, last = lifetimes[n]
        changes[first] = changes.get(first, 0) + size
        changes[last + 1] = changes.get(last + 1, 0) - size
    alive = most = 0
    for at in sorted(changes):
        alive += changes[at]
        most = max(most, alive)
    return most
