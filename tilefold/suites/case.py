"""One program of a suite: a plain PyTorch function, its arguments, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tilefold.frontend.hostile import Args

#: "fold": fused into `kernels` kernels. "refused": some cascade in it has no fold; split, and right.
Expect = Literal["fold", "refused"]
Maker = Callable[[torch.Generator], Args]


@dataclass(frozen=True, slots=True)
class Case:
    """A cascade. `make` gives random arguments; `hostile` named makers of arguments that are not.

    quantise + GEMM counts as refused: rounding is not separable, and what runs quantises exactly.
    `kernels` is the largest number of kernels allowed. `source` says where the cascade comes from.
    `derived_hostile`: also try the variants of `frontend.hostile`.
    """

    name: str
    fn: Callable[..., Any]
    make: Maker
    source: str
    kernels: int = 1
    expect: Expect = "fold"
    hostile: tuple[tuple[str, Maker], ...] = ()
    derived_hostile: bool = True

    def args(self, seed: int = 0) -> Args:
        """Random arguments."""
        return self.make(torch.Generator().manual_seed(seed))

    def hostile_args(self, seed: int = 0) -> tuple[tuple[str, Args], ...]:
        """The case's own hostile arguments, by name."""
        return tuple((name, make(torch.Generator().manual_seed(seed))) for name, make in self.hostile)


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Callable[..., torch.Tensor]:
    """A maker of one normally distributed tensor."""
    return lambda gen: (torch.randn(shape, generator=gen) * scale).to(dtype)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Callable[..., torch.Tensor]:
    """A maker of one uniformly distributed float32 tensor."""
    return lambda gen: torch.rand(shape, generator=gen) * (high - low) + low


def labels(*shape: int, classes: int) -> Callable[..., torch.Tensor]:
    """A maker of class numbers."""
    return lambda gen: torch.randint(0, classes, shape, generator=gen)


def together(*makers: Callable[[torch.Generator], torch.Tensor]) -> Maker:
    """A maker of an argument list."""
    return lambda gen: tuple(make(gen) for make in makers)
