"""What is a matrix product, and what is not."""

from __future__ import annotations

import pytest

from tilefold.algebra.expr import Sym
from tilefold.tensor.index_simplify import const
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import library_product, product_of
from tilefold.tensor.text import parse

TEXT = """
program p(n)
  input a: f32[8, n, 6]
  input b: f32[8, 6, 7]
  input x: f32[n, 6]
  input i: i64[6]
  dim h = 8
  dim r = n
  dim c = 7
  dim k = 6
  y[{dims}]: f32 = sum[{rdims}] {body}
  return y
"""


SIZES = {"h": const(8), "r": Sym("n"), "c": const(7), "k": const(6)}


def statement(dims: str, rdims: str, body: str) -> Compute:
    (c,) = parse(TEXT.format(dims=dims, rdims=rdims, body=body)).body
    return c


def test_dims_are_sorted_by_the_factors_that_vary_with_them() -> None:
    p = product_of(statement("h, r, c", "k", "a[h, r, k] * b[h, k, c]"))
    assert p is not None and p.is_matrix() and p.whole
    assert (p.batch, p.rows, p.cols, p.depth) == (("h",), ("r",), ("c",), ("k",))
    assert p.of_one_side == {"r", "c"} and not p.shared


def test_heads_that_share_an_operand() -> None:
    c = statement("h, r, c", "k", "a[h, r, k] * b[h // 4, k, c]")
    p = product_of(c)
    assert p is not None and p.shared == {"h": 4} and p.batch == ("h",)
    assert p.packed() == (frozenset("hrk"), frozenset("kc"))
    assert library_product(c, SIZES) is not None
    assert library_product(c, {**SIZES, "h": const(6)}) is None  # the last group would have two heads
    assert library_product(c, {**SIZES, "h": Sym("n")}) is None


def test_only_one_operand_is_shared() -> None:
    c = statement("h, r, c", "k", "a[h // 2, r, k] * b[h // 2, k, c]")
    assert product_of(c) is not None and library_product(c, SIZES) is None


def test_a_library_takes_plain_operands() -> None:
    assert library_product(statement("h, r, c", "k", "a[h, r, k] * b[h, k, c]"), SIZES) is not None
    assert library_product(statement("r, c", "k", "x[r, k] * b[1, k, c]"), SIZES) is not None  # one place: a view
    dots = library_product(statement("h, r", "k", "a[h, r, k] * a[h, r, k]"), SIZES)
    assert dots is not None and not dots.is_matrix()


@pytest.mark.parametrize(
    ("dims", "rdims", "body"),
    [
        ("r, c", "k", "x[r, k] * b[r // 2, k, c]"),  # a place that is neither a dim's nor shared in a batch
        ("r, c", "k", "x[r, k] * b[1, i[k], c]"),  # an index that is loaded
        ("r, c", "h, k", "x[r, k] * b[h, k, c]"),  # a sum over one factor alone
    ],
)
def test_a_library_takes_nothing_else(dims: str, rdims: str, body: str) -> None:
    c = statement(dims, rdims, body)
    assert product_of(c) is not None and library_product(c, SIZES) is None


@pytest.mark.parametrize("body", ["x[r, k] + b[0, k, c]", "x[r, k] / b[0, k, c]", "exp(x[r, k])"])
def test_other_sums_are_no_products(body: str) -> None:
    assert product_of(statement("r, c", "k", body)) is None


def test_one_row_is_a_product_only_where_it_counts() -> None:
    p = product_of(statement("h, r, c", "k", "a[h, r, k] * b[h, k, c]"))
    assert p is not None and not p.is_matrix(lambda d: d != "r")


def test_loads_inside_indices_are_no_bare_operand() -> None:
    p = product_of(statement("r, c", "k", "x[r, i[k]] * b[0, k, c]"))
    assert p is not None and p.loads is None
