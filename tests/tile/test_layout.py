"""Axes of stride 1: those that have one index in every call are none, unless there is no other."""

from __future__ import annotations

import pytest
import torch

from tilefold.block.ir import Let, walk
from tilefold.block.text import parse
from tilefold.tile.layout import arrange, single_axes_of, unit_axis, usual_units

BLOCK = parse("""block scaled(S)
  input w: f32[6, 8, 1, 1]
  input t: f32[S, 1]
  input s: f32[]
  dim i = 6
  dim j = 8
  dim k = S
  result y[i, j]: f32
  result z[k]: f32
  forall i
    forall j
      store y[i, j] over (i, j) = w[i, j, 0, 0] * s
  forall k
    store z[k] over (k) = t[k, 0]
  return y, z
""")


def test_row_major_tensors_have_the_units_that_are_usual():
    shapes = [(6, 8, 1, 1), (5, 1), (), (6, 8), (5,)]
    found = tuple(unit_axis(torch.empty(x), a) for x, a in zip(shapes, single_axes_of(BLOCK), strict=True))
    assert found == usual_units(BLOCK) == (1, 0, None, 1, 0)


@pytest.mark.parametrize(
    ("x", "axis"),
    [
        (torch.empty(6, 8, 1, 1).permute(1, 0, 2, 3), 0),
        (torch.empty(6, 8, 1, 2)[..., :1], 3),  # neighbours along no other axis
        (torch.empty(6, 8, 1, 2)[..., 0], None),
    ],
)
def test_what_is_contiguous_is_seen_beside_axes_of_one_index(x, axis):
    single = [a for a, n in enumerate(x.shape) if n == 1]
    assert unit_axis(x, single) == axis


ROWS = """block rows(S)
  input x: f32[S, 40]
  input a: f32[S, 1]
  input b: f32[S]
  dim i = S
  dim j = 40
  result y[i, j]: f32
  result z[i]: f32
  forall i
    let e[i, j]: f32 = (x[i, j] - a[i, 0]) / b[i]
    let r[i]: f32 = sum[j] e[i, j]
    store z[i] over (i) = r[i]
    store y[i, j] over (i, j) = e[i, j] - r[i]
  return y, z
"""


@pytest.mark.parametrize(("unit", "order"), [(1, ("i", "j")), (0, ("j", "i"))])
def test_what_rows_have_one_of_turns_no_values(unit, order):
    """Two tensors of a number a row lie along the rows, the elements along what `unit` says: their order counts."""
    arranged = arrange(parse(ROWS), {"x": unit, "a": 0, "b": 0, "y": 1, "z": 0})
    assert [n.dims for n in walk(arranged.body) if isinstance(n, Let) and n.name == "e"] == [order]


POOLED = """block pooled(S)
  input x: f32[S, 32, 14, 28]
  input a: f32[32]
  dim i = S
  dim j = 32
  dim k = 14
  dim l = 14
  result y[i, j, k, l]: f32
  forall i
    let e[i, j, k, l]: f32 = maximum(x[i, j, k, l * 2], x[i, j, k, l * 2 + 1]) + a[j]
    store y[i, j, k, l] over (i, j, k, l) = e[i, j, k, l] * 2.0
  return y
"""


@pytest.mark.parametrize(("unit", "order"), [(3, ("i", "j", "k", "l")), (1, ("i", "k", "l", "j"))])
def test_every_second_element_is_nearer_than_those_of_other_rows(unit, order):
    """One number a channel does not turn images whose columns lie side by side; channels that do, do."""
    arranged = arrange(parse(POOLED), {"x": unit, "a": 0, "y": 3})
    assert [n.dims for n in walk(arranged.body) if isinstance(n, Let) and n.name == "e"] == [order]
