"""Losses, with reductions to a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f

from tilefold.suites.programs.program import Draw, Program, bf, bits, f32, ints, positive, weight


def _p(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"loss: {name}", "losses", large, small, fn)


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    """logits: [B, S, V]."""
    return f.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def head_and_loss(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return f.cross_entropy((h @ w).float(), t)


def distillation(s: Tensor, t: Tensor) -> Tensor:
    return f.kl_div(f.log_softmax(s / 2.0, -1), f.log_softmax(t / 2.0, -1), log_target=True, reduction="batchmean")


def contrast(a: Tensor, b: Tensor) -> Tensor:
    a, b = f.normalize(a, dim=-1), f.normalize(b, dim=-1)
    scores = a @ b.t() * 20.0
    places = torch.arange(a.shape[0], device=a.device)
    return (f.cross_entropy(scores, places) + f.cross_entropy(scores.t(), places)) / 2


def focal(x: Tensor, y: Tensor) -> Tensor:
    ce = f.binary_cross_entropy_with_logits(x, y, reduction="none")
    p = torch.sigmoid(x)
    return (ce * (1 - (p * y + (1 - p) * (1 - y))) ** 2).mean()


def dice(x: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    both, all_ = (p * y).sum((1, 2, 3)), p.sum((1, 2, 3)) + y.sum((1, 2, 3))
    return (1 - (2 * both + 1) / (all_ + 1)).mean()


def preferences(chosen: Tensor, rejected: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Sums of log-probabilities of tokens, [B, S, V] and [B, S]."""
    good = f.log_softmax(chosen.float(), -1).gather(-1, a[..., None]).squeeze(-1).sum(-1)
    bad = f.log_softmax(rejected.float(), -1).gather(-1, b[..., None]).squeeze(-1).sum(-1)
    return -f.logsigmoid(0.1 * (good - bad)).mean()


def masked_mean_square(x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return ((x - y).pow(2) * m).sum() / m.sum().clamp_min(1)


def z_loss(x: Tensor, t: Tensor) -> Tensor:
    z = x.float().logsumexp(-1)
    return f.cross_entropy(x.float(), t) + 1e-4 * z.pow(2).mean()


_TOKENS = (bf(4096, 32000), ints(4096, high=32000))
_FEW = (bf(9, 40), ints(9, high=40))
PROGRAMS = (
    _p("cross-entropy", lambda x, t: f.cross_entropy(x.float(), t), _TOKENS, _FEW),
    _p("cross-entropy, bf16", f.cross_entropy, _TOKENS, _FEW),
    _p("cross-entropy, smoothed", lambda x, t: f.cross_entropy(x.float(), t, label_smoothing=0.1), _TOKENS, _FEW),
    _p("next token", next_token, (bf(4, 1024, 32000), ints(4, 1024, high=32000)),
       (bf(2, 5, 40), ints(2, 5, high=40))),
    _p("head and cross-entropy", head_and_loss, (bf(4096, 2048), weight(2048, 50257), ints(4096, high=50257)),
       (bf(9, 16), weight(16, 40), ints(9, high=40))),
    _p("z loss", z_loss, _TOKENS, _FEW),
    _p("negative log likelihood of pixels", lambda x, t: f.cross_entropy(x, t),
       (f32(8, 21, 256, 256), ints(8, 256, 256, high=21)), (f32(2, 5, 4, 3), ints(2, 4, 3, high=5))),
    _p("distillation", distillation, (f32(4096, 32000), f32(4096, 32000)), (f32(5, 40), f32(5, 40))),
    _p("contrast", contrast, (bf(4096, 512), bf(4096, 512)), (f32(6, 16), f32(6, 16))),
    _p("focal", focal, (f32(4096, 4096), positive(4096, 4096)), (f32(5, 8), positive(5, 8))),
    _p("dice", dice, (f32(32, 1, 512, 512), positive(32, 1, 512, 512)), (f32(2, 1, 6, 5), positive(2, 1, 6, 5))),
    _p("mean square", f.mse_loss, (bf(8192, 4096), bf(8192, 4096)), (bf(5, 8), bf(5, 8))),
    _p("masked mean square", masked_mean_square, (f32(8192, 4096), f32(8192, 4096), bits(8192, 4096)),
       (f32(5, 8), f32(5, 8), bits(5, 8))),
    _p("smooth L1", lambda x, y: f.smooth_l1_loss(x, y), (f32(8192, 4096), f32(8192, 4096)), (f32(5, 8), f32(5, 8))),
    _p("preferences", preferences, (bf(4, 512, 32000), bf(4, 512, 32000), *(2 * (ints(4, 512, high=32000),))),
       (bf(2, 5, 40), bf(2, 5, 40), *(2 * (ints(2, 5, high=40),)))),
    _p("triplets", lambda a, b, c: f.triplet_margin_loss(a, b, c), (f32(65536, 256),) * 3, (f32(9, 8),) * 3),
    _p("Huber of rows", lambda x, y: f.huber_loss(x, y, reduction="none").mean(-1),
       (bf(8192, 4096), bf(8192, 4096)), (bf(5, 8), bf(5, 8))),
)  # fmt: skip
