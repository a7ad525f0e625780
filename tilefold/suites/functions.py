"""The cascades as plain PyTorch functions. Shapes are in the docstrings; every one is differentiable torch.

The papers: RedFuser (softmax, attention, MLA, routing, quantise + GEMM, sum + sum, variance,
inertia), Neptune (attention variants, L2 norm, RMSNorm + max, Performer), Blockbuster (norm + GEMM).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

F8_MAX = 448.0  # largest e4m3fn value
SOFT_CAP = 50.0
WINDOW = 16


def softmax(x: Tensor) -> Tensor:
    """x: [R, C]."""
    return torch.softmax(x, -1)


def softmax_by_hand(x: Tensor) -> Tensor:
    """x: [R, C]; the same from its parts."""
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logits: [R, C], labels: [R]; the loss of each row."""
    return functional.cross_entropy(logits, labels, reduction="none")


def _attend(scores: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores, -1) @ v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: [B, H, Sq, D], k and v: [B, H, Skv, D]."""
    return _attend(q @ k.mT * q.shape[-1] ** -0.5, v)


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key positions; the last query stands at the last key (so that decode sees all keys)."""
    j = torch.arange(k.shape[-2], device=q.device)
    return torch.arange(q.shape[-2], device=q.device).unsqueeze(-1) + (k.shape[-2] - q.shape[-2]), j


def attention_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = _positions(q, k)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return _attend(scores.masked_fill(j > i, float("-inf")), v)


def attention_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """slopes: [H], a penalty a head and position of distance; causal."""
    i, j = _positions(q, k)
    scores = q @ k.mT * q.shape[-1] ** -0.5 + slopes.view(-1, 1, 1) * (j - i)
    return _attend(scores.masked_fill(j > i, float("-inf")), v)


def attention_gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """k and v: [B, Hkv, Skv, D] with H a multiple of Hkv; causal."""
    repeats = q.shape[1] // k.shape[1]
    return attention_causal(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))


def attention_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores squashed to (-SOFT_CAP, SOFT_CAP) as in Gemma 2; causal."""
    i, j = _positions(q, k)
    scores = SOFT_CAP * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / SOFT_CAP)
    return _attend(scores.masked_fill(j > i, float("-inf")), v)


def attention_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A query sees the WINDOW keys up to its own position."""
    i, j = _positions(q, k)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return _attend(scores.masked_fill((j > i) | (i - j >= WINDOW), float("-inf")), v)


def mla(q: Tensor, latent: Tensor) -> Tensor:
    """Multi-head latent attention, decode. q: [B, H, D + P], latent: [B, Skv, D + P] shared by all heads.

    The values are the first D entries of the latent vectors; P = D / 8.
    """
    d = latent.shape[-1] * 8 // 9
    scores = torch.einsum("bhd,bsd->bhs", q, latent) * q.shape[-1] ** -0.5
    return torch.einsum("bhs,bsd->bhd", torch.softmax(scores, -1), latent[..., :d])


def moe_routing(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """x: [T, D], w: [D, E]; the 4 largest probabilities of each token and their experts."""
    best = torch.topk(torch.softmax(x @ w, -1), 4, dim=-1)
    return best.values, best.indices


def quant_gemm(a: Tensor, w: Tensor) -> Tensor:
    """a: [M, K] quantised to e4m3 with one scale a row, times w: [N, K] (e4m3). Scales are in float32."""
    a = a.float()
    scale = a.abs().amax(-1, keepdim=True) / F8_MAX
    quantised = (a / scale).to(torch.float8_e4m3fn)
    return quantised.float() @ w.float().mT * scale


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x: [R, C], weight: [C]."""
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


def rms_norm_gemm(x: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    """w: [C, N]."""
    return rms_norm(x, weight) @ w


def layer_norm_gemm(x: Tensor, weight: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    return layer_norm(x, weight, bias) @ w


def rms_norm_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm and the largest magnitude of each normalised row (Neptune 4.4: dynamic scaling)."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return y, y.abs().amax(-1)


def l2_norm(x: Tensor) -> Tensor:
    """sqrt(sum x^2) that does not overflow: scaled by the largest magnitude (NaN for a row of zeros)."""
    m = x.abs().amax(-1, keepdim=True)
    return m.squeeze(-1) * (x / m).square().sum(-1).sqrt()


def performer(q: Tensor, k: Tensor, v: Tensor, projection: Tensor) -> Tensor:
    """Linear attention with positive random features (Neptune, appendix C).

    q, k, v: [B, H, S, D], projection: [M, D].
    """
    d, m = q.shape[-1], projection.shape[0]

    def features(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        dash = x @ projection.mT * d**-0.25
        half = x.square().sum(-1, keepdim=True) * (0.5 * d**-0.5)
        return m**-0.5 * torch.exp(dash - dash.amax(axes, keepdim=True) - half)

    fq, fk = features(q, (-1,)), features(k, (-1, -2))
    normal = fq @ fk.sum(-2).unsqueeze(-1)
    return fq @ (fk.mT @ v) / normal


def sum_sum(x: Tensor, y: Tensor) -> Tensor:
    """RedFuser, A.2.3 (its eq. 39): both [R, C]; the inner maximum is with 1, so that no root is of 0."""
    m = x.square().sum(-1, keepdim=True)
    return (x * y / torch.sqrt(torch.clamp(m - 10, min=1.0))).sum(-1)


def variance(x: Tensor) -> Tensor:
    return torch.var(x, -1)


def variance_by_hand(x: Tensor) -> Tensor:
    """RedFuser, eq. 44."""
    return (x - x.mean(-1, keepdim=True)).square().mean(-1)


def std(x: Tensor) -> Tensor:
    return torch.std(x, -1)


def inertia(m: Tensor, x: Tensor) -> Tensor:
    """Moment of inertia about the centre of mass (RedFuser, eq. 45). m: [R, N], x: [R, N, 3]."""
    centre = (m.unsqueeze(-1) * x).sum(1, keepdim=True) / m.sum(1).view(-1, 1, 1)
    return (m * (x - centre).square().sum(-1)).sum(1)


def weighted_mean(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).sum(-1) / w.sum(-1)


def weighted_covariance(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """All [R, C]."""
    total = w.sum(-1, keepdim=True)
    dx = x - (w * x).sum(-1, keepdim=True) / total
    dy = y - (w * y).sum(-1, keepdim=True) / total
    return (w * dx * dy).sum(-1) / total.squeeze(-1)


def third_moment(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).pow(3).mean(-1)


def fourth_moment(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).pow(4).mean(-1)


def argmax(x: Tensor) -> Tensor:
    return torch.argmax(x, -1)


def argmin(x: Tensor) -> Tensor:
    return torch.argmin(x, -1)


def prod(x: Tensor) -> Tensor:
    return torch.prod(x, -1)


def exp_over_rms(x: Tensor) -> Tensor:
    """sum exp(x / rms(x)): derivatives by the rms never close, so there is no fold."""
    return torch.exp(x / x.square().mean(-1, keepdim=True).sqrt()).sum(-1)


def alibi_slopes(heads: int) -> Tensor:
    """The geometric slopes of the ALiBi paper. [H]."""
    return torch.tensor([2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)])


def projection(features: int, dim: int, gen: torch.Generator) -> Tensor:
    """Random features with the norms of a normal matrix. [M, D]."""
    return torch.randn(features, dim, generator=gen) / math.sqrt(2.0)
