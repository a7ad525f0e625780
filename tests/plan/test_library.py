"""Which products are a CPU library's."""

from __future__ import annotations

import pytest

from tilefold.plan.library import library_products
from tilefold.plan.machine import nominal
from tilefold.tensor.text import parse

TEXT = """program f()
  input x: f32[512, 4096]
  input w: f32[{shape}]
  dim n = 512
  dim o = 512
  dim c = 4096
  out[{dims}]: f32 = sum[c] x[n, c] * w[{index}]
  return out
"""


@pytest.mark.parametrize(
    ("dims", "index", "shape", "calls"),
    [
        ("n, o", "o, c", "512, 4096", {"out"}),
        ("n", "n, c", "512, 4096", set()),  # dot products of rows: nothing is used twice
    ],
)
def test_only_what_is_used_twice_is_worth_a_call(dims: str, index: str, shape: str, calls: set[str]) -> None:
    p = parse(TEXT.format(dims=dims, index=index, shape=shape))
    assert library_products(p, nominal()) == calls
