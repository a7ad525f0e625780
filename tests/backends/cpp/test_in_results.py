"""Tiles that are kept in the result made of them: which are, and that the result is the same."""

from __future__ import annotations

import pytest
import torch

from tests.backends.cpp.harness import compare, hostile
from tilefold.backends.cpp.in_results import in_results
from tilefold.tile.ir import Alloc
from tilefold.tile.text import parse

SOFTMAX = """
kernel rows(R, C)
  dim i = R
  dim j = C
  in x: f32[R, C] unit 1
  in b: f32[C] unit 0
  out y: {out}[R, C] unit {unit}
  out z: f32[R, C] unit 1
  grid i:3
    alloc m: f32[i:3] tile
    m = max over j: x[i, j]
    alloc e: f32[i:3, j:size(j)] panel
    e[i, j] = exp(x[i, j] - m[i])
    alloc t: f32[i:3] tile
    t = sum over j: {summed}
    store y[i, j] over i, j = e[i, j] / t[i] + b[j]
    store z[i, j] over i, j = {other}
"""
USUAL = {"out": "f32", "unit": 1, "summed": "e[i, j]", "other": "x[i, j] * t[i]"}


def tiles(**changed: object) -> set[str]:
    body = in_results(parse(SOFTMAX.format(**USUAL | changed))).body
    return {s.buffer.name for s in body if isinstance(s, Alloc)}


@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (7, 1000), (0, 4)])
@pytest.mark.parametrize("changed", [{}, {"other": "e[i, j]"}, {"out": "bf16"}, {"summed": "x[i, j]"}])
def test_results_are_the_same(shape, changed):
    torch.manual_seed(0)
    kind = torch.bfloat16 if changed.get("out") == "bf16" else torch.float32
    args = {"x": hostile(*shape, huge=50.0), "b": torch.randn(shape[1])}
    args |= {"y": torch.empty(shape, dtype=kind), "z": torch.empty(shape)}
    exact = {"rtol": 1e-2, "atol": 1e-2} if kind is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    compare(SOFTMAX.format(**USUAL | changed), args, {"R": shape[0], "C": shape[1]}, **exact)


def test_a_tile_that_one_result_is_made_of_is_kept_there():
    assert tiles() == {"m", "t"}
    assert tiles(other="e[i, j]") == {"m", "t"}  # in the one that is made of it last


@pytest.mark.parametrize(
    "changed",
    [
        {"other": "y[i, j]"},
        {"out": "bf16"},
        {"unit": 0},
        {"summed": "x[i, j]"},  # no reduction reads it: it is computed with the result
        {"summed": "e[i, j] + e[i, 0]"},
    ],
)
def test_others_stay_apart(changed):
    assert "e" in tiles(**changed)


TWO = """
kernel centred(R, C)
  dim i = R
  dim j = C
  in x: f32[R, C] unit 1
  in b: f32[C] unit 0
  out y: f32[R, C] unit 1
  grid i:3
    alloc e: f32[i:3, j:size(j)] panel
    e[i, j] = exp(x[i, j])
    alloc f: f32[i:3, j:size(j)] panel
    f[i, j] = x[i, j] - b[j]
    alloc t: f32[i:3] tile
    t = sum over j: e[i, j] * f[i, j]
    store y[i, j] over i, j = e[i, j] - f[i, j] * t[i]
"""


def test_a_result_has_room_for_one_tile():
    assert [s.buffer.name for s in in_results(parse(TWO)).body if isinstance(s, Alloc)] == ["f", "t"]
    args = {"x": torch.randn(4, 20), "b": torch.randn(20), "y": torch.empty(4, 20)}
    compare(TWO, args, {"R": 4, "C": 20}, rtol=1e-4, atol=1e-4)
