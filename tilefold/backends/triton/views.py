"""Tensors as kernels see them: described before they exist, and with axes that lie side by side joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tilefold.block.collapse import Merge


@dataclass(frozen=True, slots=True)
class Like:
    """A tensor that does not exist yet, as far as it decides which kernel reads it; its address is a multiple of 16.

    strides in elements.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Seen) -> Like:
        """What is known of a tensor, also of a fake one."""
        return Like(tuple(x.shape), x.stride(), x.dtype, x.device)

    @staticmethod
    def packed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Like:
        """A result: row-major, without gaps."""
        strides = [1]
        for n in reversed(shape[1:]):
            strides.append(strides[-1] * max(n, 1))
        return Like(shape, tuple(reversed(strides[: len(shape)])), dtype, device)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def data_ptr(self) -> int:
        return 0

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize


Seen = torch.Tensor | Like


def neighbours(x: Seen) -> frozenset[tuple[int, int]]:
    """Axes (a, b) of more than one index: one step along a is as long as all of b."""
    shape, strides = x.shape, x.stride()
    axes = [a for a, n in enumerate(shape) if n > 1]
    return frozenset((a, b) for a in axes for b in axes if a != b and strides[a] == strides[b] * shape[b])


def merged(xs: Sequence[Seen], names: Sequence[str], merges: Sequence[Merge]) -> list[Seen]:
    """The tensors of these names with their axes joined: the same memory."""
    return [_merged(x, [m.axes[n] for m in merges if n in m.axes]) for x, n in zip(xs, names, strict=True)]


def _merged(x: Seen, pairs: Sequence[tuple[int, int]]) -> Seen:
    shape, strides = list(x.shape), list(x.stride())
    for a, b in pairs:
        shape[a], strides[a] = shape[a] * shape[b], strides[b]
        del shape[b], strides[b]
    if isinstance(x, Like):
        return replace(x, shape=tuple(shape), strides=tuple(strides))
    return x.as_strided(shape, strides)
