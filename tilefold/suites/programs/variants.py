"""Attention in other forms: examples of FlexAttention's, and programs of Flashlight's that it cannot express.

Shapes are those of Flashlight's figures (arXiv 2511.02043, section 5) where it has them; the programs are written
from the papers that brought them, as plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilefold.suites.programs.program import Draw, Program, bf, f32, ints

NEVER = float("-inf")


def _v(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"variant: {name}", "variants", large, small, fn)


def _qkv(b: int, h: int, s: int, d: int) -> tuple[Draw, ...]:
    return (bf(b, h, s, d),) * 3


def _ids(b: int, s: int, count: int) -> Draw:
    """Numbers of the documents that b rows of s tokens hold, `count` each, in order: [B, S]."""

    def draw(gen: torch.Generator) -> Tensor:
        return torch.randint(0, count, (b, s), generator=gen, device=gen.device).sort(-1).values

    return Draw((b, s), draw)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5


def _places(q: Tensor) -> tuple[Tensor, Tensor]:
    n = torch.arange(q.shape[-2], device=q.device)
    return n[:, None], n[None]


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """GPT-OSS: each head has a logit that takes part in the softmax and has no value. sinks: [H]."""
    i, j = _places(q)
    s = _scores(q, k).masked_fill(i < j, NEVER)
    s = torch.cat((s, sinks[:, None, None].expand(*s.shape[:-1], 1)), -1)
    return s.softmax(-1)[..., :-1] @ v


def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Tokens see those before them in their own document. ids: [B, S]."""
    i, j = _places(q)
    seen = (ids[:, None, :, None] == ids[:, None, None, :]) & (i >= j)
    return _scores(q, k).masked_fill(~seen, NEVER).softmax(-1) @ v


def lengths(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
    """Sequence b has n[b] + 1 keys."""
    _, j = _places(q)
    return _scores(q, k).masked_fill(j > n[:, None, None, None], NEVER).softmax(-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """slopes: [H]."""
    i, j = _places(q)
    s = _scores(q, k) + slopes[:, None, None] * (j - i)
    return s.masked_fill(i < j, NEVER).softmax(-1) @ v


def differential(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Differential Transformer: what two softmaxes over the same values differ by.

    q, k: [B, 2 H, S, D], a head's two after each other; v: [B, H, S, 2 D]; scale: [1].
    """
    p = _scores(q, k).softmax(-1)
    p = p.view(p.shape[0], v.shape[1], 2, *p.shape[2:])
    return (p[:, :, 0] - scale * p[:, :, 1]) @ v


def differential_halves(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """The same with the first softmaxes' heads in front of the second ones'."""
    (q, r), (k, m) = q.chunk(2, 1), k.chunk(2, 1)
    return (_scores(q, k).softmax(-1) - scale * _scores(r, m).softmax(-1)) @ v


def evoformer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pairs: Tensor) -> Tensor:
    """AlphaFold's attention along rows. q, k, v: [B, R, H, S, D]; mask: [B, R, 1, 1, S]; pairs: [B, 1, H, S, S]."""
    return (_scores(q, k) + mask + pairs).softmax(-1) @ v


def evoformer_columns(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, gate: Tensor) -> Tensor:
    """Along columns, with its gate. q, k, v, gate: [B, R, S, H, D] as the model has them; mask: [B, R, S]."""
    q, k, v, g = (x.permute(0, 2, 3, 1, 4) for x in (q, k, v, gate))
    s = _scores(q, k) + mask.transpose(1, 2)[:, :, None, None]
    return torch.sigmoid(g) * (s.softmax(-1) @ v)


def of_points(
    q: Tensor, k: Tensor, v: Tensor, points: Tensor, others: Tensor, values: Tensor, pairs: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """AlphaFold's invariant point attention, without its frames.

    q, k, v: [B, H, S, D]; points, others: [B, H, S, P, 3]; values: [B, H, S, 3 P']; pairs: [B, H, S, S]; weights: [H].
    """
    far = (points[:, :, :, None] - others[:, :, None]).square().sum((-1, -2))
    p = (_scores(q, k) + pairs - 0.5 * weights[:, None, None] * far).softmax(-1).to(v.dtype)
    return p @ v, p @ values


def rectified(q: Tensor, k: Tensor, v: Tensor, gain: Tensor) -> Tensor:
    """Sparse attention with linear units (arXiv 2104.07012): ReLU in place of softmax, RMSNorm after. gain: [D]."""
    x = torch.relu(_scores(q, k)) @ v
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype) * gain


def _pairs(b: int, h: int, s: int, d: int) -> tuple[Draw, ...]:
    return bf(b, 2 * h, s, d), bf(b, 2 * h, s, d), bf(b, h, s, 2 * d), bf(1)


def _rows(b: int, r: int, h: int, s: int, d: int) -> tuple[Draw, ...]:
    return (*((bf(b, r, h, s, d),) * 3), bf(b, r, 1, 1, s), bf(b, 1, h, s, s))


def _columns(b: int, r: int, s: int, h: int, d: int) -> tuple[Draw, ...]:
    return (*((bf(b, r, s, h, d),) * 3), bf(b, r, s), bf(b, r, s, h, d))


def _points(b: int, h: int, s: int, d: int) -> tuple[Draw, ...]:
    return (*_qkv(b, h, s, d), f32(b, h, s, 4, 3), f32(b, h, s, 4, 3), bf(b, h, s, 24), bf(b, h, s, s), f32(h))


VARIANTS = (
    _v("sinks", with_sinks, (*_qkv(4, 16, 2048, 64), bf(16)), (*_qkv(1, 2, 9, 8), bf(2))),
    _v("documents", documents, (*_qkv(2, 16, 4096, 128), _ids(2, 4096, 8)), (*_qkv(2, 2, 9, 8), _ids(2, 9, 3))),
    _v("lengths", lengths, (*_qkv(8, 16, 2048, 128), ints(8, high=2048)), (*_qkv(2, 2, 9, 8), ints(2, high=9))),
    _v("ALiBi", alibi, (*_qkv(4, 16, 2048, 128), bf(16)), (*_qkv(1, 2, 9, 8), bf(2))),
    _v("differential", differential, _pairs(8, 16, 2048, 64), _pairs(1, 2, 9, 8)),
    _v("differential by halves", differential_halves, _pairs(8, 16, 2048, 64), _pairs(1, 2, 9, 8)),
    _v("rows of an Evoformer", evoformer, _rows(4, 256, 4, 256, 64), _rows(2, 3, 2, 9, 8)),
    _v("columns of an Evoformer", evoformer_columns, _columns(4, 256, 256, 4, 32), _columns(1, 9, 3, 2, 8)),
    _v("of points", of_points, _points(2, 12, 512, 16), _points(1, 2, 9, 8)),
    _v("rectified", rectified, (*_qkv(4, 16, 2048, 64), bf(64)), (*_qkv(1, 2, 9, 8), bf(8))),
)  # fmt: skip
