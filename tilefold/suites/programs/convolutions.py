"""Convolutions with what follows them, and pooling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f

from tilefold.suites.programs.program import Draw, Program, bf, f32, of, positive


def _p(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"convolution: {name}", "convolutions", large, small, fn)


def _q(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"pooling: {name}", "pooling", large, small, fn)


def _filter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Draw:
    """[out, in, ...] that keeps the variance."""
    inner = 1
    for n in shape[1:]:
        inner *= n
    return of(shape, dtype, scale=inner**-0.5)


def batch_relu(x: Tensor, w: Tensor, mean: Tensor, var: Tensor, g: Tensor, b: Tensor) -> Tensor:
    y = f.conv2d(x, w, padding=w.shape[-1] // 2)
    return torch.relu((y - mean[:, None, None]) * (g * (var + 1e-5).rsqrt())[:, None, None] + b[:, None, None])


def residual(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(f.conv2d(x, w, b, padding=1) + x)


def depthwise(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return f.silu(f.conv2d(x, w, b, padding=w.shape[-1] // 2, groups=x.shape[1]))


def channels_last(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = f.conv2d(x.contiguous(memory_format=torch.channels_last), w, b, padding=1)
    return f.silu(y)


def pooled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return f.max_pool2d(torch.relu(f.conv2d(x, w, b, stride=2, padding=3)), 3, 2, 1)


def norm_after(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = f.conv2d(x, w, b, padding=1)
    return f.silu(f.group_norm(y, y.shape[1] // 8))


def gated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A causal convolution along time, [B, C, T]; a half gates the other."""
    y = f.conv1d(f.pad(x, (w.shape[-1] - 1, 0)), w, b)
    a, g = y.chunk(2, 1)
    return torch.tanh(a) * torch.sigmoid(g)


def causal_depthwise(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return f.silu(f.conv1d(x, w, b, padding=w.shape[-1] - 1, groups=x.shape[1])[..., : x.shape[-1]])


def excite(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Squeeze and excitation."""
    s = torch.sigmoid(torch.relu(x.mean((2, 3)) @ a) @ b)
    return x * s[:, :, None, None]


def upsampled(x: Tensor, w: Tensor) -> Tensor:
    return f.leaky_relu(f.conv2d(f.interpolate(x, scale_factor=2, mode="nearest"), w, padding=1), 0.1)


_VECTORS = (f32(128), positive(128), f32(128), f32(128))
_FEW = (f32(6), positive(6), f32(6), f32(6))
CONVOLUTIONS = (
    _p("3x3, batch norm, ReLU", batch_relu, (f32(32, 128, 28, 28), _filter(128, 128, 3, 3, dtype=torch.float32),
       *_VECTORS), (f32(2, 4, 6, 5), _filter(6, 4, 3, 3, dtype=torch.float32), *_FEW)),
    _p("1x1, batch norm, ReLU", batch_relu, (f32(32, 256, 28, 28), _filter(128, 256, 1, 1, dtype=torch.float32),
       *_VECTORS), (f32(2, 4, 6, 5), _filter(6, 4, 1, 1, dtype=torch.float32), *_FEW)),
    _p("3x3, bias, residual, ReLU", residual, (bf(32, 128, 56, 56), _filter(128, 128, 3, 3), bf(128)),
       (bf(2, 4, 6, 5), _filter(4, 4, 3, 3), bf(4))),
    _p("3x3, channels last, SiLU", channels_last, (bf(32, 128, 56, 56), _filter(256, 128, 3, 3), bf(256)),
       (bf(2, 4, 6, 5), _filter(6, 4, 3, 3), bf(6))),
    _p("7x7 stem, ReLU, pooling", pooled, (bf(32, 3, 224, 224), _filter(64, 3, 7, 7), bf(64)),
       (bf(1, 3, 16, 16), _filter(4, 3, 7, 7), bf(4))),
    _p("1x1, GELU", lambda x, w, b: f.gelu(f.conv2d(x, w, b)), (bf(16, 256, 56, 56), _filter(512, 256, 1, 1), bf(512)),
       (bf(2, 4, 6, 5), _filter(6, 4, 1, 1), bf(6))),
    _p("depthwise 3x3, SiLU", depthwise, (bf(32, 192, 56, 56), _filter(192, 1, 3, 3), bf(192)),
       (bf(2, 4, 6, 5), _filter(4, 1, 3, 3), bf(4))),
    _p("depthwise 7x7, SiLU", depthwise, (bf(16, 96, 56, 56), _filter(96, 1, 7, 7), bf(96)),
       (bf(2, 4, 8, 7), _filter(4, 1, 7, 7), bf(4))),
    _p("patches", lambda x, w, b: f.conv2d(x, w, b, stride=w.shape[-1]).flatten(2).transpose(1, 2),
       (bf(64, 3, 224, 224), _filter(768, 3, 16, 16), bf(768)), (bf(2, 3, 8, 8), _filter(6, 3, 4, 4), bf(6))),
    _p("3x3, group norm, SiLU", norm_after, (bf(8, 128, 64, 64), _filter(128, 128, 3, 3), bf(128)),
       (bf(2, 4, 6, 5), _filter(8, 4, 3, 3), bf(8))),
    _p("strided 3x3, ReLU", lambda x, w: torch.relu(f.conv2d(x, w, stride=2, padding=1)),
       (bf(32, 256, 56, 56), _filter(256, 256, 3, 3)), (bf(2, 4, 6, 5), _filter(6, 4, 3, 3))),
    _p("dilated 3x3, ReLU", lambda x, w: torch.relu(f.conv2d(x, w, dilation=2, padding=2)),
       (bf(8, 128, 64, 64), _filter(128, 128, 3, 3)), (bf(2, 4, 6, 5), _filter(6, 4, 3, 3))),
    _p("transposed, ReLU", lambda x, w: torch.relu(f.conv_transpose2d(x, w, stride=2)),
       (bf(16, 256, 28, 28), bf(256, 128, 2, 2, scale=0.06)), (bf(2, 4, 3, 3), bf(4, 6, 2, 2))),
    _p("upsampled, 3x3", upsampled, (bf(8, 128, 32, 32), _filter(64, 128, 3, 3)),
       (bf(2, 4, 3, 3), _filter(6, 4, 3, 3))),
    _p("along time, gated", gated, (bf(16, 128, 4096), _filter(256, 128, 3), bf(256)),
       (bf(2, 4, 9), _filter(6, 4, 3), bf(6))),
    _p("causal, depthwise, along time", causal_depthwise, (bf(8, 2048, 2048), _filter(2048, 1, 4), bf(2048)),
       (bf(2, 4, 9), _filter(4, 1, 4), bf(4))),
    _p("3D, ReLU", lambda x, w, b: torch.relu(f.conv3d(x, w, b, padding=1)),
       (bf(4, 32, 16, 56, 56), _filter(64, 32, 3, 3, 3), bf(64)), (bf(1, 2, 3, 4, 5), _filter(3, 2, 3, 3, 3), bf(3))),
    _p("squeeze and excitation", excite, (bf(64, 256, 28, 28), bf(256, 64, scale=0.06), bf(64, 256, scale=0.12)),
       (bf(2, 8, 3, 5), bf(8, 2), bf(2, 8))),
)  # fmt: skip

POOLING = (
    _q("maximum 2x2", lambda x: f.max_pool2d(torch.relu(x), 2), (bf(64, 128, 56, 56),), (bf(2, 3, 6, 8),)),
    _q("maximum 3x3, stride 2, padded", lambda x: f.max_pool2d(x, 3, 2, 1), (bf(64, 64, 112, 112),), (bf(2, 3, 7, 8),)),
    _q("mean 2x2", lambda x: f.avg_pool2d(x, 2), (bf(64, 128, 56, 56),), (bf(2, 3, 6, 8),)),
    _q("mean of the image", lambda x: f.adaptive_avg_pool2d(torch.relu(x), 1).flatten(1),
       (bf(128, 2048, 7, 7),), (bf(2, 6, 3, 4),)),
    _q("to 7x7", lambda x: f.adaptive_avg_pool2d(x, (7, 7)), (bf(32, 256, 28, 28),), (bf(2, 3, 14, 14),)),
    _q("maximum with places", lambda x: f.max_pool2d(x, 2, return_indices=True), (f32(32, 64, 56, 56),),
       (f32(2, 3, 6, 8),)),
    _q("mean along time", lambda x: f.avg_pool1d(x, 4), (bf(64, 256, 4096),), (bf(2, 3, 8),)),
    _q("masked mean of tokens", lambda x, m: (x * m[..., None]).sum(1) / m.sum(1, keepdim=True).clamp_min(1),
       (bf(64, 512, 768), positive(64, 512, dtype=torch.bfloat16)),
       (bf(2, 5, 8), positive(2, 5, dtype=torch.bfloat16))),
    _q("maximum of tokens", lambda x: torch.tanh(x.amax(1)), (bf(64, 512, 768),), (bf(2, 5, 8),)),
)  # fmt: skip
