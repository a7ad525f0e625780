"""The operators of RedFuser's and Neptune's tables, as a user would write them in PyTorch.

Those that the suite of cascades has too are taken from it. Sizes that are part of an operator (k of
top-k, a window, a cap) are arguments of its maker. The last query stands at the last key, so that one
function serves prefill and decode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilefold.suites.functions import F8_MAX, inertia, l2_norm, performer, rms_norm, softmax, variance_by_hand

__all__ = [
    "alibi",
    "attention",
    "causal",
    "gqa",
    "inertia",
    "l2_norm",
    "mla",
    "moe_routing",
    "performer",
    "quant_gemm",
    "quantise",
    "rms_norm",
    "rms_norm_max",
    "softcap",
    "softmax",
    "variance_by_hand",
    "window",
]

Operator = Callable[..., Any]

#: Smallest absolute maximum that a row is scaled by: a row of zeros stays zeros.
LEAST_AMAX = 1e-12


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v. q: [B, H, Sq, D], k: [B, H, Skv, D], v: [B, H, Skv, Dv]."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Query positions [Sq, 1] and key positions [Skv]."""
    j = torch.arange(k.shape[-2], device=q.device)
    return torch.arange(q.shape[-2], device=q.device).unsqueeze(-1) + (k.shape[-2] - q.shape[-2]), j


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A query sees the keys up to its own position."""
    i, j = _positions(q, k)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(torch.where(j <= i, scores, float("-inf")), -1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """slopes: [H], a penalty a position of distance; causal (MPT)."""
    i, j = _positions(q, k)
    scores = q @ k.mT * q.shape[-1] ** -0.5 + slopes.view(-1, 1, 1) * (j - i)
    return torch.softmax(torch.where(j <= i, scores, float("-inf")), -1) @ v


def _heads_of(x: Tensor, q: Tensor) -> Tensor:
    """Key or value heads repeated for the query heads that share them: [B, Hkv, S, D] -> [B, H, S, D]."""
    b, h, s, d = x.shape
    return x.unsqueeze(2).expand(b, h, q.shape[1] // h, s, d).reshape(b, q.shape[1], s, d)


def gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """k and v: [B, Hkv, Skv, D] with H a multiple of Hkv; causal (Llama 3)."""
    return causal(q, _heads_of(k, q), _heads_of(v, q))


def softcap(cap: float) -> Operator:
    """Scores squashed to (-cap, cap), grouped heads, causal (Gemma 2)."""

    def softcap_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = _heads_of(k, q), _heads_of(v, q)
        i, j = _positions(q, k)
        scores = cap * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / cap)
        return torch.softmax(torch.where(j <= i, scores, float("-inf")), -1) @ v

    return softcap_attention


def window(size: int) -> Operator:
    """A query sees the `size` keys up to its own position; grouped heads (Gemma 2)."""

    def window_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = _heads_of(k, q), _heads_of(v, q)
        i, j = _positions(q, k)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return torch.softmax(torch.where((j <= i) & (i - j < size), scores, float("-inf")), -1) @ v

    return window_attention


def mla(value_dim: int) -> Operator:
    """Multi-head latent attention, decode: one query a sequence, all heads share the latent vectors."""

    def mla_decode(q: Tensor, latent: Tensor) -> Tensor:
        """q: [B, H, D + P], latent: [B, Skv, D + P]; values are the first D entries. -> [B, H, D]."""
        weights = torch.softmax(q @ latent.mT * q.shape[-1] ** -0.5, -1)
        return weights @ latent[..., :value_dim]

    return mla_decode


def moe_routing(experts: int) -> Operator:
    """The `experts` most probable experts of each token, with their probabilities."""

    def routing(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, D], w: [D, E]."""
        best = torch.topk(torch.softmax(x @ w, -1, dtype=torch.float32), experts, dim=-1)
        return best.values, best.indices

    return routing


def quantise(a: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a [M, K] in e4m3, and their scales [M, 1] (float32)."""
    wide = a.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST_AMAX) / F8_MAX
    return (wide / scale).to(torch.float8_e4m3fn), scale


def quant_gemm(a: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """a: [M, K] bf16 quantised by rows, times w: [K, N] e4m3 (columns contiguous) with scales [1, N]. -> bf16."""
    quantised, scale = quantise(a)
    return torch._scaled_mm(quantised, w, scale_a=scale, scale_b=w_scale, out_dtype=torch.bfloat16)


def rms_norm_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm and the largest element of each normalised row (Neptune 4.4: dynamic scaling). x: [R, C]."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return y, y.amax(-1)
