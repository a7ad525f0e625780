"""Block programs as tile kernels: what becomes a contraction of two operands, and what stays a sum."""

from __future__ import annotations

import pytest

from tilefold.plan.greedy import fuse
from tilefold.tensor.text import parse
from tilefold.tile import ir
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.verify import verify

WINDOWS = """
program windows()
  input x: f32[4, 4, 8]
  dim i = 16
  dim j = 16
  dim d = 8
  s[i, j]: f32 = sum[d] x[{i}, d] * x[{j}, d]
  return s
"""


def statements(body) -> list[ir.Stmt]:
    return [x for s in body for x in ((s, *statements(s.body)) if isinstance(s, ir.For) else (s,))]


@pytest.mark.parametrize(
    ("i", "j", "gemm"), [("0, i // 4", "0, j // 4", True), ("i // 4, i % 4", "j // 4, j % 4", False)]
)
def test_a_dim_in_two_axes_of_an_operand_is_no_contraction(i, j, gemm):
    """Windows of pixels: their rows and columns both follow from the pixel's number."""
    (k,) = fuse(parse(WINDOWS.format(i=i, j=j))).kernels
    found = statements(verify(lower(k.block, LowerOptions(arranged=False))).body)
    assert any(isinstance(s, ir.Gemm) for s in found) is gemm
    assert any(isinstance(s, ir.Reduce) for s in found) is not gemm


REPEATED = """
program repeated()
  input q: f32[5, 8]
  input w: f32[6, 8]
  input z: f32[6, 8, 3]
  dim b = 2
  dim i = 5
  dim j = 6
  dim d = 8
  dim e = 3
  s[b, i, j]: f32 = sum[{over}] q[i, d] * {other}
  return s
"""


@pytest.mark.parametrize(("over", "other"), [("d", "w[j, d]"), ("d, e", "z[j, d, e]")])
def test_what_is_repeated_or_summed_in_one_factor_alone_is_no_contraction(over, other):
    (k,) = fuse(parse(REPEATED.format(over=over, other=other))).kernels
    found = statements(verify(lower(k.block, LowerOptions(arranged=False))).body)
    assert not any(isinstance(s, ir.Gemm) for s in found)
