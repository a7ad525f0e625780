"""Rows of matrices that begin at multiples of 16 bytes."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.test_library import step_of
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.plan.hardware import H200
from tilefold.runtime.aligned import apart, copied, empty_apart, fits, worth
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.steps import GpuStep
from tilefold.tensor.text import parse

B = torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "dtype", "strides"),
    [
        ((3, 7), B, (8, 1)),
        ((2, 3, 50257), B, (3 * 50264, 50264, 1)),
        ((3, 7), torch.float32, (8, 1)),
        ((3, 8), B, None),
        ((7,), B, None),
        ((0, 7), B, (8, 1)),
    ],
)
def test_strides(shape, dtype, strides):
    assert apart(shape, dtype.itemsize) == strides
    x = empty_apart(shape, dtype, device=None)
    assert x.shape == shape and fits(x) and (strides is None or x.stride() == strides)


def test_what_fits():
    x = torch.randn(6, 16).to(B)
    assert fits(x) and fits(x.t()) and fits(x[:, :7]) and fits(x[:, 8:]) and fits(torch.randn(1, 7).to(B))
    assert not fits(x[:, 1:]) and not fits(torch.randn(6, 7).to(B)) and not fits(torch.randn(6, 7).to(B).t())
    assert not fits(torch.randn(2, 3, 7).to(B))


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(5, 7), lambda: torch.randn(7, 5).t(), lambda: torch.randn(2, 3, 5)]
)
def test_copies_are_equal_and_fit(make):
    x = make().to(B)
    y = copied(x)
    assert fits(y) and torch.equal(x, y) and (y.stride(-1) == 1) == (x.stride(-1) == 1)


def test_a_copy_has_to_save_more_than_it_costs():
    assert worth(1e12, (1 << 20,), H200)
    assert not worth(1e7, (1 << 20,), H200) and not worth(1e9, (1 << 30,), H200)


def steps_of(fn, *args):
    return compile_program(trace(fn, *args).program, device="interpreter").steps


def test_results_between_steps_have_their_rows_apart():
    x, w, v = torch.randn(40, 24).to(B), torch.randn(24, 37).to(B), torch.randn(37, 16).to(B)
    steps = steps_of(lambda x, w, v: torch.relu(x @ w) @ v, x, w, v)
    first, between, last = steps
    assert isinstance(first, LibraryStep) and first.apart and isinstance(between, GpuStep) and between.apart
    assert isinstance(last, LibraryStep) and not last.apart  # the caller's


def test_results_of_callers_and_of_views_are_packed():
    x, w, v = torch.randn(40, 24).to(B), torch.randn(24, 37).to(B), torch.randn(40, 37, 16).to(B)
    steps = steps_of(lambda x, w: x @ w, x, w)
    assert not any(s.apart for s in steps if isinstance(s, LibraryStep | GpuStep))
    # rows of two axes, the last of which is the ragged one, are flattened: a matrix no more where they are apart
    steps = steps_of(lambda x, w, v: torch.relu(x @ w).flatten() @ v.flatten(0, 1), x, w, v)
    assert not any(s.apart for s in steps if isinstance(s, GpuStep))


def test_no_bias_is_added_by_a_product_that_is_ragged():
    def fn(x, w, b, v):
        return torch.relu(torch.nn.functional.linear(x, w, b)) @ v

    def biased(n):
        args = (torch.randn(40, 24), torch.randn(n, 24), torch.randn(n), torch.randn(n, 16))
        steps = steps_of(fn, *(a.to(B) for a in args))
        return [len(s.members) for s in steps if isinstance(s, LibraryStep)]

    assert biased(40) == [2, 1] and biased(37) == [1, 1]


def test_products_into_rows_apart_are_right():
    step = step_of(
        parse(
            "program p()\n  input a: bf16[5, 8]\n  input b: bf16[8, 7]\n  dim r = 5\n  dim c = 7\n  dim k = 8\n"
            "  y[r, c]: bf16 = sum[k] a[r, k] * b[k, c]\n  return y\n"
        )
    )
    a, b = torch.randn(5, 8).to(B), torch.randn(8, 7).to(B)
    for rows_apart in (False, True):
        step.apart = rows_apart
        tensors = {"a": a, "b": b}
        step.run(tensors, {})
        assert torch.equal(tensors["y"], a @ b) and tensors["y"].stride() == ((8, 1) if rows_apart else (7, 1))


def test_no_bias_is_added_by_a_product_of_few_tiles_in_float32():
    """The library would cut its contraction, which a bias rules out."""

    def members(rows, depth, dtype=torch.float32):
        args = (torch.empty(s, dtype=dtype, device="meta") for s in ((rows, depth), (256, depth), (256,)))
        fn = lambda x, w, b: torch.tanh(torch.nn.functional.linear(x, w, b))  # noqa: E731
        return [len(s.members) for s in steps_of(fn, *args) if isinstance(s, LibraryStep)]

    assert members(256, 1024) == [1]
    assert members(256, 64) == members(16384, 1024) == members(256, 1024, B) == [2]
