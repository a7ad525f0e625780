"""The interpreter as what runs a region."""

from __future__ import annotations

import pytest
import torch

from tests.frontend.check import check, lowered, randn
from tilefold.frontend.regions.execute import interpreted
from tilefold.tensor.text import parse


def test_results_are_never_the_arguments():
    p = parse("program p()\n  input x: f32[3]\n  dim i = 3\n  y[i]: f32 = x[i]\n  return y\n")
    x = torch.ones(3)
    interpreted(p)({"x": x}, {})["y"].zero_()
    assert torch.equal(x, torch.ones(3))


@pytest.mark.parametrize(
    ("fn", "stored"),
    [
        (lambda x: x.exp()[:, :-1], 1),
        (lambda x: x.exp()[1:, 2:7], 1),
        (lambda x: (x.exp()[:, :-1], x.sin()[:, 1:]), 2),
        (lambda x: x.exp().chunk(3, -1), 1),
        (lambda x: (lambda y: (y[:, :-1], y[:, 1:], y))(x.exp()), 1),
        (lambda x: torch.softmax(x, -1).mT[1:, :3], 1),
        (lambda x: x.exp().view(6, 3, 4)[..., 1:], 1),
    ],
)
def test_results_with_gaps_are_parts_of_what_eager_has(fn, stored):
    """One tensor is stored, whatever is shown of it: nothing is copied into strides."""
    x = randn(6, 12)
    check(fn, x)
    found = lowered(fn, x)
    assert len(found.program.outputs) == stored and not any(o.gaps for o in found.outputs)


def test_small_parts_and_views_of_arguments_are_copied():
    for fn in (lambda x: x.exp()[:, :2], lambda x: x[:, 1:]):
        found = lowered(fn, randn(6, 12))
        assert all(o.offset is None for o in found.outputs)
        check(fn, randn(6, 12))
