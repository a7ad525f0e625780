"""Sums of sums are one sum, unless rows are folds or products."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.fuse import trace
from tilefold.tensor.interp import run


def sums(fn, *args):
    return [c for c in trace(fn, *args).program.body if c.reducer is not None]


JOINED = {
    "means": lambda x, y: x.sin().mean(2).mean(1),
    "three": lambda x, y: (x - y).square().mean(2).sum(1).mean(0),
    "of pairs": lambda x, y: (x[:, :, None] - y[:, None, :]).abs().mean(-1).sum(2).sum(1),
    "dot products": lambda x, y: (x * y).sum(-1).sum(-1),
    "of the first": lambda x, y: (x.exp().sum(-1) / y[0, 0, 0]).sum(-1),
}
KEPT = {
    "a result": lambda x, y: (x.sum(-1), x.sum(-1).sum(-1)),
    "read twice": lambda x, y: (lambda s: s.sum(-1) + s.amax(-1))(x.sum(-1)),
    "weighed": lambda x, y: (x.sum(-1) * y[:, :, 0]).sum(-1),
    "a softmax of rows": lambda x, y: (x.softmax(-1) * y).sum(-1).sum(-1),
    "products": lambda x, y: (x @ y.mT).sum(-1),
    "of squares": lambda x, y: x.sum(-1).square().sum(-1),
    "of maxima": lambda x, y: x.amax(-1).sum(-1),
}


@pytest.fixture
def args():
    gen = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, 7, generator=gen), torch.randn(3, 5, 7, generator=gen)


@pytest.mark.parametrize("fn", JOINED.values(), ids=JOINED)
def test_sums_of_sums_are_one(fn, args):
    assert len(sums(fn, *args)) == 1
    p = trace(fn, *args).program
    named = dict(zip(("x", "y"), args, strict=True))
    found = run(p, {i.name: named[i.name].reshape([int(s.value) for s in i.shape]) for i in p.inputs})[p.outputs[0]]
    torch.testing.assert_close(found.reshape(-1), fn(*args).reshape(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fn", KEPT.values(), ids=KEPT)
def test_others_stay(fn, args):
    assert len(sums(fn, *args)) >= 2


def test_nothing_summed_is_nothing(args):
    for empty in (torch.empty(3, 0, 7), torch.empty(3, 5, 0)):
        p = trace(lambda x: x.exp().sum(-1).sum(-1), empty).program
        found = run(p, {i.name: empty for i in p.inputs})[p.outputs[0]]
        assert found.tolist() == [0.0, 0.0, 0.0]
