"""In which order memory has a result's axes.

Row-major, unless what reads a result is a product of the library that would copy it first: attention's [B, H, S, D] in
front of a product that sums over heads and their columns is written as [B, S, H, D].
"""

from __future__ import annotations

from collections.abc import Sequence


def strides_in(order: Sequence[int] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a packed tensor, in elements. order: its axes as memory has them, outermost first (None: as they
    are)."""
    strides, step = [1] * len(shape), 1
    for axis in reversed(range(len(shape)) if order is None else order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)
