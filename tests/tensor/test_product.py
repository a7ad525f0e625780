"""What is a matrix product, and what is not."""

from __future__ import annotations

import pytest

from tilefold.algebra.expr import Sym
from tilefold.tensor.index_simplify import const
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import library_product, product_of, spread, spread_order
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


SPREAD = """
program p()
  input x: f32[{n}, 6]
  input a: f32[{shape}]
  dim e = 4
  dim n = {n}
  dim f = {f}
  dim c = 6
  dim d = 5
  y[{dims}]: f32 = sum[{rdims}] x[n, c] * a[{index}]
  return y
"""


@pytest.mark.parametrize(
    ("dims", "index", "sizes", "batch", "order"),
    [
        ("e, n, f", "e, c, f", (128, 128), ("e",), ("e", "n", "f")),
        ("e, f, n", "e, c, f", (128, 128), ("e",), ("e", "n", "f")),
        ("n, e, f", "e, c, f", (128, 128), (), ("e", "n", "f")),  # not the order of a batch, but it could be
        ("e, n, f", "e, f, c", (128, 128), (), None),  # what is summed is last: a matrix as it lies
        ("e, n, f", "c, e, f", (128, 128), ("e",), None),  # as it lies, or the result would be copied
        ("n, e, f", "c, e, f", (128, 128), (), None),
        ("e, n, f", "e, c, f", (127, 128), (), None),  # too few rows
        ("e, n, f", "e, c, f", (128, 120), (), None),
        ("e, n, f", "e, c, f", (128, 132), (), None),  # ragged
        ("e, n, f", "e, c, f", (131, 136), ("e",), ("e", "n", "f")),
    ],
)
def test_what_lies_in_front_of_the_sum_is_a_batch(dims, index, sizes, batch, order) -> None:
    n, f = sizes
    extents = {"e": 4, "c": 6, "f": f}
    shape = ", ".join(str(extents[d]) for d in index.split(", "))
    q = parse(SPREAD.format(n=n, f=f, dims=dims, rdims="c", index=index, shape=shape))
    p = product_of(q.body[0])
    assert p is not None
    assert (spread(p, q.sizes), spread_order(p, q.sizes)) == (batch, order)


def test_what_is_summed_along_several_axes_is_a_batch_where_they_lie_together() -> None:
    for index, shape, batch in (("e, c, d, f", "4, 6, 5, 128", ("e",)), ("e, c, f, d", "4, 6, 128, 5", ())):
        text = SPREAD.format(n=128, f=128, dims="e, n, f", rdims="c, d", index=index, shape=shape)
        text = text.replace("x: f32[128, 6]", "x: f32[128, 6, 5]").replace("x[n, c]", "x[n, c, d]")
        q = parse(text)
        p = product_of(q.body[0])
        assert p is not None
        assert spread(p, q.sizes) == batch
