"""Complex arithmetic by real and imaginary parts, against torch's own."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.regions.assemble import compilations

HOW = {"runner": "interpreter", "leftover": "eager"}


def z(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.complex64)


def compiled(fn):
    torch._dynamo.reset()
    return torch.compile(fn, backend="tilefold", options=HOW)


def turned(x, turns):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).type_as(x)


def products(a, b, r):
    return a * b, a * r, a - 2j * b, a.conj() * b, -a, a * 2 + 1, (a * 1j).sum(0), torch.cat([a, a * 2]).mean(1)


def quotients(a, b, r):
    return a / b, r / a, 1 / a, a / 3, (a * 1j).abs(), torch.exp(a), torch.log(a), torch.sgn(a)


def others(a, b, r):
    made = torch.complex(r, r * 2) * torch.polar(r.abs(), r)
    return made, torch.where(r > 0, a * b, 0), (a * b).t(), (a + b).real, torch.view_as_real(a * b)[:, 1:]


@pytest.mark.parametrize("fn", [products, quotients, others])
@pytest.mark.parametrize("scale", [1.0, 1e-25])
def test_values(fn, scale):
    torch.manual_seed(0)
    given = z(3, 4), z(4) if fn is not others else z(3, 4), torch.randn(3, 1) if fn is not others else torch.randn(3, 4)
    given = (given[0] * scale, given[1] * scale, given[2]) if fn is quotients else given
    torch.testing.assert_close(compiled(fn)(*given), fn(*given), rtol=1e-5, atol=1e-6)


def test_sizes_that_are_extreme_neither_overflow_nor_vanish():
    a = torch.tensor([0j, complex("inf"), 1e38 + 1e38j, 3e-39 + 4e-39j, 1e-30 - 1e-30j])
    torch.testing.assert_close(compiled(torch.abs)(a), a.abs(), rtol=1e-5, atol=0.0)


def test_positions_that_turn_pairs_leave_nothing_to_others():
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    turns = torch.polar(torch.ones(5, 4), torch.randn(5, 4))
    run = compiled(turned)
    made = run(x, turns)
    dy = torch.randn_like(made)
    (ours,) = torch.autograd.grad(made, x, dy)
    want = turned(x, turns)
    torch.testing.assert_close(made, want)
    torch.testing.assert_close(ours, torch.autograd.grad(want, x, dy)[0])
    assert [(c.left, c.fallbacks, len(c.regions)) for c in list(compilations)[-2:]] == [(0, [], 1)] * 2


def test_gradients_of_complex_arguments():
    a, b = z(3, 4).requires_grad_(), z(3, 4).requires_grad_()

    def fn(a, b):
        return (a * b / (a + 2)).abs().sum() + (torch.fft.fft(a) * b).real.sum()

    ours = torch.autograd.grad(compiled(fn)(a, b), (a, b))
    torch.testing.assert_close(ours, torch.autograd.grad(fn(a, b), (a, b)), rtol=1e-4, atol=1e-5)


def test_views_alone_stay_complex():
    def fn(x):
        return torch.fft.rfft(x)[:, 1:].transpose(0, 1)

    x = torch.randn(3, 8)
    made = compiled(fn)(x)
    torch.testing.assert_close(made, fn(x))
    assert made.stride() == fn(x).stride()
