"""Routing of tokens to experts, indexing and scattering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f

from tilefold.suites.programs.program import Draw, Program, bf, f32, ints, weight


def _p(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"routing: {name}", "routing", large, small, fn)


def _s(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"scan: {name}", "scans", large, small, fn)


def top_2(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    p = (x @ w).float().softmax(-1)
    gates, chosen = p.topk(2, -1)
    return gates / gates.sum(-1, keepdim=True), chosen


def top_k_first(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    z, chosen = (x @ w).float().topk(2, -1)
    return z.softmax(-1), chosen


def sigmoid_groups(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid((x @ w).float())
    _, chosen = (s + b).topk(4, -1)
    gates = s.gather(-1, chosen)
    return gates / gates.sum(-1, keepdim=True), chosen


def balance(x: Tensor, w: Tensor) -> Tensor:
    p = (x @ w).float().softmax(-1)
    share = f.one_hot(p.argmax(-1), w.shape[1]).float().mean(0)
    return (share * p.mean(0)).sum() * w.shape[1]


def dense_experts(x: Tensor, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Every expert on every token; a: [E, C, F], b: [E, F, C]."""
    p = (x @ g).float().softmax(-1).to(x.dtype)
    h = f.silu(torch.einsum("nc,ecf->enf", x, a))
    return torch.einsum("enf,efc,ne->nc", h, b, p)


def combine(y: Tensor, places: Tensor, gates: Tensor) -> Tensor:
    """y: [N k, C] in sorted order; gates: [N, k]."""
    n, k = gates.shape
    return (y[places].view(n, k, -1) * gates[..., None]).sum(1)


def counts(t: Tensor, x: Tensor) -> Tensor:
    """Sums of rows by class."""
    return x.new_zeros(64, x.shape[1]).index_add(0, t, x)


def shifted(x: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[1], device=x.device)[:, None] > 0, x.roll(1, 1), 0.0) - x


def positions(m: Tensor) -> Tensor:
    return (m.cumsum(-1) - 1).clamp(min=0)


def nucleus(x: Tensor) -> Tensor:
    """Probabilities, sorted, whose sum stays below 0.9."""
    p = x.float().softmax(-1).sort(-1, descending=True).values
    return torch.where(p.cumsum(-1) - p < 0.9, p, 0.0)


def decay(x: Tensor, a: Tensor) -> Tensor:
    """A linear recurrence by sums of logarithms, [B, T, C]."""
    la = f.logsigmoid(a).cumsum(1)
    return torch.exp(la) * (x * torch.exp(-la)).cumsum(1)


def causal_mean(x: Tensor) -> Tensor:
    n = torch.arange(1, x.shape[1] + 1, device=x.device)
    return x.float().cumsum(1) / n[:, None]


_GATE, _FEW = (bf(8192, 2048), weight(2048, 64)), (f32(9, 16), weight(16, 8, dtype=torch.float32))
ROUTING = (
    _p("top 2 of a softmax", top_2, _GATE, _FEW),
    _p("softmax of the top 2", top_k_first, _GATE, _FEW),
    _p("sigmoid, biased choice", sigmoid_groups, (*_GATE, f32(64)), (*_FEW, f32(8))),
    _p("balance of experts", balance, _GATE, _FEW),
    _p("dense experts", dense_experts, (bf(1024, 1024), weight(1024, 8), weight(8, 1024, 2048), weight(8, 2048, 1024)),
       (bf(5, 8), weight(8, 3), weight(3, 8, 6), weight(3, 6, 8))),
    _p("combination", combine, (bf(16384, 2048), ints(16384, high=16384), bf(8192, 2)),
       (bf(10, 8), ints(10, high=10), bf(5, 2))),
    _p("sums by class", counts, (ints(65536, high=64), f32(65536, 256)), (ints(9, high=64), f32(9, 8))),
    _p("rows by index, scaled", lambda x, i, s: x[i] * s[i][:, None], (bf(65536, 1024), ints(16384, high=65536),
       bf(65536)), (bf(9, 8), ints(5, high=9), bf(9))),
    _p("columns gathered", lambda x, i: x.gather(1, i).float().sum(1), (bf(8192, 4096), ints(8192, 512, high=4096)),
       (bf(5, 16), ints(5, 6, high=16))),
    _p("one-hot product", lambda t, w: f.one_hot(t, w.shape[0]).to(w.dtype) @ w, (ints(8192, high=1024),
       bf(1024, 512)), (ints(5, high=6), bf(6, 8))),
)  # fmt: skip

SCANS = (
    _s("sum of rows", lambda x: x.cumsum(-1), (f32(8192, 4096),), (f32(5, 9),)),
    _s("sum of columns", lambda x: x.cumsum(0), (f32(8192, 4096),), (f32(5, 9),)),
    _s("positions of tokens", positions, (ints(64, 4096, high=2),), (ints(3, 9, high=2),)),
    _s("causal mean", causal_mean, (bf(8, 2048, 1024),), (bf(2, 5, 8),)),
    _s("product of rows", lambda x: (1 + 0.01 * x).cumprod(-1), (f32(8192, 1024),), (f32(5, 9),)),
    _s("log-sum-exp of rows", lambda x: x.logcumsumexp(-1), (f32(8192, 1024),), (f32(5, 9),)),
    _s("running maximum", lambda x: x.cummax(-1).values, (f32(8192, 4096),), (f32(5, 9),)),
    _s("nucleus of probabilities", nucleus, (f32(512, 32000),), (f32(5, 40),)),
    _s("linear recurrence", decay, (f32(8, 512, 1024, scale=0.1), f32(8, 512, 1024, offset=5.0)),
       (f32(2, 5, 8), f32(2, 5, 8, offset=5.0))),
    _s("differences along time", shifted, (f32(8, 2048, 1024),), (f32(2, 5, 8),)),
)  # fmt: skip
