"""Reductions over every axis, alone and with what is computed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilefold.suites.programs.program import Draw, Program, bf, f32


def _p(name: str, fn: Callable[..., Any], large: Draw, small: Draw) -> Program:
    return Program(f"reduction: {name}", "reductions", (large,), (small,), fn)


def cosine(x: Tensor) -> Tensor:
    return x / x.float().norm(dim=-1, keepdim=True).clamp_min(1e-6)


def standardise(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


def statistics(x: Tensor) -> tuple[Tensor, ...]:
    return x.amin(-1), x.amax(-1), x.mean(-1), x.var(-1)


def entropy(x: Tensor) -> Tensor:
    p = x.float().softmax(-1)
    return -(p * p.clamp_min(1e-9).log()).sum(-1)


PROGRAMS = (
    _p("sum of rows", lambda x: x.float().sum(-1), bf(8192, 4096), bf(13, 40)),
    _p("sum of long rows", lambda x: x.float().sum(-1), bf(64, 524288), bf(2, 300)),
    _p("sum of short rows", lambda x: x.float().sum(-1), bf(1048576, 32), bf(50, 8)),
    _p("mean of columns", lambda x: x.float().mean(0), bf(8192, 4096), bf(13, 40)),
    _p("sum of few columns", lambda x: x.float().sum(0), bf(1048576, 32), bf(50, 8)),
    _p("sum of columns of few rows", lambda x: x.float().sum(0), bf(16, 1048576), bf(4, 99)),
    _p("maximum of a middle axis", lambda x: x.amax(1), bf(64, 1000, 1024), bf(3, 7, 9)),
    _p("mean of a middle axis", lambda x: x.mean(1), bf(32, 2048, 768), bf(3, 7, 9)),
    _p("mean of two middle axes", lambda x: x.float().mean((1, 2)), bf(64, 56, 56, 256), bf(2, 3, 5, 6)),
    _p("mean of an image", lambda x: x.float().mean((2, 3)), bf(64, 256, 56, 56), bf(2, 6, 3, 5)),
    _p("sum over batch and image", lambda x: x.float().sum((0, 2, 3)), bf(64, 256, 56, 56), bf(2, 6, 3, 5)),
    _p("sum of first and last axis", lambda x: x.float().sum((0, 2)), bf(64, 512, 1024), bf(3, 7, 9)),
    _p("sum of everything", lambda x: x.float().pow(2).sum(), bf(8192, 4096), bf(13, 40)),
    _p("largest magnitude of everything", lambda x: x.abs().amax(), bf(8192, 4096), bf(13, 40)),
    _p("argmax of rows", lambda x: x.argmax(-1), bf(2048, 32000), bf(13, 40)),
    _p("argmin of columns", lambda x: x.argmin(0), f32(4096, 2048), f32(13, 40)),
    _p("maximum with its place", lambda x: x.max(-1), f32(8192, 4096), f32(13, 40)),
    _p("variance of rows, offset", lambda x: x.var(-1), f32(4096, 4096, offset=1e4), f32(13, 40, offset=1e3)),
    _p("standardise columns", standardise, f32(8192, 1024), f32(13, 40)),
    _p("statistics of rows", statistics, f32(8192, 4096), f32(13, 40)),
    _p("log-sum-exp of rows", lambda x: x.float().logsumexp(-1), bf(4096, 32000), bf(13, 40)),
    _p("log-sum-exp of columns", lambda x: x.logsumexp(0), f32(4096, 4096), f32(13, 40)),
    _p("softmax of columns", lambda x: x.softmax(0), f32(4096, 4096), f32(13, 40)),
    _p("softmax of a middle axis", lambda x: x.softmax(1), bf(32, 512, 1024), bf(3, 7, 9)),
    _p("entropy of rows", entropy, bf(4096, 32000), bf(13, 40)),
    _p("unit rows", cosine, bf(8192, 4096), bf(13, 40)),
    _p("product of short rows", lambda x: x.prod(-1), f32(65536, 16), f32(13, 4)),
    _p("any above", lambda x: (x > 4.0).any(-1), bf(8192, 4096), bf(13, 40)),
    _p("rows of odd length", lambda x: x.float().softmax(-1).to(torch.bfloat16), bf(4093, 5003), bf(7, 37)),
)
