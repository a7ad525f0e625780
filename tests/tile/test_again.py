"""Values computed again instead of kept: the same results in float64, and only what may be."""

from __future__ import annotations

import torch

from tilefold.tile import ir
from tilefold.tile.again import recomputed
from tilefold.tile.interp import run_kernel
from tilefold.tile.text import parse
from tilefold.tile.verify import verify

ROW = """
kernel row(R, C)
  dim i = R
  dim j = C
  in x: f32[R, C]
  out y: f32[R, C]
  grid i:1
    alloc m: f32[i:1] tile
    alloc e: f32[i:1, j:C] tile
    alloc t: f32[i:1] tile
    fill m = -inf
    m max= over j: x[i, j]
    e = {e}
    t = sum over j: e[i, j]
    {then}
    store y[i, j] over i, j = e[i, j] / t[i]
"""


def kernel(e: str, then: str = "fill t = 2.0") -> ir.Kernel:
    return verify(parse(ROW.format(e=e, then=then)))


def held(k: ir.Kernel) -> set[str]:
    return {s.buffer.name for s in k.body if isinstance(s, ir.Alloc)}


def run(k: ir.Kernel, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    run_kernel(k, {"x": x, "y": y}, {"R": x.shape[0], "C": x.shape[1]})
    return y


def test_a_cheap_value_is_computed_where_it_is_read():
    k = kernel("exp(x[i, j] - m[i])")
    again = verify(recomputed(k, ["j"]))
    assert held(again) == {"m", "t"}
    for x in (torch.randn(3, 17), torch.full((2, 5), -torch.inf), torch.tensor([[1e4, -1e4, 1e4]])):
        torch.testing.assert_close(run(again, x), run(k, x), rtol=0, atol=0, equal_nan=True)


def test_what_may_not_be_computed_again_is_kept():
    assert held(recomputed(kernel("exp(exp(x[i, j] - m[i]))"), ["j"])) == {"m", "e", "t"}  # too dear
    assert held(recomputed(kernel("exp(x[i, j] - m[i])"), ["i2"])) == {"m", "e", "t"}  # of other dims
    for then in ("fill m = 3.0", "m max= over j: x[i, j] * 2.0", "e = e[i, j] + 1.0"):  # written afterwards
        k = kernel("exp(x[i, j] - m[i])", then)
        assert recomputed(k, ["j"]) == k, then
