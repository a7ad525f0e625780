"""Places of numbers in sorted boundaries, against eager: few and many, ties, NaN, none."""

from __future__ import annotations

import math

import pytest
import torch

from tests.frontend.check import check, lowered, randn
from tilefold import fuse
from tilefold.algebra.expr import Call, walk
from tilefold.errors import UnsupportedError


def edges(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sorted, with ties."""
    return ((randn(count) * 4).round() / 4).sort().values.to(dtype)


def numbers(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Some of them boundaries."""
    hostile = [math.inf, -math.inf, math.nan, 0.0, -0.0] if dtype.is_floating_point else [-100, 100]
    return torch.cat([(randn(58) * 4).round() / 4, torch.tensor(hostile)]).to(dtype)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 15, 16, 17, 18, 31, 32, 33, 100])
def test_lowering(count, right):
    b = edges(count)
    check(lambda x, b: torch.bucketize(x, b, right=right), numbers(), b, modes=(False,))
    low = check(
        lambda x, b: torch.searchsorted(b, x[:, None], out_int32=True, right=right), numbers(), b, modes=(False,)
    )
    assert not any(isinstance(n, Call) and n.op == "within" for c in low.program.body for n in walk(c.body))


def test_other_spellings_and_types():
    b, x = edges(20), numbers()
    check(lambda x, b: torch.searchsorted(b, x, side="right"), x, b, modes=(False,))
    check(lambda x, b: torch.searchsorted(b, x.view(9, 7)), x, b, modes=(False,))
    check(lambda x: torch.bucketize(x, torch.arange(0.0, 3.0, 0.1)), x, modes=(False,))
    for dtype in (torch.int64, torch.int32, torch.float64, torch.bfloat16):
        check(lambda x, b: torch.bucketize(x, b), numbers(dtype), edges(40, dtype), modes=(False,))
    with pytest.raises(UnsupportedError, match="several rows"):
        lowered(lambda x, b: torch.searchsorted(b, x), randn(3, 5), randn(3, 20).sort(-1).values)


@pytest.mark.parametrize(("count", "right"), [(0, False), (5, True), (100, False), (257, True)])
def test_kernels(count, right):
    def near(x, b):
        return torch.bucketize(x * 0.5, b, right=right) + 1

    b, x = edges(count), numbers() * 2
    assert torch.equal(fuse(near)(x, b), near(x, b))


def test_many_boundaries_are_planned_in_no_time_and_what_follows_is_joined():
    """Each step reads the place of the one before twice: written out they had been doubled by each."""

    def embedded(x, b, w):
        return w[torch.bucketize(x, b)] * 2

    b, w = torch.randn(70_000).sort().values, torch.randn(70_001, 3)
    run = fuse(embedded)
    assert torch.equal(run(b[::7] + 1e-4, b, w), embedded(b[::7] + 1e-4, b, w))
