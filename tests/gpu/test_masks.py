"""Attention with masks by numbers, whose rounding is the compiler's: windows as transformers' models have them."""

from __future__ import annotations

import math

import pytest
import torch

from tilefold import fuse
from tilefold.integrations.transformers.attention import Form

pytestmark = pytest.mark.gpu

H, B, F = torch.float16, torch.bfloat16, torch.float32
LENGTH, WINDOW = 700, 100
VALUES = (-math.inf, torch.finfo(B).min, torch.finfo(F).min, -1e30, -1e9, -2e8, -65504.0, -1e4)


def _seen(device: str, *, rows: bool) -> torch.Tensor:
    """A window of keys for each query; rows: some see nothing."""
    i, j = torch.arange(LENGTH, device=device)[:, None], torch.arange(LENGTH, device=device)
    seen = (j <= i) & (i - j < WINDOW)
    return seen & (i % 50 != 7) if rows else seen


def _near(found: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor) -> None:
    assert bool(found.isfinite().all())
    error, own = ((x.double() - exact).abs().max().item() for x in (found, eager))
    assert error <= 2 * own + 1e-6, (error, own)


def _heads(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    gen = torch.Generator(device).manual_seed(0)
    return [torch.randn(2, h, LENGTH, 64, generator=gen, device=device).to(dtype) for h in (4, 2, 2)]


@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("dtype", [B, H])
def test_windows_given_as_booleans(device, dtype, softcap):
    form = Form(0.125, causal=False, softcap=softcap)
    q, k, v = _heads(device, dtype)
    mask = _seen(device, rows=True)[None, None].expand(2, 1, LENGTH, LENGTH)

    def attention(q, k, v, mask):
        return form(q, k, v, mask, None, None)

    exact = attention(q.float(), k.float(), v.float(), mask).double()
    _near(fuse(attention)(q, k, v, mask), exact, attention(q, k, v, mask))


@pytest.mark.parametrize(
    "value", [-math.inf, torch.finfo(B).min, torch.finfo(F).min, -1e30, -1e9, -2e8, -65504.0, -1e4]
)
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("dtype", [B, H])
def test_masks_by_numbers(device, dtype, added, value):
    q, k, v = _heads(device, dtype)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    seen = _seen(device, rows=not math.isinf(value))
    mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, value)

    def attention(q, k, v, mask):
        s = (q @ k.mT).float() * 0.1
        s = s + mask if mask.is_floating_point() else torch.where(mask, s, value)
        return torch.softmax(s, -1).to(v.dtype) @ v

    given = mask if added else seen
    s = (q.double() @ k.double().mT) * 0.1
    s = (s.float() + given) if added else torch.where(given, s, value)  # as float32 rounds
    exact = torch.softmax(s.double(), -1) @ v.double()
    _near(fuse(attention)(q, k, v, given), exact, attention(q, k, v, given))
