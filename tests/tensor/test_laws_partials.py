"""Partial states of output tiles: independent reductions, cascades, and where none are taken."""

from __future__ import annotations

import pytest

from tests.tensor.law_programs import same
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const
from tilefold.tensor.laws import partials
from tilefold.tensor.laws.normal import normal
from tilefold.tensor.text import parse, show

HEAD = """
program p()
  input x: f32[6, 5]
  input w: f32[5, 12]
  dim i = 6
  dim k = 5
  dim j = 12
  h[i, j]: f32 = sum[k] x[i, k] * w[k, j]
"""


def program(*lines: str):
    return normal(parse(HEAD + "\n".join(f"  {line}" for line in lines)))


def cut(p, tile=4):
    q = normal(partials.apply(p, partials.together(partials.matches(p, tile))))
    same(p, q)
    return q


def test_a_sum_is_a_sum_of_partials():
    q = cut(program("s[i]: f32 = sum[j] h[i, j] * h[i, j]", "return s"))
    names = {c.name: c for c in q.body}
    assert q.sizes[names["s"].rdims[0]].value == 3 and q.sizes[names["s_part"].rdims[0]].value == 4


def test_log_sum_exp_is_merged_by_its_fold():
    q = cut(program("m[i]: f32 = max[j] h[i, j]", "s[i]: f32 = sum[j] exp(h[i, j] - m[i])", "return m, s"))
    merged = next(c for c in q.body if c.name == "s_s")
    assert "exp(" in show(q).split("s_s[i]: f32 = ")[1].splitlines()[0] and merged.reducer == "sum"
    part = next(c for c in q.body if c.name == "s_part")
    assert "m_part" in show(q).split("s_part[")[1].splitlines()[0] and len(part.rdims) == 1


def test_squares_about_the_mean_are_merged_by_their_fold():
    lines = ("m[i]: f32 = sum[j] h[i, j]", "s[i]: f32 = sum[j] (h[i, j] - m[i] / 12.0) * (h[i, j] - m[i] / 12.0)")
    q = cut(program(*lines, "return m, s"))
    assert any(c.name == "s_part" for c in q.body)


def test_sums_over_rows_are_cut_too():
    q = cut(program("s[j]: f32 = sum[i] h[i, j] * x[i, 0]", "return s"), tile=3)
    assert next(c for c in q.body if c.name == "s_part").dims[0] != "i"


@pytest.mark.parametrize(
    "lines",
    [
        ("e[i, k]: f32 = x[i, k] * 2.0", "s[i]: f32 = sum[k] e[i, k]", "return s, h"),  # no product makes it
        ("s[i]: i64 = argmax[j] h[i, j]", "return s"),  # not a value reducer
        ("m[i]: f32 = max[k] x[i, k]", "return m, h"),
    ],
)
def test_reductions_without_partials(lines):
    assert not partials.matches(program(*lines), 4)


def test_a_map_behind_the_reduction_is_not_in_the_epilogue():
    lines = ("m[i]: f32 = max[j] h[i, j]", "e[i, j]: f32 = exp(h[i, j] - m[i])", "s[i]: f32 = sum[j] e[i, j]")
    p = parse(HEAD + "\n".join(f"  {line}" for line in (*lines, "return e, s")))
    names = [c.name for c in partials.along_products(normal(p)).get("j", [])]
    assert names == ["m"]


@pytest.mark.parametrize(
    ("extent", "most", "tile"),
    [(12, 4, 4), (12, 12, None), (13, 4, None), (10, 4, 2), (262, 128, None), (300, 128, 100)],
)
def test_the_tile_divides(extent, most, tile):
    assert partials.tile_of(Const(extent, DType.I64), most) == tile
