"""What a chain of writes did not write is read where it was at first."""

from __future__ import annotations

import pytest
import torch

from tilefold.algebra.expr import Load, walk
from tilefold.tensor.inline import inline
from tilefold.tensor.interp import run
from tilefold.tensor.read_through import read_through
from tilefold.tensor.text import parse

CHAIN = """program chain()
  input x: f32[3, 5]
  input v: f32[3, 5]
  dim i = 3
  dim j = 5
  a[i, j]: {dtype} = where((i >= 0) & (i < 1), v[i, j] * 2.0, x[i, j])
  b[j]: f32 = where(j >= 1, exp(v[1, j]), a[{read}, j])
  c[i, j]: f32 = where((i >= 1) & (i < 2), b[j], a[i, j])
  d[j]: f32 = where(j >= 2, exp(v[2, j]), c[2, j])
  y[i, j]: f32 = where((i >= 2) & (i < 3), d[j], c[i, j])
  return y
"""


@pytest.mark.parametrize("read", ["1", "0 + 1"], ids=["of a tensor", "of a slice"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_row_that_is_not_written_yet_is_the_first_tensor_s(dtype, read):
    p = parse(CHAIN.format(dtype=dtype, read=read))
    q = read_through(p)
    readers = {ld.tensor for c in q.body if c.name in "bd" for ld in walk(c.body) if isinstance(ld, Load)}
    assert readers == {"x", "v"}
    assert len(inline(q).body) < len(inline(p).body)
    given = {"x": torch.randn(3, 5), "v": torch.randn(3, 5)}
    torch.testing.assert_close(run(q, given)["y"], run(p, given)["y"], rtol=1e-6 if dtype == "f32" else 4e-3, atol=1e-6)


@pytest.mark.parametrize("read", ["0", "j % 3"], ids=["what is computed", "what no number decides"])
def test_others_are_read_where_they_are(read):
    p = parse(CHAIN.format(dtype="f32", read=read))
    (b,) = [c for c in read_through(p).body if c.name == "b"]
    assert "a" in {ld.tensor for ld in walk(b.body) if isinstance(ld, Load)}
