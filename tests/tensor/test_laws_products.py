"""Stacks, sums of products, one-hot sums and the transpose identity, and where they do not hold."""

from __future__ import annotations

import pytest

from tests.tensor.law_programs import same
from tilefold.algebra.expr import loads
from tilefold.tensor.laws.adjoint import TRANSPOSE
from tilefold.tensor.laws.normal import _sides, normal
from tilefold.tensor.laws.one_hot import COLLAPSE, SELECT
from tilefold.tensor.laws.stack import CONCATENATE, INTERLEAVE, STACK
from tilefold.tensor.laws.terms import gemms
from tilefold.tensor.text import parse

HEAD = """
program p()
  input x: f32[6, 8]
  input w: f32[8, 12]
  input u: f32[8, 12]
  input v: f32[8, 9]
  input wt: f32[12, 8]
  input dy: f32[6, 12]
  input dz: f32[6, 12]
  input t: i64[6]
  input f: f32[6, 12]
  dim i = 6
  dim j = 8
  dim l = 12
  dim m = 9
  dim n = 12
"""


def program(*lines: str):
    return normal(parse(HEAD + "\n".join(f"  {line}" for line in lines)))


def rewritten(p, law):
    match = law.matches(p)[0]
    q = normal(law.apply(p, match))
    same(p, q)
    return q


PAIR = ("a[i, l]: f32 = sum[j] x[i, j] * w[j, l]", "b[i, l]: f32 = sum[j] x[i, j] * u[j, l]")


def test_two_products_of_one_operand_become_one():
    q = rewritten(program(*PAIR, "y[i, l]: f32 = sigmoid(a[i, l]) * b[i, l]", "return y"), STACK)
    (g,) = gemms(q).values()
    assert q.sizes["q2"].value == 2 and g.compute.dims[-1] == "q2"


@pytest.mark.parametrize(
    "lines",
    [
        (PAIR[0], "b[i, m]: f32 = sum[j] x[i, j] * v[j, m]", "return a, b"),  # other extents
        (PAIR[0], "e[i, j]: f32 = x[i, j] * 2.0", "b[i, l]: f32 = sum[j] e[i, j] * u[j, l]", "return a, b"),  # operands
        (  # one depends on the other
            PAIR[0],
            "e[j, n]: f32 = sum[i] x[i, j] * a[i, n]",
            "b[i, n]: f32 = sum[j] x[i, j] * e[j, n]",
            "return a, b",
        ),
    ],
)
def test_products_that_are_not_stacked(lines):
    p = program(*lines)
    assert not [m for m in STACK.matches(p) if set(m.at) == {"a", "b"}]


SUM = ("a[i, j]: f32 = sum[l] dy[i, l] * w[j, l]", "b[i, j]: f32 = sum[l] dz[i, l] * u[j, l]")


def test_products_that_are_added_become_one():
    q = rewritten(program(*SUM, "y[i, j]: f32 = (a[i, j] + x[i, j] + b[i, j]) * 2.0", "return y"), CONCATENATE)
    (g,) = gemms(q).values()
    assert set(g.compute.rdims) == {"l", "q2"}


@pytest.mark.parametrize(
    "lines",
    [
        (*SUM, "y[i, j]: f32 = a[i, j] - b[i, j]", "return y"),
        (*SUM, "y[i, j]: f32 = a[i, j] + b[i, j] * 2.0", "return y"),
        (*SUM, "y[i, j]: f32 = a[i, j] + b[i, j]", "e[i, j]: f32 = exp(a[i, j])", "return y, e"),
        (*SUM, "y[i, j]: f32 = a[i, j] + b[i, j]", "return y, a"),
    ],
)
def test_products_that_are_not_only_added(lines):
    assert not CONCATENATE.matches(program(*lines))


def test_halves_of_a_product_are_cut_apart():
    p = program(PAIR[0], "y[i, l]: f32 = where(l < 6, -a[i, l + 6], a[i, l - 6])", "return y")
    q = rewritten(p, INTERLEAVE)
    assert sorted(int(q.sizes[d].value) for d in gemms(q)["a"].compute.dims) == [2, 6, 6]


def test_an_offset_that_does_not_divide_is_no_pair():
    assert not INTERLEAVE.matches(program(PAIR[0], "y[i, l]: f32 = where(l < 7, a[i, l + 5], 0.0)", "return y"))


FORWARD = ("s[i]: f32 = sum[j] x[i, j] * x[i, j]", "z[i, j]: f32 = x[i, j] * exp(x[i, j])")
BACK = ("y[i, l]: f32 = sum[j] z[i, j] * w[j, l]", "d[i, j]: f32 = sum[l] dy[i, l] * w[j, l]")


def test_the_transpose_identity():
    p = program(*FORWARD, *BACK, "s2[i]: f32 = sum[j] d[i, j] * z[i, j] * s[i]", "return y, s2")
    q = rewritten(p, TRANSPOSE)
    assert next(c for c in q.body if c.name == "s2").rdims == ("l",)
    assert "d" not in gemms(q)


def test_the_transpose_identity_of_a_sum_of_products():
    lines = ("e[i, l]: f32 = sum[j] z[i, j] * u[j, l]", "d2[i, j]: f32 = sum[l] dz[i, l] * u[j, l]")
    last = ("s2[i]: f32 = sum[j] (d[i, j] + d2[i, j]) * z[i, j]", "return y, e, s2")
    q = rewritten(program(*FORWARD, *BACK, *lines, *last), TRANSPOSE)
    assert list(gemms(q)) == ["y", "e"]


@pytest.mark.parametrize(
    "statistic",
    [
        "sum[j] d[i, j] * x[i, j]",  # no product of x with w is there
        "sum[j] d[i, j] * z[i, j] * x[i, j]",  # x varies along j
        "sum[j] exp(d[i, j]) * z[i, j]",  # not linear in d
        "max[j] d[i, j] * z[i, j]",  # not a sum
    ],
)
def test_where_the_transpose_identity_does_not_hold(statistic):
    assert not TRANSPOSE.matches(program(*FORWARD, *BACK, f"s2[i]: f32 = {statistic}", "return y, s2"))


def test_the_transpose_identity_needs_the_same_weight():
    lines = ("y[i, l]: f32 = sum[j] z[i, j] * u[j, l]", BACK[1], "s2[i]: f32 = sum[j] d[i, j] * z[i, j]")
    assert not TRANSPOSE.matches(program(*FORWARD, *lines, "return y, s2"))


def test_a_gathered_element_of_a_product_is_a_one_hot_sum():
    q = rewritten(program(PAIR[0], "y[i]: f32 = a[i, t[i]] * 2.0", "return y"), SELECT)
    assert next(c for c in q.body if c.name == "a_at").reducer == "sum"


def test_a_gathered_element_of_an_input_stays():
    assert not SELECT.matches(program("y[i]: f32 = f[i, t[i]] * 2.0", "return y"))


def test_a_one_hot_sum_of_a_value_is_the_value():
    p = program("y[i]: f32 = sum[m] where((m == t[i]) & (t[i] != 2), exp(f[i, 0]), 0.0)", "return y")
    q = rewritten(p, COLLAPSE)
    assert next(c for c in q.body if c.name == "y").reducer is None


@pytest.mark.parametrize(
    "e",
    [
        "sum[l] where(l == t[i], f[i, l], 0.0)",  # the value varies along the row
        "sum[l] where(l < t[i], f[i, 0], 0.0)",  # not one-hot
        "sum[l] where(l == t[i], f[i, 0], 1.0)",  # not zero elsewhere
        "max[l] where(l == t[i], f[i, 0], 0.0)",  # not a sum
    ],
)
def test_sums_that_do_not_collapse(e):
    assert not COLLAPSE.matches(program(f"y[i]: f32 = {e}", "return y"))


def test_factors_that_share_a_kept_dim_are_one_operand():
    """v has no dim of the first factor, but one of u, which has."""
    p = parse(
        "program p()\n  input a: f32[6, 8]\n  input u: f32[6, 9]\n  input v: f32[9]\n  input b: f32[12, 8]\n"
        "  dim i = 6\n  dim j = 8\n  dim l = 12\n  dim m = 9\n"
        "  y[i, m, l]: f32 = sum[j] a[i, j] * u[i, m] * v[m] * b[l, j]\n  return y\n"
    )
    found = _sides(p, p.body[0])
    assert found is not None
    assert [[ld.tensor for e in side for ld in loads(e)] for side in found] == [["a", "u", "v"], ["b"]]
