"""Tile sizes: what is read transposed has lines along both of its dims."""

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
