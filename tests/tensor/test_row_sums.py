"""Sums of scores over everything are of rows first, where a product's kernel can make these."""

from __future__ import annotations

import pytest
import torch

from tilefold.tensor import interp
from tilefold.tensor.row_sums import sums_by_rows
from tilefold.tensor.text import parse

PROGRAM = """program gradient()
  input q: f32[3, 2, 7, 4]
  input k: f32[3, 2, 6, 4]
  input a: f32[2]
  dim i = 3
  dim h = 2
  dim j = 7
  dim l = 6
  dim m = 4
  s[i, h, j, l]: f32 = sum[m] q[i, h, j, m] * k[i, h, l, m]
  p[i, h, j, l]: f32 = where(l <= j, exp(s[i, h, j, l] * a[h] - 30.0), 0.0)
  {sums}
  d[i, h, j, l]: f32 = p[i, h, j, l] * 0.5
  x[i, h, j, m]: f32 = sum[l] d[i, h, j, l] * k[i, h, l, m]
  {other}
  return {results}
"""
WEIGHED = "e[i, h, j, m]: f32 = sum[l] p[i, h, j, l] * k[i, h, l, m]"
OTHER = "y[i, h, m, l]: f32 = sum[j] q[i, h, j, m] * d[i, h, j, l]"


def program(sums, other=OTHER, results="g, x, y"):
    return parse(PROGRAM.format(sums=sums, other=other, results=results))


@pytest.mark.parametrize(
    "sums",
    [
        "g[h]: f32 = sum[i, j, l] p[i, h, j, l] * (l - j)",
        "g[h]: f32 = sum[l, i, j] p[i, h, j, l]",
        "e[h, j, l]: f32 = sum[i] p[i, h, j, l]\n  g[h]: f32 = sum[j, l] e[h, j, l] * (l - j)",
        "e[h, l, j]: f32 = sum[i] p[i, h, j, l]\n  g[h]: f32 = sum[l, j] (l - j) * e[h, l, j]",
    ],
)
@pytest.mark.parametrize("scale", [1.0, 3e3])
def test_a_slopes_gradient_is_a_sum_a_row(sums, scale):
    p = program(sums)
    made = sums_by_rows(p)
    names = {c.name: c for c in made.body}
    assert names["g_rows"].rdims == ("l",) and names["g_rows"].dims == ("i", "h", "j") and "e" not in names
    gen = torch.Generator().manual_seed(0)
    x = {"q": torch.randn(3, 2, 7, 4, generator=gen) * scale, "k": torch.randn(3, 2, 6, 4, generator=gen)}
    x["a"] = torch.tensor([1.0, -0.5]) / scale
    found, want = interp.run(made, x, exact=True), interp.run(p, x, exact=True)
    torch.testing.assert_close(found["g"], want["g"], rtol=1e-12, atol=0)


def test_the_dim_that_fewer_products_contract_is_summed_first():
    """Here rows are contracted once, and keys by two products."""
    again = "y[i, h, j, m]: f32 = sum[l] p[i, h, j, l] * k[i, h, l, m]\n  "
    again += "z[i, h, m, l]: f32 = sum[j] q[i, h, j, m] * d[i, h, j, l]"
    p = program("g[h]: f32 = sum[i, j, l] p[i, h, j, l]", again, "g, x, y, z")
    assert next(c for c in sums_by_rows(p).body if c.name == "g_rows").rdims == ("j",)


@pytest.mark.parametrize(
    "sums, how",
    [
        ("g[h, j, l]: f32 = sum[i] p[i, h, j, l]", {}),  # nothing contracts a batch
        ("g[h]: bf16 = sum[i, j, l] p[i, h, j, l]", {}),
        ("g[i, h, j]: f32 = sum[l] p[i, h, j, l]", {}),  # is one a row
        ("g[m]: f32 = sum[i, h, j] q[i, h, j, m]", {}),  # of an argument
        (f"{WEIGHED}\n  g[i, j]: f32 = sum[h, m] e[i, h, j, m] * q[i, h, j, m]", {}),  # has a dim of its own
        ("e[h, j, l]: f32 = sum[i] p[i, h, j, l]\n  g[h]: f32 = sum[j, l] e[h, j, l]", {"results": "g, x, y, e"}),
    ],
)
def test_other_sums_stay(sums, how):
    p = program(sums, **how)
    assert sums_by_rows(p) == p
