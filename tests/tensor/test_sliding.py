"""Reductions over windows that slide are the same in parts."""

from __future__ import annotations

import pytest
import torch

from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program
from tilefold.tensor.sliding import AT_ONCE, Sliding, sliding_by_parts
from tilefold.tensor.text import parse, show

LINE = """program line()
  input x: f32[3, {n}]
  dim i = 3
  dim j = {made}
  dim k = {count}
  s[i, j]: f32 = {reducer}[k] {body}
  y[i, j]: f32 = s[i, j] / {count}.0
  return y
"""
IMAGE = """program image()
  input x: f32[2, 20, 21]
  dim n = 2
  dim i = 20
  dim j = 21
  dim k = 9
  dim l = 11
  s[n, i, j]: f32 = {reducer}[k, l] where(i + k - 4 >= 0, where(i + k - 4 < 20, where(j + l - 5 >= 0, where(j + l - 5 < 21, x[n, i + k - 4, j + l - 5], 0.0), 0.0), 0.0), 0.0)
  return s
"""  # noqa: E501


def line(count: int, stride: int = 1, made: int = 13, reducer: str = "sum", body: str = "") -> Program:
    n = (made - 1) * stride + count
    at = f"{stride} * j + k" if stride > 1 else "j + k"
    return parse(LINE.format(n=n, made=made, count=count, reducer=reducer, body=body or f"x[i, {at}]"))


def apart(p: Program, pays=lambda *_: True) -> Program:
    """The program in parts, which computes the same."""
    q = sliding_by_parts(p, pays)
    args = {i.name: torch.randn([int(e.value) for e in i.shape], dtype=torch.float64) for i in p.inputs}
    for name, want in run(p, args).items():
        torch.testing.assert_close(run(q, args)[name], want)
    return q


@pytest.mark.parametrize("reducer", ["sum", "max", "min"])
@pytest.mark.parametrize("count, stride", [(101, 1), (29, 1), (16, 2), (7, 3), (11, 4)])
def test_windows_of_a_line(reducer: str, count: int, stride: int):
    q = apart(line(count, stride, reducer=reducer))
    part, whole = q.body[:2]
    assert part.reducer is None and whole.reducer is None and "k" not in q.sizes
    looked_at = show(q).split("y[i, j]")[0].count("[i, ") - 2
    assert looked_at <= 2 * count**0.5 + 6


def test_of_very_long_ones_parts_are_in_parts():
    q = apart(line(3000))
    assert len(q.body) == 4 and all(show(q).splitlines()[n].count("x[") <= AT_ONCE for n in range(-6, -1))


@pytest.mark.parametrize("reducer", ["sum", "max"])
def test_axes_of_an_image_one_after_the_other(reducer: str):
    q = apart(parse(IMAGE.format(reducer=reducer)))
    assert len(q.body) >= 2 and all(c.reducer is None for c in q.body)


@pytest.mark.parametrize(
    "body", ["x[i, j + k] * x[i, j]", "x[i, j + 2 * k]", "x[i, k]", "where(k < 3, x[i, j + k], 0.0)"]
)
def test_what_does_not_slide_stays(body: str):
    p = parse(show(line(29)).replace("x[i, j + k]", body).replace("f32[3, 41]", "f32[3, 70]"))
    assert apart(p) is p


def test_what_another_reduction_over_the_window_reads_stays():
    more = "  v[i, j]: f32 = sum[k] (x[i, j + k] - y[i, j]) * (x[i, j + k] - y[i, j])\n  return y, v"
    p = parse(show(line(29)).replace("  return y", more))
    assert apart(p) is p


def test_what_another_reduction_looks_at_anyway_stays():
    more = """  m[i, j]: f32 = sum[k] x[i, j + k]
  v[i, j]: f32 = sum[k] (x[i, j + k] - m[i, j]) * (x[i, j + k] - m[i, j])
  return y, v"""
    p = parse(show(line(29)).replace("  return y", more))
    assert apart(p) is p


def test_it_is_asked_whether_that_pays():
    asked: list[Sliding] = []
    p = line(101)
    assert sliding_by_parts(p, lambda c, made, parts, w: bool(asked.append(w))) is p
    assert asked == [Sliding("j", "k", 101, 1, 1)] and sum(asked[0].taps) == 21
