"""Values that a kernel reads at other positions of an axis than its loop is at: differences of neighbours, flips."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from tilefold.frontend.fuse import fuse


def differences(x, y, w):
    """A Lovasz loss weighs errors by differences of what is computed of two running sums."""
    z = 1 - x / (y.abs() + 1)
    return (torch.relu(y) * torch.cat([z[:, :1], z[:, 1:] - z[:, :-1]], 1)).sum(-1)


def of_differences(x, y, w):
    z = torch.tanh(x) * y
    d = torch.exp(z[:, 1:] - z[:, :-1])
    return (d[:, 1:] * d[:, :-1]).sum(-1)


def of_the_first(x, y, w):
    z = torch.exp(x) + y
    return (z / z[:, 3:4]).square().sum(-1)


def scores(x, w):
    return (x[:, None, :8] * w).sum(-1)


def neighbouring_scores(x, y, w):
    s = torch.tanh(scores(x, w))
    return (s * pad(s, (1, 0))[:, :-1]).sum(-1)


def flipped_scores(x, y, w):
    s = scores(x, w)
    return (s * s.flip(1)).sum(-1)


def scores_beside_one(x, y, w):
    s = scores(x, w)
    return (s * s[:, 3:4]).sum(-1)


@pytest.mark.parametrize(
    "fn", [differences, of_differences, of_the_first, neighbouring_scores, flipped_scores, scores_beside_one]
)
@pytest.mark.parametrize("n", [100, 5000])
@pytest.mark.parametrize("goal", ["fused", "fast"])
def test_other_positions_of_a_long_axis(fn, n, goal):
    torch.manual_seed(0)
    args = torch.randn(3, n), torch.randn(3, n), torch.randn(n, 8)
    exact = fn(*(a.double() for a in args))
    torch.testing.assert_close(
        fuse(fn, goal=goal)(*args), exact.float(), rtol=1e-5, atol=1e-6 * float(exact.abs().max())
    )
