"""Maps that are computed where they are read, though several statements read them."""

from __future__ import annotations

import pytest
import torch

from tilefold.tensor.inline import inline
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse, show

PARTS = """program parts()
  input x: f32[4, 3]
  input y: f32[4, 5]
  input w: f32[3]
  dim i = 4
  dim j = 8
  dim k = 3
  dim l = {rest}
  g[i, j]: f32 = exp(where(j < 3, x[i, j], y[i, j - 3]) * 2.0) + 1.0
  a[i, k]: f32 = g[i, k] * w[k]
  b[i, l]: f32 = g[i, {at}]
  return a, b
"""


@pytest.mark.parametrize(("rest", "at", "whole"), [(5, "l + 3", False), (8, "l", True), (5, "7 - l", True)])
def test_a_map_of_which_each_reader_takes_a_part_of_its_own_is_computed_there(rest, at, whole):
    p = parse(PARTS.format(rest=rest, at=at))
    q = inline(p)
    assert ("g" in {c.name for c in q.body}) == whole
    given = {"x": torch.randn(4, 3), "y": torch.randn(4, 5), "w": torch.randn(3)}
    for name in p.outputs:
        torch.testing.assert_close(run(q, given)[name], run(p, given)[name])


GATED = """program gated()
  input x: f32[4, 16]
  dim i = 4
  dim j = 8
  dim k = 16
  s[i, j]: f32 = sigmoid(x[i, j + 8])
  u[i, j]: f32 = x[i, j] * s[i, j]
  d[i, j]: f32 = s[i, j] * (2.0 * u[i, j])
  e[i, j]: f32 = (1.0 - s[i, j]) * s[i, j] * x[i, j] * (2.0 * u[i, j])
  z[i, k]: f32 = where(k < 8, d[i, k], e[i, k - 8])
  return z
"""


def test_a_gate_is_computed_in_both_parts_of_its_gradient():
    """Four statements read it until three of them are in the fourth, which has it at two places."""
    p = parse(GATED)
    q = inline(p)
    assert [c.name for c in q.body] == ["z"]
    given = {"x": torch.randn(4, 16)}
    torch.testing.assert_close(run(q, given)["z"], run(p, given)["z"])


CHECKED = """program checked()
  input x: f32[5]
  input at: i64[4]
  dim i = 4
  dim j = 6
  g[i]: f32 = x[within(at[i], 5)]
  y[j]: f32 = where((j >= 1) & (j < 5), g[j - 1], 0.0)
  return y
"""


def test_padding_checks_indices_of_the_elements_alone_that_a_map_has():
    """Around its elements the map is asked for others, whose indices are nobody's."""
    p = parse(CHECKED)
    q = inline(p)
    assert [c.name for c in q.body] == ["y"]
    assert "x[within(where(" in show(q) and ", 5)]" in show(q)
    given = {"x": torch.randn(5), "at": torch.tensor([0, 4, 2, 1])}
    torch.testing.assert_close(run(q, given)["y"], run(p, given)["y"])


LOOKED_UP = """program looked_up()
  input g: f32[64, {rows}, 3]
  input n: f32[64, {rows}, 3]
  input w: f32[64, {rows}]
  input at: i64[{picks}, 2]
  dim i = 64
  dim j = {rows}
  dim k = 3
  dim l = {picks}
  m[i, j, k]: f32 = g[i, j, k] / w[i, j] + n[i, j, k]
  y[i, l, k]: f32 = m[i, within(at[l, 0], {rows}), k] + m[i, within(at[l, 1], {rows}), k]
  return y
"""


def test_a_map_of_several_tensors_that_data_pick_often_is_written_once():
    """Else all of them are read at each place, a sector an element."""
    kept = inline(parse(LOOKED_UP.format(rows=7000, picks=14000)))
    assert [c.name for c in kept.body] == ["m", "y"]


@pytest.mark.parametrize(("rows", "picks"), [(70, 140), (70_000, 1000)], ids=["small", "few of many"])
def test_one_that_is_picked_seldom_is_computed_where_it_is(rows, picks):
    assert [c.name for c in inline(parse(LOOKED_UP.format(rows=rows, picks=picks))).body] == ["y"]


PAIRED = """program paired()
  input x: f32[6, 6]
  input m: f32[6]
  dim i = 6
  dim j = 6
  d[i, j]: f32 = exp(x[i, j]) * m[j] - exp(m[i])
  s[i]: f32 = sum[j] exp(d[i, j])
  loss[]: f32 = sum[i] log(s[i]) - d[{at}]
  return loss
"""


@pytest.mark.parametrize(("at", "kept"), [("i, i", ["s", "loss"]), ("i, j", ["d", "s", "loss"])])
def test_a_diagonal_is_computed_where_it_is_read(at, kept):
    """A batch's pairs: nothing as large as all of them is written for these few."""
    text = PAIRED.format(at=at) if at == "i, i" else PAIRED.format(at=at).replace("sum[i] log", "sum[i, j] log")
    p = parse(text)
    q = inline(p)
    assert [c.name for c in q.body] == kept
    given = {"x": torch.randn(6, 6), "m": torch.randn(6)}
    torch.testing.assert_close(run(q, given)["loss"], run(p, given)["loss"])


NEAREST = """program nearest()
  input x: f32[6, 2]
  input y: f32[5, 2]
  dim i = 6
  dim j = 5
  d[i, j]: f32 = sqrt((x[i, 0] - y[j, 0]) * (x[i, 0] - y[j, 0]) + (x[i, 1] - y[j, 1]) * (x[i, 1] - y[j, 1]))
  a[i]: f32 = min[j] d[i, j]
  b[{of}]: f32 = max[{over}] d[i, j]
  return a, b
"""


@pytest.mark.parametrize(("of", "over", "apart"), [("j", "i", True), ("i", "j", False)])
def test_what_is_reduced_along_either_axis_is_computed_by_each(of, over, apart):
    """No loop nest has both reductions: in one kernel for the sake of what both read, a thread block had all of the
    second one (8,192 points each way: forecast 6 ms, in two kernels 0.1). Both of rows are in one."""
    p = parse(NEAREST.format(of=of, over=over))
    q = inline(p)
    assert ("d" in {c.name for c in q.body}) != apart
    given = {"x": torch.randn(6, 2), "y": torch.randn(5, 2)}
    for name in p.outputs:
        torch.testing.assert_close(run(q, given)[name], run(p, given)[name])
