"""A sum for each tap of a window, and a map of them, are the same sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.plan.library import library_convolutions
from tilefold.tensor.interp import run
from tilefold.tensor.taps import taps_apart
from tilefold.tensor.text import parse

TEXT = """program f()
  input x: f32[2, 9, 7, 4]
  input dy: f32[2, 9, 6, 4]
  dim n = 2
  dim y = 9
  dim v = 6
  dim c = 4
  dim k = 3
  dim l = 2
  w[c, k, l]: f32 = sum[n, y, v] where((y + k - 1 >= 0) & (y + k - 1 < 9), x[n, y + k - 1, v + l, c], 0.0) * dy[n, y, v, c]
  out[c, k, l]: f32 = w[c, k, l] * 2.0
  return out
"""  # noqa: E501


@pytest.mark.parametrize("taps", [("k", "l"), ("l",)])
def test_each_tap_is_a_sum_without_its_dim(taps):
    p = parse(TEXT)
    q = taps_apart(p, {"w": taps})
    sums = [c for c in q.body if c.reducer == "sum"]
    assert len(sums) == (6 if len(taps) > 1 else 2) and all(set(c.dims).isdisjoint(taps) for c in sums)
    x, dy = (torch.randn(2, 9, n, 4, dtype=torch.float64) for n in (7, 6))
    x[0, 0, 0, 0] = float("inf")  # what padding discards must stay discarded
    torch.testing.assert_close(run(q, {"x": x, "dy": dy})["out"], run(p, {"x": x, "dy": dy})["out"], equal_nan=True)


def test_sums_of_one_tap_are_no_convolutions():
    """Nothing in them is used twice, though places are as many as a convolution with large taps would leave."""
    p = parse(TEXT)
    p = replace(p, body=tuple(replace(c, origin="aten.convolution_backward.default") for c in p.body))
    assert library_convolutions(p) == {"w"}
    assert library_convolutions(taps_apart(p, {"w": ("k", "l")})) == set()
