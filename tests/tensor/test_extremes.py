"""Maxima that are compared with their elements: which are, and that none is taken in another order of factors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.algebra.derive import derive_fold
from tilefold.errors import NotFusibleError
from tilefold.tensor.analysis import Graph
from tilefold.tensor.extremes import is_exact
from tilefold.tensor.formula import cascade_of, lines_of
from tilefold.tensor.text import parse

FOUND = """program found()
  input x: f32[6, 8]
  dim i = 6
  dim j = 8
  dim k = 8
  m[i]: f32 = {reducer}[j] x[i, j]
  s[i]: {kind} = {then}
  out[i, k]: f32 = {body}
  return {returned}
"""


@pytest.mark.parametrize(
    ("how", "exact"),
    [
        ({}, False),  # a softmax
        ({"body": "where(x[i, k] == m[i], 1.0, 0.0)"}, True),
        ({"body": "where(x[i, k] < s[i], 0.0, x[i, k])"}, True),  # by way of a map
        ({"body": "where(x[i, k] < s[i], 0.0, x[i, k])", "then": "m[i] * 2.0"}, False),  # nobody's element
        ({"returned": "out, s"}, True),  # a backward compares it
        ({"returned": "out, s", "then": "m[i] * 2.0"}, False),
        ({"returned": "out, m", "reducer": "sum"}, False),
    ],
)
def test_what_is_compared_or_returned_is_exact(how, exact):
    usual = {"reducer": "max", "kind": "f32", "then": "-m[i]", "body": "exp(x[i, k] + s[i])", "returned": "out"}
    g = Graph.of(parse(FOUND.format(**{**usual, **how})))
    assert is_exact(g, g.by_name["m"]) is exact
    assert not is_exact(g, g.by_name["out"])


def test_a_factor_leaves_a_maximum_of_products_only_where_nothing_is_compared():
    c = cascade_of(lines_of("s = sum[l] x[l] * x[l]\nm = max[l] abs(x[l] * rsqrt(s + 1e-6) * w[l])"), {})
    assert [v.name for v in derive_fold(c).state][:2] == ["s", "m"]
    compared = replace(c, reductions=(c.reductions[0], replace(c.reductions[1], exact=True)))
    with pytest.raises(NotFusibleError, match="m is compared with its elements"):
        derive_fold(compared)


def test_a_factor_behind_all_others_leaves_a_maximum_that_is_compared():
    """Rounding is monotone: the largest of fl(x r) is fl(r max x)."""
    c = cascade_of(lines_of("s = sum[l] x[l] * x[l]\nm = max[l] abs(x[l] * w[l]) * rsqrt(s + 1e-6)"), {})
    compared = replace(c, reductions=(c.reductions[0], replace(c.reductions[1], exact=True)))
    assert derive_fold(compared).finish == derive_fold(c).finish


def _scaled(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def _counts(x, w):
    z = _scaled(x, w)
    return (z.abs() == z.abs().amax(-1, keepdim=True)).sum(-1), (z < z.topk(3).values[:, -1:]).sum(-1)


@pytest.mark.parametrize("columns", [130, 5000])
def test_elements_of_a_scaled_row_are_found(columns):
    x, w = torch.randn(37, columns), torch.randn(columns)
    largest, below = torch.compile(_counts, backend="tilefold")(x, w)
    assert largest.tolist() == [1] * 37
    assert below.tolist() == [columns - 3] * 37


def test_gradients_of_the_largest_of_a_scaled_row_are_finite():
    def largest(x, w):
        return _scaled(x, w).abs().amax(-1)

    x, w = torch.randn(37, 130), torch.randn(130)
    found = []
    for run, dtype in ((largest, torch.float64), (torch.compile(largest, backend="tilefold"), torch.float32)):
        leaves = [a.to(dtype).requires_grad_() for a in (x, w)]
        run(*leaves).sum().backward()
        found.append([a.grad for a in leaves])
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
