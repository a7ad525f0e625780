"""Tile sizes: what is read transposed has lines along both of its dims; the rows of a product are of all its dims."""

from __future__ import annotations

import pytest

from tilefold.plan.greedy import fuse
from tilefold.tensor.text import parse
from tilefold.tile.sizes import TileTargets, choose_tiles

SUM = """
program added()
  input x: f32[{shape}]
  input y: f32[700, 900]
  dim i = 700
  dim j = 900
  s[i, j]: f32 = x[{place}] + y[i, j]
  return s
"""


@pytest.mark.parametrize(
    ("shape", "place", "tiles"),
    [("900, 700", "j, i", (32, 256)), ("700, 900", "i, j", (9, 900)), ("900", "j", (9, 900)), ("700", "i", (9, 900))],
)
def test_tiles_have_lines_along_the_last_axis_of_a_transposed_operand(shape, place, tiles):
    (kernel,) = fuse(parse(SUM.format(shape=shape, place=place))).kernels
    found = choose_tiles(kernel.block, TileTargets(area=8192, line=32))
    assert tuple(found.values()) == tiles or tuple(reversed(found.values())) == tiles
    few = choose_tiles(kernel.block, TileTargets(area=900, line=32))  # no room for lines both ways
    assert max(few.values()) == 900


PRODUCT = """
program multiplied()
  input x: f32[8, {rows}, 40]
  input w: f32[40, 500]
  dim i = 8
  dim j = {rows}
  dim k = 40
  dim l = 500
  y[i, j, l]: f32 = sum[k] x[i, j, k] * w[k, l]
  z[i, j, l]: f32 = tanh(y[i, j, l])
  return z
"""


@pytest.mark.parametrize(("rows", "batch"), [(96, 1), (200, 1), (30, 4), (7, 8)])
def test_rows_of_several_dims_fill_a_tile_together(rows, batch):
    (kernel,) = fuse(parse(PRODUCT.format(rows=rows))).kernels
    found = choose_tiles(kernel.block, TileTargets(kept=128))
    assert (found["i"], found["j"], found["l"]) == (batch, min(rows, 128), 128)
