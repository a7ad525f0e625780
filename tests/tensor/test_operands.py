"""Operands of products that are read at computed positions are stored plainly first, where that pays."""

from __future__ import annotations

import pytest
import torch

from tilefold.tensor.interp import run
from tilefold.tensor.operands import stored_operands
from tilefold.tensor.product import library_product
from tilefold.tensor.text import parse

TEXT = """program f()
  input x: {kind}[4, {rows}, 8]
  input w: {kind}[8, 5]
  dim b = 4
  dim i = 6
  dim k = 8
  dim o = 5
  out[b, i, o]: {kind} = sum[k] x[{at}] * w[k, o]
  return out
"""


def program(at: str, kind: str = "f32", rows: int = 6):
    return parse(TEXT.format(at=at, kind=kind, rows=rows))


def test_shifted_rows_are_stored_and_then_a_product_of_the_library():
    p = program("b, (i + 2) % 6, k")
    q = stored_operands(p)
    copy, product = q.body
    assert copy.reducer is None and copy.dims == ("b", "i", "k")
    assert library_product(p.body[0], p.sizes) is None and library_product(product, q.sizes) is not None
    gen = torch.Generator().manual_seed(0)
    given = {"x": torch.randn(4, 6, 8, generator=gen), "w": torch.randn(8, 5, generator=gen)}
    torch.testing.assert_close(run(q, given)["out"], given["x"].roll(-2, 1) @ given["w"])


@pytest.mark.parametrize(
    ("at", "kind", "rows"),
    [
        ("b, i, k", "f32", 6),  # plain
        ("b // 2, i, k", "f32", 6),  # heads that share
        ("b, (i + 2) % 6, k", "bf16", 6),  # matrix units take it where it is
        ("b, (i + 2) % 6, k", "f32", 3),  # more is read than there is
    ],
)
def test_what_stays_as_it_is(at, kind, rows):
    p = program(at, kind, rows)
    assert stored_operands(p) is p


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_matrix_of_nothing_is_stored_in_the_other_operands_type(kind):
    text = TEXT.replace(" * w[k, o]", " * where(k == o, 1.0, 0.0)").replace("  input w: {kind}[8, 5]\n", "")
    p = parse(text.format(at="b, i, k", kind=kind, rows=6))
    constant, product = (q := stored_operands(p)).body
    assert constant.dtype is product.dtype and library_product(product, q.sizes) is not None
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)).to(constant.dtype.torch_dtype)
    torch.testing.assert_close(run(q, {"x": x})["out"], x[..., :5])
