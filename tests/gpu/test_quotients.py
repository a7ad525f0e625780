"""Quotients by hoisted inverses: rounded coarsely they give eager's bits, elsewhere they are as close as division."""

from __future__ import annotations

import pytest
import torch

from tilefold import fuse
from tilefold.suites.gpu.operators import quantise

pytestmark = pytest.mark.gpu

F, B = torch.float32, torch.bfloat16
#: Factors of rows: denormal sums, their inverses, and what lies between.
SCALES = (1e-42, 1e-39, 1e-30, 1e-12, 1.0, 1e12, 1e30, 1e36)


def rows(device, columns, dtype):
    gen = torch.Generator(device).manual_seed(columns)
    x = torch.randn(len(SCALES) * 16 + 6, columns, generator=gen, device=device)
    x[: len(SCALES) * 16] *= torch.tensor(SCALES, device=device).repeat_interleave(16)[:, None]
    x[-1], x[-2, 3], x[-3, 5], x[-4, 1], x[-5] = 0.0, torch.inf, -torch.inf, torch.nan, 1.0
    return x.to(dtype)


def rounded(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale), torch.floor(x / scale)


def share(x):
    return x / x.abs().sum(-1, keepdim=True)


def same(a, b):
    return torch.equal(torch.nan_to_num(a.float(), nan=1e9), torch.nan_to_num(b.float(), nan=1e9))


@pytest.mark.parametrize("columns", [64, 517, 2560, 7168])
@pytest.mark.parametrize("dtype", [B, F])
def test_quantisation_gives_eagers_bits(columns, dtype, device):
    x = rows(device, columns, dtype)
    # on a GPU eager multiplies by the inverse of a number, which is not the quotient
    for got, want in zip(fuse(quantise)(x), quantise(x.cpu()), strict=True):
        assert same(got.cpu(), want)


@pytest.mark.parametrize("columns", [64, 1536])
def test_rounding_to_integers_gives_eagers(columns, device):
    x = rows(device, columns, F)
    for got, want in zip(fuse(rounded)(x), rounded(x.cpu()), strict=True):
        assert same(got.cpu(), want)


@pytest.mark.parametrize("columns", [64, 1536])
def test_quotients_of_all_sizes(columns, device):
    x = rows(device, columns, F)
    got, want = fuse(share)(x), share(x.double())
    good = want.isfinite() & (want.abs() > 1e-37) & x.abs().sum(-1, keepdim=True).isfinite()
    # the sum of so many is off by some units in the last place of a float32 that may be denormal
    unit = torch.clamp(1e-45 / x.double().abs().sum(-1, keepdim=True), 2**-23, 1.0)
    off = ((got.double() - want).abs() / want.abs() / unit)[good]
    assert off.numel() > 0.7 * want.numel() and float(off.max()) < 16
    assert torch.equal(got.isnan(), share(x).isnan())
