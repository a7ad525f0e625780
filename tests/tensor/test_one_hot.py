"""Sums over rows that are constant but for single elements, as maps."""

from __future__ import annotations

import pytest
import torch

from tilefold.tensor.inline import too_long
from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program
from tilefold.tensor.laws import one_hot
from tilefold.tensor.laws.one_hot import collapse_products, collapse_sums
from tilefold.tensor.text import parse, show

ROWS = """
program rows()
  input x: f32[6, 9]
  input y: i64[6]
  input u: f32[6]
  dim i = 6
  dim j = 9
  g[i, j]: f32 = {row}
  s[i]: {dtype} = sum[j] {summed}
  z[i, j]: f32 = g[i, j] - x[i, j] * s[i]
  return z
"""


def program(row: str, summed: str = "g[i, j]", dtype: str = "f32") -> Program:
    return parse(ROWS.format(row=row, summed=summed, dtype=dtype))


def results(p: Program, u: float = 1.0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(6, 9, generator=gen)
    return run(p, {"x": x, "y": torch.tensor([0, 8, -1, 9, 3, -100]), "u": torch.full((6,), u)})["z"]


@pytest.mark.parametrize(
    ("row", "summed"),
    [
        ("where((j == y[i]) & (y[i] != 3), u[i], 0.0)", "g[i, j]"),
        ("u[i] + where(j == y[i], 2.0, 0.0)", "g[i, j]"),
        ("0.5 * (u[i] - where(y[i] == j, 2.0, 0.0) * u[i]) / 3.0", "-g[i, j] * u[i]"),
        ("where(j == y[i], 2.0, 0.0) + where(j == 4, u[i], 0.0)", "g[i, j] + 1.0"),
    ],
)
def test_the_sum_is_a_map_of_the_same_value(row, summed):
    before = program(row, summed)
    after = collapse_sums(before)
    assert all(c.reducer is None for c in after.body)
    assert parse(show(after)) == after
    for u in (1.0, 0.0, -3e4):
        torch.testing.assert_close(results(after, u), results(before, u))


@pytest.mark.parametrize(
    ("row", "summed", "dtype"),
    [
        ("u[i] * 2.0", "g[i, j]", "f32"),  # constant: no element stands out
        ("x[i, j] + where(j == y[i], 2.0, 0.0)", "g[i, j]", "f32"),
        ("where(j == y[i], x[i, j], 0.0)", "g[i, j]", "f32"),  # a gather, which may stand for what a product makes
        ("where(j <= y[i], u[i], 0.0)", "g[i, j]", "f32"),
        ("where(j == y[i], 2.0, 0.0)", "g[i, j] * g[i, j]", "f32"),
        ("where(j == y[i], 2.0, 0.0)", "g[i, j]", "bf16"),
    ],
)
def test_other_sums_stay(row, summed, dtype):
    before = program(row, summed, dtype)
    assert collapse_sums(before) == before


def test_many_small_terms_beside_a_large_one():
    """A smoothed label's gradient: added up in float32 one after the other, the small ones would be lost."""
    text = """
program row()
  input u: f32[1]
  dim i = 1
  dim j = 100000
  s[i]: f32 = sum[j] u[i] + where(j == 3, -1.0, 0.0)
  return s
"""
    s = run(collapse_sums(parse(text)), {"u": torch.tensor([9.87654e-6])})["s"]
    assert abs(s.double() - (torch.tensor(9.87654e-6).double() * 100000 - 1)) < 1e-7


@pytest.mark.parametrize(("levels", "collapsed"), [(3, True), (12, False)])
def test_maps_are_written_out_as_far_as_bodies_are_long(levels, collapsed):
    """Each level reads the one below twice: written out, twelve of them would be 4096 elements."""
    maps = "".join(f"  g{n + 1}[i, j]: f32 = g{n}[i, j] + g{n}[i, j]\n" for n in range(levels))
    head = "program p()\n  input y: i64[6]\n  dim i = 6\n  dim j = 9\n  g0[i, j]: f32 = where(j == y[i], 1.0, 0.0)\n"
    p = parse(f"{head}{maps}  s[i]: f32 = sum[j] g{levels}[i, j]\n  return s\n")
    q = collapse_sums(p)
    assert (q.body[-1].reducer is None) is collapsed and not any(too_long(c.body) for c in q.body)
    y = {"y": torch.tensor([0, 8, -1, 9, 3, -100])}
    torch.testing.assert_close(run(q, y)["s"], run(p, y)["s"])


DIAGONAL = """
program diagonal()
  input d: {dtype}[7]
  input x: {dtype}[7, 5]
  input w: {dtype}[9, 5]
  input t: i64[7]
  dim i = 7
  dim k = {k}
  dim j = 5
  g[i, k]: {dtype} = {row}
  y[i, j]: {dtype} = sum[k] {product}
  return y
"""


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("k", "row", "product"),
    [
        (7, "where(k == i, d[k], 0.0)", "g[i, k] * x[k, j]"),  # diag(d) @ x
        (7, "where(i == k, d[i], 0.0)", "x[k, j] * g[i, k]"),
        (7, "where(k == i, 1.0, 0.0)", "x[i, j] * (g[i, k] * d[k])"),
        (9, "where(k == i + 3, d[i], 0.0)", "g[i, k] * w[k, j]"),  # beyond the last row: 0
        (9, "where((t[i] == k) & (d[i] > 0.0), d[i], 0.0)", "g[i, k] * w[k, j]"),
        (9, "{dtype}(k == t[i])", "g[i, k] * w[k, j]"),  # one_hot(t) @ w
    ],
)
def test_a_product_with_one_element_a_row_is_a_map_of_the_same_value(k, row, product, dtype):
    before = parse(DIAGONAL.format(k=k, row=row.format(dtype=dtype), product=product, dtype=dtype))
    after = collapse_products(before)
    assert all(c.reducer is None for c in after.body)
    assert parse(show(after)) == after
    gen = torch.Generator().manual_seed(0)
    dt = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    x = {n: torch.randn(*shape, generator=gen).to(dt) for n, shape in (("d", (7,)), ("x", (7, 5)), ("w", (9, 5)))}
    x["t"] = torch.tensor([0, 8, -1, 9, 3, -100, 2])
    assert torch.equal(run(after, x)["y"], run(before, x)["y"])


@pytest.mark.parametrize(
    ("row", "product"),
    [
        ("where(k <= i, d[k], 0.0)", "g[i, k] * x[k, j]"),  # a triangle
        ("where(k == i, d[k], 1.0)", "g[i, k] * x[k, j]"),
        ("where(k == i, 2.0, 0.0)", "g[i, k] + x[k, j]"),
    ],
)
def test_other_products_stay(row, product):
    before = parse(DIAGONAL.format(k=7, row=row, product=product, dtype="f32"))
    assert collapse_products(before) == before


def test_a_labels_element_of_a_row_stays_a_sum():
    """It may be of what a product makes, block by block."""
    before = program("where(j == y[i], 1.0, 0.0)", "g[i, j] * x[i, j]")
    assert collapse_products(before) == before


def test_sums_whose_rows_tell_no_element_by_its_index_are_not_written_out(monkeypatch):
    """Writing out is asked for each sum of a chain of norms: all maps before it."""
    seen = []
    monkeypatch.setattr(one_hot, "too_long", lambda e: seen.append(e) or too_long(e))
    for row in ("u[i] * 2.0", "where(x[i, j] == u[i], 1.0, 0.0)", "where(j <= y[i], u[i], 0.0)"):
        collapse_sums(program(row))
    assert not seen
    collapse_sums(program("where(j == y[i], u[i], 0.0)"))
    assert seen


@pytest.mark.parametrize(
    "row", ["where(j == y[i], u[i], 0.0)", "bf16(where((j == y[i]) & (y[i] != 3), u[i], 0.0)) * 2.0"]
)
def test_a_row_in_16_bits_has_one_element_still(row):
    """A loss's gradient of logits: zeros are exact, the element is rounded."""
    before = parse(ROWS.format(row=row, summed="g[i, j]", dtype="f32").replace("g[i, j]: f32", "g[i, j]: bf16"))
    after = collapse_sums(before)
    assert all(c.reducer is None for c in after.body)
    for u in (1.0, 1.5, -2e4):
        torch.testing.assert_close(results(after, u), results(before, u), rtol=4e-3, atol=0)
