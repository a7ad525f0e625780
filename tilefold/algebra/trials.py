"""Inputs on which a Fold is tried: one row of values a case, read by a hash of the index.

The hash lets any index expression (views, masks, gathers) be read. The scaled cases are for
results that depend on results: an exponent that moves by hundreds from one part of the data to
the next over- or underflows where the definition, which only knows the final value, does not.
At which scale that happens depends on the cascade (a sum of squares moves more than a maximum),
so there is a range of scales, each with several draws: normal ones, steps of -1, 0 or 1 with a
little noise, and waves of them, so that sums go far and come back.
"""

from __future__ import annotations

import math
from functools import lru_cache
from zlib import crc32

import torch

from tilefold.algebra.dtypes import DType

WAY, CASE = "%way", "%case"
NAMED = (
    "normal", "positive", "ties", "zeros", "huge", "tiny", "offset", "some -inf", "all -inf", "some inf", "some nan",
    "alike",
)  # fmt: skip
#: What inputs that are alike differ by. What is left of one without its projection on another is as small: the sum of
#: its squares, made of the sums of products, has lost all digits of half as many.
APART = 3e-6
_SCALES = (2, 5, 12, 30, 75, 150, 300, 500)
_NORMAL, _STEPS, _WAVES = 3, (1.0, 0.1, 0.03), (1.0, 0.3, 0.1, 0.03)  # draws; of steps and waves the noise
CASES = (
    *NAMED,
    *(f"times {s}, draw {n}" for s in _SCALES for n in range(_NORMAL)),
    *(f"steps of {s}, noise {a}" for s in _SCALES for a in _STEPS),
    *(f"waves of {s}, noise {a}" for s in _SCALES for a in _WAVES),
)
#: Inputs alone that are larger than this take exponents out of the range of float64.
LARGEST = 200
_TABLE, _TOP = 61, 7
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31)


def gather(name: str, dtype: DType, cases: int, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """An input in the first `cases` cases, on a grid whose first dims are (way, case)."""
    table = _table(name, dtype)
    if not at:
        return table[:cases, 0].reshape(1, -1)
    rank = at[0].ndim
    position = torch.zeros((1,) * rank, dtype=torch.int64)
    for i, p in zip(at, _PRIMES, strict=False):
        position = position + i.long() * p
    return table[case_index(rank, cases), position % _TABLE]


def largest(name: str, dtype: DType, cases: int) -> torch.Tensor:
    """The largest finite magnitude that an input has in each case."""
    return _table(name, dtype)[:cases].double().abs().nan_to_num(0, 0, 0).amax(1)


def case_index(rank: int, cases: int) -> torch.Tensor:
    """The number of the case along the second of `rank` dims."""
    return torch.arange(cases).reshape(1, -1, *[1] * (rank - 2))


@lru_cache(maxsize=256)
def _table(name: str, dtype: DType) -> torch.Tensor:
    """Values of an input: [case, hash], the same for every run."""
    gen, same = torch.Generator().manual_seed(crc32(name.encode())), torch.Generator().manual_seed(0)
    own, scaled = len(NAMED) - 1, len(CASES) - len(NAMED)
    if not dtype.is_float:
        top = 2 if dtype is DType.BOOL else _TOP
        drawn = [torch.randint(0, top, (n, _TABLE), generator=g) for n, g in ((own, gen), (1, same), (scaled, gen))]
        return torch.cat(drawn).to(dtype.torch_dtype)
    x = torch.randn(own, _TABLE, generator=gen, dtype=torch.float64)
    x[1] = x[1].abs() + 0.1
    x[2] = (x[2] * 1.5).round()
    x[3] = 0
    x[4] *= 1e4
    x[5] *= 1e-30
    x[6] += 1e5
    x[7, ::2] = -math.inf
    x[8] = -math.inf
    x[9, ::5] = math.inf
    x[10, ::5] = math.nan
    moved = _scaled(gen)
    alike, own_part = (torch.randn(1, _TABLE, generator=g, dtype=x.dtype) for g in (same, gen))
    return torch.cat([x, alike + APART * own_part, moved])


def _scaled(gen: torch.Generator) -> torch.Tensor:
    """The scaled cases of one input. A wave changes its sign once or twice along the table, at a random place."""
    scales = torch.tensor(_SCALES, dtype=torch.float64)[:, None, None]
    far, noise = (
        torch.randn(len(_SCALES), n, _TABLE, generator=gen, dtype=scales.dtype) for n in (_NORMAL, len(_STEPS + _WAVES))
    )
    steps = torch.randint(-1, 2, (len(_SCALES), len(_STEPS), _TABLE), generator=gen)
    period, phase = (
        torch.rand(len(_SCALES), len(_WAVES), 1, generator=gen, dtype=scales.dtype) * width + low
        for width, low in ((0.6 * _TABLE, 0.5 * _TABLE), (1.0, 0.0))
    )
    waves = (1.3 * torch.sin(2 * math.pi * (torch.arange(_TABLE) / period + phase))).round()
    noise = noise * torch.tensor(_STEPS + _WAVES)[:, None]
    near = torch.cat([steps, waves], 1) * scales + noise
    parts = (far * scales, near[:, : len(_STEPS)], near[:, len(_STEPS) :])
    return torch.cat([p.reshape(-1, _TABLE) for p in parts])
