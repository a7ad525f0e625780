"""Maps over a short axis that are read at other places are maps for each place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tilefold.frontend.fuse import trace
from tilefold.tensor import components
from tilefold.tensor.components import components_apart
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse, show

BOX = """program box()
  input x: f32[7, {n}]
  input s: f32[7, {n}]
  dim i = 7
  dim j = {n}
  dim k = {m}
  dim l = {m}
  a[i, j]: f32 = exp(x[i, j]) * s[i, j]
  b[i, j]: f32 = a[i, j] - s[i, j]
  y[i, k]: f32 = where(k < {n}, {plain}, {moved})
  z[i, l]: f32 = where(l < {n}, b[i, l], b[i, l - {n}] + a[i, l - {n}])
  return y, z{result}
"""


def box(n: int = 2, plain: str = "a[i, k]", moved: str = "", result: str = ""):
    return parse(BOX.format(n=n, m=2 * n, plain=plain, moved=moved or f"b[i, k - {n}]", result=result))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_place_is_a_map_of_what_is_in_front(n):
    p = box(n)
    q = components_apart(p)
    args = {t: torch.randn(7, n, dtype=torch.float64) for t in "xs"}
    want, found = run(p, args), run(q, args)
    for t in "yz":
        torch.testing.assert_close(found[t], want[t])
    made = [c for c in q.body if c.name not in "yz"]
    assert made and all(c.dims == ("i",) for c in made)
    assert "j" not in q.sizes


def test_long_axes_and_results_stay():
    assert components_apart(box(8)) == box(8)
    kept = components_apart(box(2, result=", b"))
    assert "b[i, j]: f32" in show(kept) and "a[i, j]: f32" not in show(kept)


def test_code_that_no_instruction_cache_holds_is_not_written_out(monkeypatch):
    assert components_apart(box()) is not box()
    monkeypatch.setattr(components, "MOST_WORK", 19)  # two exponentials, two products, two differences: 20
    assert components_apart(box()) == box()


def test_choices_of_readers_are_written_out_too(monkeypatch):
    monkeypatch.setattr(components, "MOST_WORK", 20)  # parts alone
    assert components_apart(box()) == box()
    monkeypatch.setattr(components, "MOST_WORK", 40)
    assert components_apart(box()) is not box()


def test_patches_of_a_small_image_are_soon_left_whole(monkeypatch):
    rounds = []
    monkeypatch.setattr(components, "_apart", lambda p, apart=components._apart: rounds.append(p) or apart(p))
    how = {"kernel_size": 3, "padding": 1, "stride": 2}
    trace(lambda x: F.fold(F.unfold(x, **how) * 2, (8, 6), **how), torch.randn(2, 3, 8, 6))
    assert 1 < len(rounds) < 8


def test_what_is_read_where_it_is_computed_stays():
    p = parse(BOX.format(n=2, m=2, plain="a[i, k]", moved="b[i, k]", result="").replace("l - 2", "l"))
    assert components_apart(p) is p
