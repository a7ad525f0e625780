"""Distances of pairs in any norm, and their gradients, as maps and sums over the coordinates.

    y[i, j] = |a[i] - b[j]|_p
    da[i]   = sum over j of dy[i, j] s |d|^(p - 1) / y[i, j]^(p - 1)      d = a[i] - b[j], s its sign

torch computes the Euclidean ones of many rows by a product of matrices, before this is asked.
"""

from __future__ import annotations

import math

import torch


def distances(a: torch.Tensor, b: torch.Tensor, p: float, mode: int | None) -> torch.Tensor:
    """a: [.., P, M], b: [.., R, M]; [.., P, R]. Of no coordinates torch says what they are."""
    if a.shape[-1] == 0 or not a.is_floating_point():
        return NotImplemented  # type: ignore[no-any-return] # what says so stays as it is
    d = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    if p == 0:
        return (d != 0).sum(-1).to(a.dtype)
    if p == 1:
        return d.sum(-1)
    if p == 2:
        return (d * d).sum(-1).sqrt()
    return d.amax(-1) if p == math.inf else d.pow(p).sum(-1).pow(1 / p)


def gradient(dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, p: float, y: torch.Tensor) -> torch.Tensor:
    """Of a, as often as dy [.., P, R] has it; nothing where points are the same."""
    if a.numel() == 0 or b.numel() == 0:
        return NotImplemented  # type: ignore[no-any-return]
    if p == 0:
        return a.new_zeros((*dy.shape[:-1], a.shape[-1]))
    d, dy, y = a.unsqueeze(-2) - b.unsqueeze(-3), dy.unsqueeze(-1), y.unsqueeze(-1)
    if p == 1:
        return (d.sign() * dy).sum(-2)
    if p == math.inf:
        return torch.where(d.abs() == y, d.sign() * dy, 0.0).sum(-2)
    same = (y == 0) | (d == 0) if p < 1 else y == 0
    if p == 2:
        return torch.where(same, 0.0, d * (dy / y)).sum(-2)
    powers = d.sign() * d.abs().pow(p - 1) if p < 2 else d * d.abs().pow(p - 2)
    return torch.where(same, 0.0, powers * (dy / y.pow(p - 1))).sum(-2)
