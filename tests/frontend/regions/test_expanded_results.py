"""Results that eager has as strided and expanded views are stored once along the axes that they are expanded over."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.fuse import fuse


def a_part(x):
    v = x[:, :, 0]
    return torch.chunk(v.unsqueeze(2).expand(7, 65, 3), 2, -2)[0], v.amin(0)


def half(x):
    return x[:, :33, 0].unsqueeze(2).expand(7, 33, 3), x.sum(0)


@pytest.mark.parametrize("fn", [a_part, half])
def test_strided_and_expanded(fn):
    x = torch.randn(7, 65, 2, generator=torch.Generator().manual_seed(0))
    want, got = fn(x), fuse(fn)(x)
    assert [y.stride() for y in got] == [y.stride() for y in want]
    torch.testing.assert_close(got, want)
