"""What follows from a reduction of one certain row (the last token's) is no part of that reduction's fold."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.fuse import fuse


def normalised(x, w):
    y = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))[:, -1] * w
    return (y * y).sum(-1)


def centred(x, w):
    m = x.square().mean(-1)
    return (x[:, -1] * w - m[:, 4, None]).square().sum(-1) + m.amax(-1)


@pytest.mark.parametrize("fn", [normalised, centred])
def test_the_last_row_of_several(fn):
    x, w = torch.randn(2, 5, 128), torch.randn(128)
    torch.testing.assert_close(fuse(fn)(x, w), fn(x.double(), w.double()).float(), rtol=1e-5, atol=1e-5)
