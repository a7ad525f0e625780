"""Dropout cuts no region: its masks are drawn before, in forward and backward the same, and with eager's rates."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tilefold.frontend import torch_compile
from tilefold.frontend.regions import assemble as regions


def compiled(fn):
    torch._dynamo.reset()
    regions.compilations.clear()
    return torch.compile(fn, backend=torch_compile.backend)


def test_a_network_with_dropout_is_one_region_each_way():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.25), nn.LayerNorm(16), nn.Dropout(0.5)).train()
    x = torch.randn(4, 8, requires_grad=True)
    compiled(model)(x).sum().backward()
    forward, backward = regions.compilations
    assert len(forward.regions) == len(backward.regions) == 1 and not backward.fallbacks
    assert {f.node for f in forward.fallbacks} == {"aten.bernoulli.p"}


@pytest.mark.parametrize("p", [0.25, 0.9])
def test_gradients_use_the_mask_of_the_forward(p):
    x = torch.randn(64, 96, requires_grad=True)
    y = compiled(lambda v: F.dropout(v.exp(), p))(x)
    y.sum().backward()
    kept = y != 0
    share = kept.double().mean().item()
    assert abs(share - (1 - p)) < 5 * (p * (1 - p) / y.numel()) ** 0.5  # five standard deviations
    torch.testing.assert_close(y, torch.where(kept, x.exp() / (1 - p), 0.0))
    torch.testing.assert_close(x.grad, torch.where(kept, x.exp() / (1 - p), 0.0))


def test_numbers_are_fresh_and_the_seed_s():
    f = compiled(lambda v: F.dropout(v + 1, 0.5))
    x = torch.ones(32, 32)
    with torch.no_grad():
        torch.manual_seed(1)
        first, second = f(x), f(x)
        torch.manual_seed(1)
        assert torch.equal(f(x), first) and not torch.equal(first, second)


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False), (1.0, True)])
def test_edges(p, train):
    x = torch.randn(5, 7)
    with torch.no_grad():
        got = compiled(lambda v: F.dropout(v * 2, p, training=train))(x)
    torch.testing.assert_close(got, F.dropout(x * 2, p, training=train))
