"""Operands of products are stored as the products read them."""

from __future__ import annotations

import pytest
import torch

from tilefold.algebra.dtypes import DType
from tilefold.tensor.interp import run
from tilefold.tensor.operands import plain_operands
from tilefold.tensor.product import library_product
from tilefold.tensor.text import parse

TEXT = """
program p()
  input t: i64[9]
  input w: bf16[6, 8]
  dim i = 9
  dim k = 6
  dim j = 8
  s[i, k]: i64 = i64(t[i] == k) * 3
  {other}
  y[i, j]: bf16 = sum[k] bf16(s[i, k]) * w[k, j]
  return {results}
"""


def made(other: str = "", results: str = "y"):
    return parse(TEXT.format(other=other, results=results))


def test_integers_that_are_only_read_rounded_are_stored_so() -> None:
    p = made()
    q = plain_operands(p)
    assert q.dtype_of("s") is DType.BF16
    assert library_product(p.body[-1], p.sizes) is None and library_product(q.body[-1], q.sizes) is not None
    for t in (torch.randint(0, 6, (9,)), torch.tensor([-1, 6, 99, 0, 5, -7, 2, 2, 3])):  # also of no row
        inputs = {"t": t, "w": torch.randn(6, 8).bfloat16()}
        torch.testing.assert_close(run(q, inputs)["y"], run(p, inputs)["y"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("other", "results"),
    [
        ("", "y, s"),  # a result of the program
        ("z[i]: i64 = sum[k] s[i, k]", "y, z"),  # a reader that takes it whole
        ("z[i]: f32 = sum[k] f16(s[i, k])", "y, z"),  # readers of two types
    ],
)
def test_integers_that_somebody_reads_whole_stay(other: str, results: str) -> None:
    assert plain_operands(made(other, results)).dtype_of("s") is DType.I64
