"""Differences of sums become sums of differences, which are as exact as what is left of them."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.fuse import trace
from tilefold.tensor.interp import run

TOKENS = 512


def likelier(a, b):
    """How much likelier: log-probabilities of tokens, [B, S] each."""
    return a.sum(-1) - b.sum(-1)


def reduced(fn, *args):
    return [c for c in trace(fn, *args).program.body if c.reducer == "sum"]


def test_one_sum_whose_error_is_of_the_difference():
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, TOKENS, generator=gen) - 11 for _ in range(2))
    found = trace(likelier, a, b).program
    assert len(reduced(likelier, a, b)) == 1
    want = likelier(a.double(), b.double())
    made = run(found, {i.name: x for i, x in zip(found.inputs, (a, b), strict=True)})[found.outputs[0]]
    assert (made.double() - want).abs().max() <= TOKENS * 2**-24 * (a - b).abs().max()


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: (a.sum(-1) - b.sum(-1), a.sum(-1)),
        lambda a, b: a.sum(-1) - 2 * b.sum(-1),
        lambda a, b: a.sum(-1) - b.amax(-1),
        lambda a, b: a.sum(-1) - b[:, :40].sum(-1),
        lambda a, b: (a.sum(-1) - b.sum(-1)) * a.sum(-1),
        lambda a, b: a @ a.mT - b @ b.mT,
    ],
    ids=["a result", "scaled", "a maximum", "of fewer", "read elsewhere", "products"],
)
def test_sums_that_are_more_than_a_difference_stay(fn):
    a = torch.empty(64, TOKENS)
    kept = [c for c in trace(fn, a, a.clone()).program.body if c.reducer is not None]
    assert len(kept) == 2


def test_the_difference_of_infinite_sums_is_none():
    a = torch.tensor([[torch.inf, 0.0], [torch.inf, 0.0], [1.0, 2.0]])
    b = torch.tensor([[0.0, torch.inf], [0.0, 1.0], [3.0, 4.0]])
    p = trace(likelier, a, b).program
    found = run(p, {i.name: x for i, x in zip(p.inputs, (a, b), strict=True)})[p.outputs[0]]
    torch.testing.assert_close(found, torch.tensor([torch.nan, torch.inf, -4.0]), equal_nan=True)
