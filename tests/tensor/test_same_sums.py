"""Reductions along whose result nothing varies."""

from __future__ import annotations

import torch

from tilefold.tensor.interp import run
from tilefold.tensor.same_sums import same_sums
from tilefold.tensor.text import parse

WEIGHED = """
program weighed()
  input x: f32[3, 7, 4]
  input w: f32[3, 7]
  dim i = 3
  dim k = 7
  dim c = 4
  s[c, i]: f32 = sum[k] w[i, k]
  m[i, c]: f32 = max[k] x[i, k, c]
  y[i, c]: f32 = m[i, c] / s[c, i]
  return y
"""


def test_they_are_computed_once_and_mean_the_same():
    p = parse(WEIGHED)
    after = same_sums(p)
    assert {c.name: c.dims for c in after.body} == {"s": ("i",), "m": ("i", "c"), "y": ("i", "c")}
    x = {"x": torch.randn(3, 7, 4), "w": torch.rand(3, 7) + 1}
    torch.testing.assert_close(run(after, x, exact=True)["y"], run(p, x, exact=True)["y"], rtol=0.0, atol=0.0)
    assert same_sums(after) is after


def test_what_the_program_gives_is_left():
    p = parse(WEIGHED.replace("return y", "return y, s"))
    assert same_sums(p) is p


def test_sums_of_numbers_are_added_again():
    """A kernel of its own for one number costs more."""
    p = parse(WEIGHED.replace("sum[k] w[i, k]", "sum[k] 1.0"))
    assert same_sums(p) is p
