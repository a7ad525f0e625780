"""In which order both operands of a product take what is summed."""

from __future__ import annotations

import pytest

from tilefold.plan.library import Matrices
from tilefold.tensor.product import library_product
from tilefold.tensor.text import parse

TEXT = """program f()
  input x: f32[{rows}, 7, 7, 16]
  input w: f32[{cols}, 16, 7, 7]
  dim n = {rows}
  dim o = {cols}
  dim c = 16
  dim y = 7
  dim v = 7
  out[n, o]: f32 = sum[c, y, v] x[n, y, v, c] * w[o, c, y, v]
  return out
"""


@pytest.mark.parametrize(("rows", "cols", "order"), [(8, 4096, "cyv"), (4096, 8, "yvc"), (64, 64, "yvc")])
def test_the_smaller_operand_is_turned(rows, cols, order):
    p = parse(TEXT.format(rows=rows, cols=cols))
    found = library_product(p.body[0], p.sizes)
    assert found is not None and found.loads is not None
    assert Matrices.of(found, found.loads[0], p.sizes).depth == tuple(order)
