"""Hostile variants of a function's arguments: the inputs that break fused reductions in practice.

Each variant keeps dtypes and ranks, so that what runs is the same compiled function:

    non-contiguous  every floating tensor with permuted strides
    huge            the first floating tensor times 1e4
    tiny            the first floating tensor times 1e-4
    one row         the leading axis of the first floating tensor, and of those that share it, cut to 1
    zeros           the first floating tensor all zero
    -inf entries    a tenth of the first floating tensor at -inf, and its first row wholly
    nan             one element of the first floating tensor NaN
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Args = tuple[Any, ...]


def variants(args: Sequence[Any], seed: int = 0) -> tuple[tuple[str, Args], ...]:
    """Named argument lists derived from `args`; empty where there is no floating tensor with axes."""
    first = next((n for n, a in enumerate(args) if _is_float(a)), None)
    if first is None:
        return ()
    gen = torch.Generator().manual_seed(seed)
    x = args[first]

    def with_first(y: torch.Tensor) -> Args:
        return tuple(y if n == first else a for n, a in enumerate(args))

    changes: tuple[tuple[str, Callable[[], Args]], ...] = (
        ("non-contiguous", lambda: tuple(_restrided(a) if _is_float(a) else a for a in args)),
        ("huge", lambda: with_first(_wide(x, lambda v: v * 1e4))),
        ("tiny", lambda: with_first(_wide(x, lambda v: v * 1e-4))),
        ("one row", lambda: _one_row(args, x.shape[0])),
        ("zeros", lambda: with_first(torch.zeros_like(x))),
        ("-inf entries", lambda: with_first(_wide(x, lambda v: _holes(v, gen)))),
        ("nan", lambda: with_first(_wide(x, _one_nan))),
    )
    return tuple((name, make()) for name, make in changes)


def _is_float(a: object) -> bool:
    return isinstance(a, torch.Tensor) and a.is_floating_point() and a.ndim > 0 and a.numel() > 0


def _wide(x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`f` applied in float32 (or wider), rounded back to x's dtype."""
    return f(x.detach().to(torch.promote_types(x.dtype, torch.float32) if x.itemsize > 1 else torch.float32)).to(
        x.dtype
    )


def _restrided(x: torch.Tensor) -> torch.Tensor:
    """The same values: the last two axes stored transposed, or every other element of a longer vector."""
    if x.ndim >= 2:
        return x.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    return x.detach().repeat_interleave(2)[::2]


def _one_row(args: Sequence[Any], rows: int) -> Args:
    shares = (isinstance(a, torch.Tensor) and a.ndim > 0 and a.shape[0] == rows for a in args)
    return tuple(a[:1] if s else a for a, s in zip(args, shares, strict=True))


def _holes(x: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    y = torch.where((torch.rand(x.shape, generator=gen) < 0.1).to(x.device), -torch.inf, x)
    if y.ndim > 1:
        y.view(-1, y.shape[-1])[0] = -torch.inf
    return y


def _one_nan(x: torch.Tensor) -> torch.Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    y.view(-1)[y.numel() // 2] = torch.nan
    return y
