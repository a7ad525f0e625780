"""What a program is: a plain PyTorch function or module, and its arguments at a size for a GPU and at a small one.

Every program becomes a row of the GPU suites (`GpuCase`), so that it is checked and timed as they are. Its
floor is not known: nobody counted its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilefold.suites.case import Maker
from tilefold.suites.gpu.case import GpuCase, Suite, normal, uniform, whole

SUITE: Suite = "programs"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class Draw:
    """One argument: how it is drawn on its generator's device, and its shape for people."""

    shape: tuple[int, ...]
    draw: Callable[[torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Program:
    """A program of a class (`family`), called with `large` on a GPU and with `small` where seconds must do.

    `fn` takes the arguments. Where it is None, `module` makes the module that does: True for the GPU's size.
    """

    name: str
    family: str
    large: tuple[Draw, ...]
    small: tuple[Draw, ...]
    fn: Callable[..., Any] | None = None
    module: Callable[[bool], nn.Module] | None = None

    def case(self, *, small: bool = False) -> GpuCase:
        """The program as a row."""
        draws = self.small if small else self.large
        module = self.module
        return GpuCase(
            suite=SUITE,
            row=self.name,
            family=self.family,
            shape=", ".join("x".join(map(str, d.shape)) or "scalar" for d in draws),
            fn=self.fn or _unplaced,
            make=_maker(draws),
            work=None,
            parts=whole,
            peers=("eager", "compile"),
            planned=True,
            module=None if module is None else lambda: module(not small),
        )


def _maker(draws: tuple[Draw, ...]) -> Maker:
    return lambda gen: tuple(d.draw(gen) for d in draws)


def _unplaced(*args: object) -> Any:
    raise TypeError("a module's row is called after `GpuCase.placed`")


def of(shape: tuple[int, ...], dtype: torch.dtype = BF16, *, scale: float = 1.0, offset: float = 0.0) -> Draw:
    """Normally distributed numbers."""
    plain = normal(*shape, dtype=dtype, scale=scale)
    return Draw(shape, plain if offset == 0.0 else lambda gen: plain(gen) + offset)


def bf(*shape: int, scale: float = 1.0) -> Draw:
    """bfloat16."""
    return of(shape, BF16, scale=scale)


def hf(*shape: int, scale: float = 1.0) -> Draw:
    """float16."""
    return of(shape, F16, scale=scale)


def f32(*shape: int, scale: float = 1.0, offset: float = 0.0) -> Draw:
    """float32."""
    return of(shape, F32, scale=scale, offset=offset)


def weight(*shape: int, dtype: torch.dtype = BF16) -> Draw:
    """A matrix [..., depth, columns] that keeps the variance of what it is multiplied with."""
    return of(shape, dtype, scale=shape[-2] ** -0.5)


def positive(*shape: int, dtype: torch.dtype = F32, low: float = 0.1, high: float = 1.0) -> Draw:
    """Uniformly distributed in (low, high)."""
    return Draw(shape, uniform(*shape, low=low, high=high, dtype=dtype))


def ints(*shape: int, high: int) -> Draw:
    """Numbers of classes, tokens or places below `high`."""
    return Draw(shape, lambda gen: torch.randint(0, high, shape, generator=gen, device=gen.device))


def bits(*shape: int, share: float = 0.5) -> Draw:
    """A mask: True in about this share of its places."""
    return Draw(shape, lambda gen: torch.rand(shape, generator=gen, device=gen.device) < share)
