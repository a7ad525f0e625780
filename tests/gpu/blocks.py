"""Small models of library calls and kernels of ours, for tests on a device."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Library calls and kernels of ours."""

    def __init__(self, d=256):
        super().__init__()
        self.a, self.b, self.n = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.LayerNorm(d)

    def forward(self, x):
        return self.n(x + self.b(nn.functional.gelu(self.a(x))))


def made(cuda, dtype=torch.float16):
    torch.manual_seed(0)
    torch._dynamo.reset()
    return nn.Sequential(Block(), Block()).to(cuda, dtype)


def x(cuda, rows=64, seed=0):
    gen = torch.Generator(cuda).manual_seed(seed)
    return torch.randn(rows, 256, generator=gen, device=cuda, dtype=torch.float16)


def close(got, want):
    torch.testing.assert_close(got, want, atol=5e-3, rtol=5e-3)
