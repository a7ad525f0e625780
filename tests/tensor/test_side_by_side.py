"""Rows that are put together of parts of one length."""

from __future__ import annotations

import pytest
import torch

from tilefold.tensor.interp import run
from tilefold.tensor.side_by_side import parts_of_rows
from tilefold.tensor.text import parse, show

TEXT = """program parts()
  input x: f32[5, 12]
  input s: f32[5]
  dim i = 5
  dim j = 4
  dim k = {n}
  a[i, j]: f32 = exp(x[i, j])
  b[i, j]: f32 = a[i, j] * x[i, j + 4] - s[i]
  t[i]: f32 = sum[j] b[i, j]
  y[i, k]: f32 = where(k < 4, a[i, k] - t[i], where(k < {m}, -b[i, k - 4], {last}))
  return {results}
"""


def program(n: int = 12, m: int = 8, last: str = "b[i, k - 8] * x[i, k]", results: str = "t, y"):
    return parse(TEXT.format(n=n, m=m, last=last, results=results))


@pytest.mark.parametrize("last", ["b[i, k - 8] * x[i, k]", "x[i, k] * 2.0"])
def test_parts_are_read_where_they_are_computed(last: str):
    p = program(last=last)
    q = parts_of_rows(p)
    y = q.body[-1]
    assert y.dims == ("i", "kh", "kl") and "b[i, kl]" in show(q) and "a[i, kl]" in show(q)
    args = {"x": torch.randn(5, 12, dtype=torch.float64), "s": torch.randn(5, dtype=torch.float64)}
    want, found = run(p, args), run(q, args)
    torch.testing.assert_close(found["y"].flatten(1), want["y"])
    torch.testing.assert_close(found["t"], want["t"])


@pytest.mark.parametrize(
    "given",
    [
        {"n": 10, "last": "b[i, k - 8]"},  # the last part is shorter
        {"m": 7, "last": "b[i, k - 7]"},  # parts begin at other places
        {"last": "b[i, 11 - k]"},  # backwards
        {"results": "t, y, y2"},  # something reads the row
    ],
)
def test_other_rows_stay(given: dict[str, str]):
    text = show(program(**{**given, "results": "t, y"}))
    if "results" in given:
        text = text.replace("  return t, y", "  y2[i]: f32 = sum[k] y[i, k]\n  return t, y, y2")
    p = parse(text)
    assert parts_of_rows(p) is p
