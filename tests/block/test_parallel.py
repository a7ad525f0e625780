"""Which dims a kernel is parallel over: not three coordinates that long sums have their weights in common for."""

from __future__ import annotations

import pytest

from tilefold.block.group import Limits
from tilefold.block.parallel import parallel_dims
from tilefold.tensor.analysis import Graph
from tilefold.tensor.text import parse

FORCES = """program forces()
  input w: f32[1024, 1024]
  input x: f32[1024, {m}]
  dim i = 1024
  dim j = 1024
  dim k = {m}
  s[i, k]: f32 = sum[j] {weight} * (x[j, k] - x[i, k])
  y[i, k]: f32 = x[i, k] + s[i, k]
  return y
"""


@pytest.mark.parametrize(
    ("m", "weight", "whole"),
    [(3, "exp(w[i, j])", True), (4, "exp(w[i, j])", False), (8, "exp(w[i, j])", False), (3, "x[j, k]", False)],
)
def test_weights_of_pairs_are_computed_once_for_all_coordinates(m: int, weight: str, whole: bool) -> None:
    """Gradients of 4 x 1,024 bodies on an H100: tiles of 64 x 16 pairs x 4 coordinates, of which threads exchanged
    weights: forecast 67 us, with a value for each coordinate 35."""
    g = Graph.of(parse(FORCES.format(m=m, weight=weight)))
    found = parallel_dims(g, ("s", "y"), Limits(in_registers=True))
    assert found == (("i",) if whole else ("i", "k"))
    assert parallel_dims(g, ("s", "y")) == ("i", "k")


def test_sums_of_what_each_coordinate_has_are_parallel_over_them() -> None:
    """Nothing is computed of the pairs alone."""
    g = Graph.of(parse(FORCES.format(m=3, weight="w[i, j]")))
    assert parallel_dims(g, ("s", "y"), Limits(in_registers=True)) == ("i", "k")
