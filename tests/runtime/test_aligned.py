"""Ragged extents of products are rounded up where that pays, and results are the same."""

from __future__ import annotations

import pytest
import torch

from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.plan.aligned import Ragged, rounded
from tilefold.plan.hardware import H200
from tilefold.plan.library_rates import Sizes
from tilefold.runtime.aligned import filled, product
from tilefold.runtime.library import LibraryStep

B = torch.bfloat16


@pytest.mark.parametrize(("n", "least"), [(0, 0), (1, 8), (8, 8), (50257, 50264)])
def test_extents_of_16_bits(n, least):
    assert rounded(n, 2) == least


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(5, 7), lambda: torch.randn(7, 5).t(), lambda: torch.randn(2, 5, 7)]
)
def test_zeros_are_behind_the_rows(make):
    x = make().to(B)
    y = filled(x, 8, 16)
    assert y.shape[-2:] == (8, 16) and torch.equal(y[..., :5, :7], x) and y.count_nonzero() == x.count_nonzero()
    assert (y.stride(-1) == 1) == (x.stride(-1) == 1) and filled(x, 5, 7) is x


@pytest.mark.parametrize(("rows", "depth", "columns"), [(5, 7, 9), (5, 8, 9), (5, 7, 16), (1, 1, 1)])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_are_those_of_the_operands(batch, rows, depth, columns):
    x, y = torch.randn(*batch, rows, depth).to(B), torch.randn(*batch, columns, depth).to(B).mT
    x[..., 0, 0] = torch.inf  # what is behind a row is 0, and not computed with what is before it
    out = product(x, y)
    torch.testing.assert_close(out, x @ y, equal_nan=True)
    assert out.stride(-2) == rounded(columns, 2)
    if not batch:
        bias = torch.randn(columns).to(B)
        torch.testing.assert_close(product(x, y, bias), x @ y + bias, equal_nan=True, rtol=2e-2, atol=2e-2)


def test_copies_have_to_save_more_than_they_cost():
    def pays(rows, depth, columns, packed=False):
        return Ragged(Sizes(1, rows, columns, depth), packed=packed).worth(H200)

    assert pays(4096, 2048, 50257) and pays(1000, 1023, 777) and pays(4096, 2048, 50257, packed=True)
    assert not pays(4096, 2048, 50264) and not pays(8, 1023, 777) and not pays(64, 65537, 777)


def steps_of(fn, *args):
    return compile_program(trace(fn, *args).program, device="interpreter").steps


def test_results_that_kernels_read_may_have_their_rows_apart():
    x, w, v = (torch.empty(s, dtype=B, device="meta") for s in ((4096, 2048), (2048, 1001), (1001, 1024)))
    torch._dynamo.mark_dynamic(w, 1)
    torch._dynamo.mark_dynamic(v, 0)
    p = trace(lambda x, w, v: torch.relu(x @ w) @ v, x, w, v, dynamic="auto").program
    first, _, last = compile_program(p, device="interpreter").steps
    (n,) = p.syms
    assert isinstance(first, LibraryStep) and first.apart and first.rows_apart({n: 1001}) == (1008, 1)
    assert isinstance(last, LibraryStep) and not last.apart and last.rows_apart({n: 1001}) is None  # the caller's


def test_no_bias_is_added_by_a_product_that_is_ragged():
    def fn(x, w, b, v):
        return torch.relu(torch.nn.functional.linear(x, w, b)) @ v

    def biased(n):
        args = (torch.randn(40, 24), torch.randn(n, 24), torch.randn(n), torch.randn(n, 16))
        steps = steps_of(fn, *(a.to(B) for a in args))
        return [len(s.members) for s in steps if isinstance(s, LibraryStep)]

    assert biased(40) == [2, 1] and biased(37) == [1, 1]


def test_no_bias_is_added_by_a_product_of_few_tiles_in_float32():
    """The library would cut its contraction, which a bias rules out."""

    def members(rows, depth, dtype=torch.float32):
        args = (torch.empty(s, dtype=dtype, device="meta") for s in ((rows, depth), (256, depth), (256,)))
        fn = lambda x, w, b: torch.tanh(torch.nn.functional.linear(x, w, b))  # noqa: E731
        return [len(s.members) for s in steps_of(fn, *args) if isinstance(s, LibraryStep)]

    assert members(256, 1024) == [1]
    assert members(256, 64) == members(16384, 1024) == members(256, 1024, B) == [2]
