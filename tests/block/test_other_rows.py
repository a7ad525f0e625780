"""What follows from a reduction of other rows (the last token's, every second) is no part of that reduction's fold."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import layer_norm

from tilefold.frontend.fuse import fuse


def normalised(x, w):
    y = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))[:, -1] * w
    return (y * y).sum(-1)


def centred(x, w):
    m = x.square().mean(-1)
    return (x[:, -1] * w - m[:, 4, None]).square().sum(-1) + m.amax(-1)


def pooled(x, w):
    """Pairs of rows are averaged between two norms: the second reads states of every second row."""
    y = layer_norm(x, (128,), w)
    return layer_norm((y[:, :-1:2] + y[:, 1::2]) / 2, (128,), w)


@pytest.mark.parametrize("fn", [normalised, centred, pooled])
def test_other_rows_of_several(fn):
    x, w = torch.randn(2, 6, 128), torch.randn(128)
    torch.testing.assert_close(fuse(fn)(x, w), fn(x.double(), w.double()).float(), rtol=1e-5, atol=1e-5)
