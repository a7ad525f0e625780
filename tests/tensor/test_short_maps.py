"""Maps are as long as what reads them."""

from __future__ import annotations

import torch

from tilefold.tensor.interp import run
from tilefold.tensor.short_maps import short_maps
from tilefold.tensor.text import parse, show

TEXT = """program f()
  input x: f32[4, 9]
  input b: f32[4]
  dim i = 4
  dim p = 10
  dim l = {read}
  m[i, p]: f32 = where(p < 9, x[i, p], b[i]) * 2.0
  y[i, l]: f32 = m[i, l] + m[i, {place}]
  return {results}
"""


def made(read: int, place: int, results: str = "y"):
    p = parse(TEXT.format(read=read, place=place, results=results))
    short = short_maps(p)
    gen = torch.Generator().manual_seed(0)
    given = {"x": torch.randn(4, 9, generator=gen), "b": torch.randn(4, generator=gen)}
    assert run(short, given)["y"].equal(run(p, given)["y"])
    (m,) = [c for c in short.body if c.name == "m"]
    return short.sizes[m.dims[1]].value, show(short)


def test_a_row_that_is_read_is_no_longer_than_that():
    extent, text = made(9, 9)
    assert extent == 9 and "where" not in text and "b[i]" in text


def test_places_before_the_end_are_read_where_they_are():
    extent, text = made(7, 2)
    assert extent == 7 and "b[i]" not in text and ", 2]" in text


def test_results_and_whole_maps_stay():
    assert made(9, 9, "y, m")[0] == made(10, 9)[0] == 10
