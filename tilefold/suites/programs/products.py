"""Matrix products of every aspect ratio, with what follows or precedes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f

from tilefold.suites.programs.program import Draw, Program, bf, f32, hf, weight


def _p(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"product: {name}", "products", large, small, fn)


def _gelu(name: str, m: int, k: int, n: int) -> Program:
    """x [m, k] @ w [k, n] + b, then GELU."""
    small = (bf(5, 16), weight(16, 24), bf(24))
    return _p(name, lambda x, w, b: f.gelu(x @ w + b), (bf(m, k), weight(k, n), bf(n)), small)


def rms_product(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return ((h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * g) @ w


def layer_product(x: Tensor, w: Tensor) -> Tensor:
    return f.layer_norm(x, x.shape[-1:]) @ w


def swiglu(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return f.silu(x @ a) * (x @ b)


def packed_swiglu(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).chunk(2, -1)
    return f.silu(a) * b


def low_rank(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ w + (x @ a) @ b * 0.5


def projections(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x @ q, x @ k, x @ v


def residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r + torch.relu(x @ w + b)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return f.relu(f.linear(x, w, b))


def int8_weights(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (x @ w.to(x.dtype)) * s


def distances(x: Tensor, c: Tensor) -> Tensor:
    """The nearest of the centres."""
    return (x.pow(2).sum(-1, keepdim=True) - 2 * x @ c.t() + c.pow(2).sum(-1)).argmin(-1)


def bilinear(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bi,ij,bj->b", x, w, y)


def gram(x: Tensor) -> Tensor:
    return x.t() @ x / x.shape[0]


def _int8(*shape: int) -> Draw:
    return Draw(shape, lambda gen: torch.randint(-127, 128, shape, generator=gen, device=gen.device, dtype=torch.int8))


PROGRAMS = (
    _gelu("square, bias, GELU", 4096, 4096, 4096),
    _gelu("tall, bias, GELU", 65536, 256, 512),
    _gelu("wide, bias, GELU", 512, 2048, 16384),
    _gelu("64 rows, bias, GELU", 64, 4096, 4096),
    _gelu("16 rows, bias, GELU", 16, 4096, 11008),
    _gelu("one row, bias, GELU", 1, 4096, 4096),
    _gelu("small, bias, GELU", 256, 256, 256),
    _gelu("odd sizes, bias, GELU", 1000, 1023, 777),
    _gelu("short depth, bias, GELU", 8192, 32, 2048),
    _gelu("long depth, bias, GELU", 128, 65536, 128),
    _p("linear of float32, ReLU", linear, (f32(4096, 1024), f32(1024, 1024, scale=0.03), f32(1024)),
       (f32(5, 16), f32(24, 16), f32(24))),
    _p("linear of float16, ReLU", linear, (hf(4096, 4096), hf(4096, 4096, scale=0.016), hf(4096)),
       (hf(5, 16), hf(24, 16), hf(24))),
    _p("residual and ReLU", residual, (bf(8192, 1024), weight(1024, 1024), bf(1024), bf(8192, 1024)),
       (bf(5, 16), weight(16, 24), bf(24), bf(5, 24))),
    _p("RMS norm before", rms_product, (bf(4096, 4096), bf(4096), weight(4096, 4096)),
       (bf(5, 16), bf(16), weight(16, 24))),
    _p("layer norm before, 300 columns", layer_product, (f32(4096, 300), weight(300, 512, dtype=torch.float32)),
       (f32(5, 30), weight(30, 24, dtype=torch.float32))),
    _p("SwiGLU", swiglu, (bf(2048, 2048), weight(2048, 5632), weight(2048, 5632)),
       (bf(5, 16), weight(16, 24), weight(16, 24))),
    _p("SwiGLU of one packed product", packed_swiglu, (bf(2048, 2048), weight(2048, 11264)),
       (bf(5, 16), weight(16, 24))),
    _p("low-rank update", low_rank, (bf(4096, 2048), weight(2048, 2048), weight(2048, 16), weight(16, 2048)),
       (bf(5, 16), weight(16, 24), weight(16, 4), weight(4, 24))),
    _p("three projections", projections, (bf(4096, 2048), weight(2048, 2048), weight(2048, 512), weight(2048, 512)),
       (bf(5, 16), weight(16, 24), weight(16, 8), weight(16, 8))),
    _p("batched, scaled", lambda x, y: torch.bmm(x, y) * 0.125, (bf(64, 512, 64), bf(64, 64, 512)),
       (bf(3, 5, 8), bf(3, 8, 7))),
    _p("batched, small, tanh", lambda x, y: torch.tanh(torch.bmm(x, y)), (bf(4096, 32, 32), bf(4096, 32, 32)),
       (bf(3, 5, 8), bf(3, 8, 7))),
    _p("transposed weights", lambda x, w: f.silu(x @ w.t()), (bf(4096, 2048), bf(2048, 2048, scale=0.02)),
       (bf(5, 16), bf(24, 16))),
    _p("transposed rows", lambda x, w: (x.t() @ w).relu(), (bf(2048, 4096), weight(2048, 2048)),
       (bf(16, 5), weight(16, 24))),
    _p("matrix and vector", lambda w, x, b: torch.sigmoid(w @ x + b), (bf(8192, 8192, scale=0.01), bf(8192), bf(8192)),
       (bf(5, 16), bf(16), bf(5))),
    _p("int8 weights", int8_weights, (bf(32, 4096), _int8(4096, 4096), bf(4096, scale=0.001)),
       (bf(5, 16), _int8(16, 24), bf(24, scale=0.001))),
    _p("nearest centres", distances, (f32(65536, 64), f32(1024, 64)), (f32(9, 4), f32(5, 4))),
    _p("bilinear form", bilinear, (f32(8192, 256), f32(256, 256, scale=0.06), f32(8192, 256)),
       (f32(5, 8), f32(8, 6), f32(5, 6))),
    _p("Gram matrix", gram, (bf(16384, 1024), ), (bf(9, 8),)),
    _p("softmax of a product", lambda x, w: (x @ w).float().softmax(-1).to(x.dtype),
       (bf(4096, 1024), weight(1024, 1024)), (bf(5, 16), weight(16, 24))),
    _p("log-sum-exp of a product", lambda x, w: (x @ w).float().logsumexp(-1),
       (bf(4096, 1024), weight(1024, 32000)), (bf(5, 16), weight(16, 24))),
)  # fmt: skip
