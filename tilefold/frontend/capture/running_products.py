"""Products along a row, running ones and whole ones, whose gradients are linear in its length.

torch differentiates `cumprod` of what it traces by a loop over the row (2.11; 2.13 only where the gradient is to be
differentiated again), each round of which multiplies what is left of it: a program with rows of 97 was 111 kernels on
an H100 and took 77 s to compile, Inductor more than 90. What is here is its formula for plain tensors, of three scans,
which becomes one where there are kernels (`training.prefix_gradients`).

Of `prod` torch asks, if it is not traced, whether there is a zero; traced it takes scans from both ends (the area of
boxes, `(high - low).prod(-1)`: 15 operators, none in a kernel of ours). Without them, of a row x with product y:

    dx[i] = dy * prod over k != i of x[k]
          = dy * (y / x[i] without a zero; at the only one, the product of the others; else 0)
"""

from __future__ import annotations

from typing import Any

import torch

#: Elements of a row of which each product of the others is written out.
FEW = 4


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        y = torch.cumprod(x, dim)
        ctx.save_for_backward(x, y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, y = ctx.saved_tensors
        return gradient(dy, x, y, ctx.dim), None


def cumprod(input: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """torch's, with such a gradient."""
    x = input if dtype is None else input.to(dtype)
    if not _asked(x):
        return torch.cumprod(x, dim)
    made: torch.Tensor = _Product.apply(x, dim)
    return made


def _asked(x: torch.Tensor) -> bool:
    """Whether a gradient is, by autograd alone."""
    asked = x.requires_grad and torch.is_grad_enabled() and x.is_floating_point() and x.dim() and x.numel()
    return bool(asked) and torch._C._functorch.peek_interpreter_stack() is None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.dim = dim
        return torch.prod(x, dim, keepdim=True)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return dy * others(x, ctx.dim), None


def prod(
    input: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """torch's, with such a gradient."""
    x = input if dtype is None else input.to(dtype)
    if not _asked(x):
        return torch.prod(x) if dim is None else torch.prod(x, dim, keepdim)
    if dim is None:
        return prod(x.flatten(), 0)
    made: torch.Tensor = _Whole.apply(x, dim)
    return made if keepdim else made.squeeze(dim)


def others(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Of each element of a row, the product of the others. Of few without a division, as exact as the product."""
    if isinstance(x.shape[dim], int) and 2 <= x.shape[dim] <= FEW:
        made = x.roll(1, dim)
        for n in range(2, x.shape[dim]):
            made = made * x.roll(n, dim)
        return made
    zero = x == 0
    zeros, rest = zero.sum(dim, keepdim=True), x.masked_fill(zero, 1.0).prod(dim, keepdim=True)
    at = torch.where(zero & (zeros == 1), rest, torch.zeros_like(x))
    return torch.where(zeros == 0, rest / x, at)


def gradient(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    """Of the running products y of x along a dim. dy, x, y: one shape.

    Before a row's first zero it is the sums of y dy from the end over x; at it, the products up to there times the sum
    of dy and the products from there on, which end at the next zero; behind it 0.
    """
    zeros = (x == 0).cumsum(dim)
    before, from_first = zeros == 0, zeros == 1
    summed = (y * dy).masked_fill(~before, 0.0).flip(dim).cumsum(dim).flip(dim)
    plain = torch.where(before, summed / x, torch.zeros_like(x))
    at = from_first.max(dim, keepdim=True).indices
    first = torch.zeros_like(from_first).scatter(dim, at, True).logical_and(from_first)
    on = x.masked_fill(~(from_first & ~first), 1.0).cumprod(dim) * dy.masked_fill(~from_first, 0.0)
    up_to = y.gather(dim, (at - 1).relu()).masked_fill(at == 0, 1.0)
    return torch.where(first, on.sum(dim, keepdim=True) * up_to, plain)
