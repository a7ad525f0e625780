"""Functions of statistics against eager's in float64: from small to large, of both signs, and no numbers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.frontend.check import check, check_backward, compiled, randn
from tilefold import fuse

S = torch.special
FUNCTIONS = [torch.erfc, S.erfcx]
#: Places of float32 and of float64.
CLOSE = {torch.float32: 5e-7, torch.float64: 3e-15}


def numbers(dtype: torch.dtype) -> torch.Tensor:
    near, small = torch.linspace(-12, 12, 4001), torch.logspace(-30, 1, 400)
    return torch.cat([near, small, -small]).to(dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_right_relatively(fn, dtype):
    """At most twice as far off as eager, or a few units in the last place."""
    x = numbers(dtype)
    want = fn(x.double())
    normal = want.abs() > torch.finfo(dtype).tiny
    with torch.no_grad():
        got = compiled(lambda x: fn(x), False, [])(x).double()
    error = ((got - want).abs() / want.abs())[normal].max()
    eager = ((fn(x).double() - want).abs() / want.abs())[normal].max()
    assert error <= max(2 * eager, CLOSE[dtype])


@pytest.mark.parametrize("fn", [*FUNCTIONS, S.log_ndtr], ids=lambda f: f.__name__)
def test_hostile_numbers_and_gradients(fn):
    hostile = torch.tensor([0.0, -0.0, 30.0, -30.0, 1e-30, -1e30, 1e30, math.inf, -math.inf, math.nan])
    check(lambda x: fn(x), hostile, tol=1e-6, modes=(False,))
    check(lambda x: fn(x), torch.arange(-3, 4), tol=1e-6, modes=(False,))
    check_backward(lambda x: fn(x), randn(3, 5))


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_kernels(fn):
    x = numbers(torch.float32)
    want = (fn(x.double()) * 2).float()
    torch.testing.assert_close(fuse(lambda x: fn(x) * 2)(x), want, rtol=2e-6, atol=1e-37)
