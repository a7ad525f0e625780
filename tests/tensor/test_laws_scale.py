"""Scales and rank-1 terms leave the operands of products, and what may not."""

from __future__ import annotations

import pytest
import torch

from tests.tensor.law_programs import same
from tilefold.algebra.text import show as show_expr
from tilefold.tensor.interp import run
from tilefold.tensor.laws.normal import normal
from tilefold.tensor.laws.rank_one import RANK_ONE
from tilefold.tensor.laws.scale import COLUMN_SCALE, ROW_SCALE
from tilefold.tensor.laws.terms import gemms
from tilefold.tensor.text import parse, show_compute

PROGRAM = """
program scaled()
  input h: f32[6, 8]
  input r: f32[6]
  input g: f32[8]
  input w: f32[8, 12]
  input dy: f32[6, 12]
  dim i = 6
  dim j = 8
  dim l = 12
  a[i, j]: {dtype} = {a}
  y[i, l]: f32 = sum[j] a[i, j] * w[j, l]
  dw[j, l]: f32 = sum[i] a[i, j] * dy[i, l]
  return y, dw
"""


def program(a: str, dtype: str = "f32"):
    return normal(parse(PROGRAM.format(a=a, dtype=dtype)))


def by_name(p, name):
    return show_compute(next(c for c in p.body if c.name == name))


def test_row_scale_leaves_one_product():
    p = program("h[i, j] * r[i]")
    (match,) = [m for m in ROW_SCALE.matches(p) if m.at == ("a", "y")]
    q = normal(ROW_SCALE.apply(p, match))
    assert by_name(q, "y_raw") == "y_raw[i, l]: f32 = sum[j] h[i, j] * w[j, l]"
    assert by_name(q, "y") == "y[i, l]: f32 = y_raw[i, l] * r[i]"
    assert "a[i, j] * dy[i, l]" in by_name(q, "dw")
    same(p, q)


def test_scale_of_the_contracted_dim_moves_to_the_other_operand():
    p = program("h[i, j] * g[j]")
    match = next(m for m in COLUMN_SCALE.matches(p) if m.at == ("a", "y"))
    q = normal(COLUMN_SCALE.apply(p, match))
    assert by_name(q, "w_s") == "w_s[j, l]: f32 = w[j, l] * g[j]"
    assert by_name(q, "y") == "y[i, l]: f32 = sum[j] h[i, j] * w_s[j, l]"
    same(p, q)


def test_a_scale_leaves_every_product_at_once():
    p = program("h[i, j] * r[i] / g[j]")
    match = next(m for m in ROW_SCALE.matches(p) if len(m.at) == 3)
    q = normal(ROW_SCALE.apply(p, match))
    assert not any(o.tensor == "a" for g in gemms(q).values() for o in g.operands)
    same(p, q)


@pytest.mark.parametrize(
    ("a", "dtype"),
    [
        ("h[i, j] * h[i, j]", "f32"),  # no factor lacks a dim
        ("h[i, j] + r[i]", "f32"),  # not a product
        ("exp(h[i, j] * r[i])", "f32"),  # the scale is inside a function
        ("h[i, j] * r[i]", "e4m3"),  # quantised: the scale decides what is rounded
        ("r[i] * g[j]", "f32"),  # nothing would stay
    ],
)
def test_scales_that_stay(a, dtype):
    p = program(a, dtype)
    assert not ROW_SCALE.matches(p) and not COLUMN_SCALE.matches(p)


def test_a_quantising_cast_hides_its_factors():
    p = program("e4m3(h[i, j] * r[i]) * g[j]")
    matches = [*ROW_SCALE.matches(p), *COLUMN_SCALE.matches(p)]
    assert matches and all(show_expr(m.choice[0]) == "g[j]" for m in matches)


def test_a_mean_and_a_shift_leave_the_product():
    p = program("(h[i, j] - r[i]) * g[j] + 2.0")
    match = next(m for m in RANK_ONE.matches(p) if m.at[0] == "y")
    q = normal(RANK_ONE.apply(p, match))
    assert sum(c.rdims == ("j",) and c.dims == ("l",) for c in q.body) == 2
    same(p, q)


@pytest.mark.parametrize(
    ("a", "dtype"),
    [
        ("h[i, j] * r[i] * g[j]", "f32"),  # one term
        ("h[i, j] - h[i, j] * r[i]", "f32"),  # no separable term
        ("r[i] - g[j]", "f32"),  # nothing but separable terms
        ("h[i, j] - r[i]", "bf16"),  # narrow: cancellation would show
    ],
)
def test_rank_one_terms_that_stay(a, dtype):
    assert not RANK_ONE.matches(program(a, dtype))


def test_row_scale_is_no_less_exact_in_bf16():
    text = PROGRAM.format(a="h[i, j] * r[i]", dtype="bf16").replace("f32[", "bf16[")
    p = normal(parse(text.replace("y[i, l]: f32", "y[i, l]: bf16").replace("dw[j, l]: f32", "dw[j, l]: bf16")))
    q = normal(ROW_SCALE.apply(p, next(m for m in ROW_SCALE.matches(p) if m.at == ("a", "y"))))
    errors = {"before": 0.0, "after": 0.0}
    for seed in range(20):
        gen = torch.Generator().manual_seed(seed)
        given = {i.name: torch.randn([int(e.value) for e in i.shape], generator=gen).bfloat16() for i in p.inputs}
        exact = run(p, {n: x.double() for n, x in given.items()}, exact=True)["y"]
        for name, which in (("before", p), ("after", q)):
            errors[name] += float((run(which, given)["y"].double() - exact).norm() / exact.norm())
    assert errors["after"] <= 1.02 * errors["before"]


GRAM = """
program gram()
  input h: f32[6, 8]
  input r: f32[6]
  dim i = 6
  dim n = 6
  dim j = 8
  a[i, j]: f32 = {a}
  y[i, n]: f32 = sum[j] a[i, j] * a[n, j]
  return y
"""


@pytest.mark.parametrize("a", ["h[i, j] * r[i]", "h[i, j] - r[i]"])
def test_a_product_of_a_map_with_itself_is_left_alone(a):
    p = normal(parse(GRAM.format(a=a)))
    assert gemms(p)
    assert not ROW_SCALE.matches(p) and not COLUMN_SCALE.matches(p) and not RANK_ONE.matches(p)
