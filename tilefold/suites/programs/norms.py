"""Normalisations: of rows, groups, channels, with what usually stands around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f

from tilefold.suites.programs.program import Draw, Program, bf, f32, positive


def _p(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"norm: {name}", "norms", large, small, fn)


def rms(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def add_rms(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return rms(h, w), h


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return f.layer_norm(x, (x.shape[-1],), w, b)


def post_norm(x: Tensor, r: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return layer(x + b + r, w, c)


def adaptive(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return f.layer_norm(x, (x.shape[-1],)) * (1 + scale[:, None]) + shift[:, None]


def group_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return f.silu(f.group_norm(x, max(1, x.shape[1] // 16), w, b))


def batch_relu(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(f.batch_norm(x, mean, var, w, b))


def batch_statistics(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return f.batch_norm(x, None, None, w, b, training=True)


def qk_norm(q: Tensor, k: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return rms(q, w), rms(k, v)


def fp8_rows(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = rms(x, w).float()
    scale = y.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 448
    return (y / scale).to(torch.float8_e4m3fn), scale


def _rows(name: str, fn: Callable[..., Any], n: int, c: int, rows: int, vectors: int) -> Program:
    """`rows` arguments [n, c], then `vectors` [c]."""
    large = (*(bf(n, c) for _ in range(rows)), *(bf(c) for _ in range(vectors)))
    small = (*(bf(5, 24) for _ in range(rows)), *(bf(24) for _ in range(vectors)))
    return _p(name, fn, large, small)


PROGRAMS = (
    _rows("RMS", rms, 8192, 4096, 1, 1),
    _rows("RMS, few rows", rms, 16, 8192, 1, 1),
    _rows("RMS, heads", rms, 262144, 128, 1, 1),
    _rows("residual and RMS", add_rms, 8192, 4096, 2, 1),
    _rows("layer", layer, 8192, 4096, 1, 2),
    _rows("layer, odd width", layer, 8192, 1000, 1, 2),
    _p("layer, float32 with an offset", layer, (f32(8192, 1024, offset=1e3), f32(1024), f32(1024)),
       (f32(5, 24, offset=100.0), f32(24), f32(24))),
    _rows("bias, residual, layer", post_norm, 8192, 1024, 2, 3),
    _p("adaptive layer", adaptive, (bf(16, 1024, 1152), bf(16, 1152), bf(16, 1152)),
       (bf(2, 5, 24), bf(2, 24), bf(2, 24))),
    _p("two norms of heads", qk_norm, (bf(4, 2048, 32, 128), bf(4, 2048, 8, 128), bf(128), bf(128)),
       (bf(2, 5, 4, 8), bf(2, 5, 2, 8), bf(8), bf(8))),
    _p("group and SiLU", group_silu, (bf(16, 320, 64, 64), bf(320), bf(320)), (bf(2, 32, 3, 5), bf(32), bf(32))),
    _p("instance", lambda x: f.instance_norm(x), (bf(16, 64, 128, 128),), (bf(2, 3, 5, 5),)),
    _p("batch, inference, ReLU", batch_relu, (bf(64, 256, 56, 56), f32(256), positive(256), f32(256), f32(256)),
       (bf(2, 6, 3, 5), f32(6), positive(6), f32(6), f32(6))),
    _p("batch, of the batch", batch_statistics, (f32(64, 128, 56, 56), f32(128), f32(128)),
       (f32(2, 6, 3, 5), f32(6), f32(6))),
    _p("local responses", lambda x: f.local_response_norm(x, 5), (f32(16, 64, 56, 56),), (f32(2, 6, 3, 5),)),
    _rows("RMS and float8 of rows", fp8_rows, 8192, 4096, 1, 1),
    _p("weights by columns", lambda v, g: v * (g / v.norm(dim=0, keepdim=True)), (f32(4096, 4096), f32(4096)),
       (f32(9, 7), f32(7))),
)  # fmt: skip
