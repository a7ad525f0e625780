"""Distances of pairs in any norm and their gradients, against eager's in float64; nothing of them is left to others."""

from __future__ import annotations

import math

import pytest
import torch

from tilefold.frontend.capture.distances import distances, gradient
from tilefold.frontend.regions.assemble import compilations

aten = torch.ops.aten
NORMS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf]


def points(*shapes, seed=0):
    gen = torch.Generator().manual_seed(seed)
    found = [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
    found[1][..., 0, :] = found[0][..., 0, :]  # the same point
    return found


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize(("a", "b"), [((5, 3), (4, 3)), ((2, 5, 1), (2, 7, 1)), ((4, 6), (2, 3, 5, 6))])
def test_they_are_torchs(p, a, b):
    x, y = points(a, b)
    want = aten._cdist_forward(x, y, p, None)
    torch.testing.assert_close(distances(x, y, p, None), want)
    dy = torch.randn_like(want)
    torch.testing.assert_close(gradient(dy, x, y, p, want), aten._cdist_backward(dy, x, y, p, want))
    back, turned = dy.mT.contiguous(), want.mT.contiguous()
    torch.testing.assert_close(gradient(back, y, x, p, turned), aten._cdist_backward(back, y, x, p, turned))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_they_are_covered_with_their_gradients(p):
    x, y = (t.float() for t in points((9, 3), (2, 7, 3)))
    torch._dynamo.reset()
    compilations.clear()

    def f(x, y):
        return torch.cdist(x, y, p=p).sin()

    grads = []
    for fn in (torch.compile(f, backend="tilefold"), f):
        given = x.clone().requires_grad_(), y.clone().requires_grad_()
        made = fn(*given)
        grads.append((made.detach(), *torch.autograd.grad(made.square().sum(), given)))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)
    assert [f for c in compilations for f in c.fallbacks] == []


def test_of_no_points_and_no_coordinates_they_are_torchs():
    for a, b in (((0, 3), (4, 3)), ((5, 3), (0, 3)), ((5, 0), (4, 0))):
        x, y = torch.randn(a), torch.randn(b)
        torch._dynamo.reset()
        made = torch.compile(lambda x, y: torch.cdist(x, y, p=1.0) + 1, backend="tilefold")(x, y)
        assert torch.equal(made, torch.cdist(x, y, p=1.0) + 1)
