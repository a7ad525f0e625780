"""Zeros that kernels add to (`runtime.steps.AddedStep`), of several results in one piece of memory: one launch.

A model of many small tables has a gradient each, and writing zeros to one takes no longer than starting to. Results
that a caller keeps have memory of their own, and so have large ones, which would live as long as the last of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

import torch

from tilefold.runtime.step import LIBRARY, Code, Result, Step
from tilefold.runtime.steps import AddedStep

#: Bytes of a result that shares memory, at most: what is written in the time of a launch.
SMALL = 3 << 20
#: Bytes at multiples of which each begins.
ALIGNED = 256


class ZerosStep:
    """`results`: zeros in float32, views of one tensor."""

    name = "zeros"
    members: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def __init__(self, results: Sequence[Result]):
        self.results = tuple(results)

    def run(self, tensors: dict[str, torch.Tensor], syms: Mapping[str, int]) -> None:
        """See `Step`."""
        shapes = [shape(syms) for _, _, shape in self.results]
        each = ALIGNED // torch.float32.itemsize
        counts = [-(-prod(shape) // each) * each for shape in shapes]
        device = next(iter(tensors.values())).device
        whole = torch.empty(sum(counts), dtype=torch.float32, device=device).zero_()
        for (name, _, _), shape, part in zip(self.results, shapes, whole.split(counts), strict=True):
            tensors[name] = part[: prod(shape)].view(shape)

    def code(self, units: Mapping[str, int | None]) -> Code:
        """See `Step`."""
        return LIBRARY


def zeroed_together(steps: Sequence[Step], kept: Collection[str]) -> list[Step]:
    """The steps, with the zeros of small results written once, in front of the first of them. kept: names that callers
    see."""
    added = [s for s in steps if isinstance(s, AddedStep) and s.how == "sum"]
    small = [s for s in added if all(_shares(r, kept) for r in s.results)]
    if len(small) < 2:
        return list(steps)
    for s in small:
        s.zeroed = True
    at = steps.index(small[0])
    return [*steps[:at], ZerosStep([r for s in small for r in s.results]), *steps[at:]]


def _shares(result: Result, kept: Collection[str]) -> bool:
    name, dtype, shape = result
    return name not in kept and dtype is torch.float32 and prod(shape({})) * dtype.itemsize <= SMALL
