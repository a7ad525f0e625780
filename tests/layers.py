"""A decoder layer as models write it: normalisation, rotated heads that share keys, a gated feed-forward part."""

from __future__ import annotations

import torch
from torch import nn


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    h = x.shape[-1] // 2
    return x * c + torch.cat((-x[..., h:], x[..., :h]), -1) * s


class Layer(nn.Module):
    """x: [B, S, width] -> the same; causal."""

    def __init__(self, width: int, heads: int, shared: int, hidden: int):
        super().__init__()
        self.heads, self.shared, self.dim = heads, shared, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, shared * self.dim, bias=False) for _ in "kv")
        self.up, self.gate, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.before, self.between = (nn.Parameter(torch.ones(width)) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        at = torch.arange(n, device=x.device)[:, None] / 100.0 ** (torch.arange(self.dim, device=x.device) / self.dim)
        c, s = at.cos().to(x.dtype), at.sin().to(x.dtype)
        y = norm(x, self.before)
        q = self.q(y).view(b, n, self.heads, self.dim).transpose(1, 2)
        k, v = (f(y).view(b, n, self.shared, self.dim).transpose(1, 2) for f in (self.k, self.v))
        q, k = rotated(q, c, s), rotated(k, c, s)
        k, v = (z.repeat_interleave(self.heads // self.shared, 1) for z in (k, v))
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT * self.dim**-0.5).masked_fill(later, float("-inf"))
        x = x + self.o((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(b, n, -1))
        y = norm(x, self.between)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def gradients(run, layer: Layer, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, and gradients of the argument and all parameters."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    (y.double() * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
