"""A sum of two products of one operand is one product of a sum, where that moves less."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.fuse import trace
from tilefold.tensor.interp import run
from tilefold.tensor.product import product_of


def products(fn, *args):
    return [c for c in trace(fn, *args).program.body if product_of(c) is not None]


def interpreted(fn, *args):
    p = trace(fn, *args).program
    return run(p, {i.name: x for i, x in zip(p.inputs, args, strict=True)})[p.outputs[0]]


def of_dots(dz, x):
    """The gradient of x x^T, which x has twice."""
    return dz @ x + dz.mT @ x


def turned(dz, x):
    """The same as autograd writes it: the second as rows of the first operand."""
    return dz @ x + (x.mT @ dz).mT


def of_layers(x, a, b):
    return x @ a + x @ b + 1


@pytest.mark.parametrize("fn", [of_dots, turned])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_product_of_a_matrix_and_its_transpose(fn, dtype):
    gen = torch.Generator().manual_seed(0)
    dz, x = (torch.randn(shape, generator=gen).to(dtype) for shape in ((5, 27, 27), (5, 27, 64)))
    assert len(products(fn, dz, x)) == 1
    torch.testing.assert_close(interpreted(fn, dz, x), fn(dz.double(), x.double()).to(dtype), rtol=2e-2, atol=0.15)


def test_one_product_of_two_layers():
    gen = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(shape, generator=gen) for shape in ((256, 24), (24, 40), (24, 40)))
    assert len(products(of_layers, x, a, b)) == 1
    torch.testing.assert_close(interpreted(of_layers, x, a, b), of_layers(x, a, b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "fn",
    [
        lambda dz, x: dz @ x + dz.mT @ (2 * x),
        lambda dz, x: (dz @ x + dz.mT @ x, dz @ x),
        lambda dz, x: dz @ x - dz.mT @ x,
        lambda dz, x: dz @ x[..., :8] + dz.mT @ x[..., :8],
        lambda dz, x: (dz.half() @ x.half()) + (dz.half().mT @ x.half()),
        lambda dz, x: (dz @ x).relu() + dz.mT @ x,
    ],
    ids=["other operands", "a result", "a difference", "few columns", "float16", "a map between"],
)
def test_other_sums_stay(fn):
    dz, x = torch.empty(5, 27, 27), torch.empty(5, 27, 64)
    assert len(products(fn, dz, x)) == 2


def test_the_product_is_what_was_the_sum():
    """No copy is left of a sum that was a statement of its own."""
    dz, x = torch.empty(5, 27, 27), torch.empty(5, 27, 64)
    for fn in (of_dots, turned):
        assert [c.reducer for c in trace(fn, dz, x).program.body] == [None, "sum"]
