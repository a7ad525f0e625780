"""Elementwise programs: activations, gates, broadcasts, views, masks, casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f

from tilefold.suites.programs.program import Draw, Program, bf, bits, f32, ints, positive


def _p(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"pointwise: {name}", "pointwise", large, small, fn)


def _same(n: int) -> tuple[tuple[Draw, ...], tuple[Draw, ...]]:
    return tuple(bf(8192, 4096) for _ in range(n)), tuple(bf(13, 40) for _ in range(n))


def gelu_gate(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return f.gelu(a, approximate="tanh") * b


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, S, H, D]; cos, sin: [S, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, None] + turned * sin[:, None]


def rotary_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours are turned together; cos, sin: [S, D / 2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    c, s = cos[:, None], sin[:, None]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m = m.lerp(g, 0.1)
    v = 0.999 * v + 0.001 * g * g
    return p * (1 - 1e-4) - 1e-3 * (m / 0.1) / ((v / 0.001).sqrt() + 1e-8), m, v


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8)


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """a: [N, 4], b: [M, 4] as corner and size; [N, M]."""
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, :2] + a[:, None, 2:], b[None, :, :2] + b[None, :, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    return both / (a[:, None, 2:].prod(-1) + b[None, :, 2:].prod(-1) - both)


PROGRAMS = (
    _p("residual, bias, GELU", lambda x, r, b: f.gelu(x + r + b), (*_same(2)[0], bf(4096)), (*_same(2)[1], bf(40))),
    _p("GEGLU of one tensor", gelu_gate, (bf(4096, 11008),), (bf(9, 48),)),
    _p("SwiGLU of two", lambda a, b: f.silu(a) * b, *_same(2)),
    _p("transposed sum", lambda x, y: x.t() + y, (bf(4096, 8192), bf(8192, 4096)), (bf(40, 13), bf(13, 40))),
    _p("permuted copy", lambda x: x.permute(0, 2, 1, 3).contiguous() * 2, (bf(8, 1024, 32, 128),), (bf(2, 5, 3, 8),)),
    _p("channel scale and shift", lambda x, s, b: torch.relu(x * s[:, None, None] + b[:, None, None]),
       (bf(64, 256, 56, 56), bf(256), bf(256)), (bf(2, 6, 5, 5), bf(6), bf(6))),
    _p("rotary halves", rotary, (bf(4, 2048, 32, 128), bf(2048, 128), bf(2048, 128)),
       (bf(2, 5, 3, 8), bf(5, 8), bf(5, 8))),
    _p("rotary pairs", rotary_pairs, (bf(4, 2048, 32, 128), f32(2048, 64), f32(2048, 64)),
       (bf(2, 5, 3, 8), f32(5, 4), f32(5, 4))),
    _p("Adam step", adam, (f32(4096, 4096), f32(4096, 4096), f32(4096, 4096), positive(4096, 4096)),
       (f32(9, 7), f32(9, 7), f32(9, 7), positive(9, 7))),
    _p("quantise to int8", quantise, (bf(8192, 4096), positive(8192, 1)), (bf(13, 40), positive(13, 1))),
    _p("masked where", lambda x, m: torch.where(m, x, x.new_full((), -1e4)) + 1,
       (bf(8192, 4096), bits(8192, 4096)), (bf(13, 40), bits(13, 40))),
    _p("causal mask of scores", lambda s: s.masked_fill(torch.ones_like(s[0], dtype=torch.bool).triu(1), -1e9) * 0.5,
       (f32(32, 1024, 1024),), (f32(2, 9, 9),)),
    _p("clamped minimum", lambda x: torch.minimum(x, x.new_tensor(0.5)).clamp(min=-1), *_same(1)),
    _p("embedding and positions", lambda t, w, p: w[t] * 8 + p[: t.shape[1]],
       (ints(8, 2048, high=32000), bf(32000, 1024), bf(4096, 1024)), (ints(2, 5, high=11), bf(11, 8), bf(7, 8))),
    _p("concatenation", lambda a, b, c: torch.cat((a, torch.tanh(b), c * 2), 1),
       (bf(8192, 1024), bf(8192, 2048), bf(8192, 512)), (bf(5, 4), bf(5, 8), bf(5, 3))),
    _p("padding", lambda x: f.pad(torch.relu(x), (1, 1, 1, 1)), (bf(32, 64, 112, 112),), (bf(2, 3, 5, 5),)),
    _p("pixel shuffle", lambda x: f.pixel_shuffle(f.leaky_relu(x, 0.2), 2), (bf(16, 256, 64, 64),), (bf(1, 8, 3, 3),)),
    _p("pairs of boxes", box_iou, (positive(4096, 4), positive(4096, 4)), (positive(7, 4), positive(5, 4))),
    _p("one small tensor", lambda x, y: torch.sigmoid(x) * y + x, (bf(64, 256), bf(64, 256)), (bf(3, 8), bf(3, 8))),
)  # fmt: skip
