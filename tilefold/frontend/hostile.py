"""Hostile variants of a function's arguments: the inputs that break fused reductions in practice.

Each variant keeps dtypes and ranks, so that what runs is the same compiled function:

    non-contiguous  every floating tensor with permuted strides
    odd strides     every floating tensor inside a larger one: rows an odd number of elements apart, not aligned
    offset          the first floating tensor plus so much that numbers there are 1/100 apart (float32: 1e5)
    large offset    the same, 1/10 apart (float32: 1e6)
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
        ("odd strides", lambda: tuple(_inside(a) if _is_float(a) else a for a in args)),
        ("offset", lambda: with_first(_offset(x, 0.01))),
        ("large offset", lambda: with_first(_offset(x, 0.1))),
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


def _inside(x: torch.Tensor) -> torch.Tensor:
    """The same values as a part of a tensor whose last axis is 3 or 4 longer."""
    n = x.shape[-1]
    whole = x.new_zeros((*x.shape[:-1], n + 3 + n % 2))
    part = whole[..., 1 : n + 1]
    part.copy_(x.detach())
    return part


def _offset(x: torch.Tensor, apart: float) -> torch.Tensor:
    """x, whose values are about 1 apart, where the numbers of its dtype are `apart`: a power of 10 in float32."""
    return _wide(x, lambda v: v + 1.19 * apart / torch.finfo(x.dtype).eps)


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
