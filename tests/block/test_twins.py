"""Groups that differ in names only have one key, and what is found for one is the other's in its own names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tilefold.block.group import Group
from tilefold.block.twins import Decided, Renaming, Twins
from tilefold.tensor.analysis import Graph
from tilefold.tensor.text import parse

#: Two layers: exponentials of rows less their maxima. The second reads what the first has written.
LAYERS = """
program layers()
  input x: f32[64, 512]
  input y: f32[64, 512]
  dim i = 64
  dim j = 512
  dim k = {rows}
  dim l = 512
  highest[i]: f32 = max[j] x[i, j]
  far[i, j]: f32 = exp(x[i, j] - highest[i])
  top[k]: f32 = max[l] {read}[k, l]
  away[k, l]: f32 = exp({read}[k, l] - top[k]){more}
  return {results}
"""


def twins(rows: int = 64, read: str = "y", more: str = "", results: str = "far, away") -> Twins:
    return Twins(Graph.of(parse(LAYERS.format(rows=rows, read=read, more=more, results=results))))


def test_layers_have_one_key_and_their_names_lead_from_one_to_the_other() -> None:
    t = twins()
    first, second = t.named(("highest", "far")), t.named(("top", "away"))
    assert first.key == second.key
    to = first.to(second)
    assert to.group(Group(("far",), ("i", "j"))) == Group(("away",), ("k", "l"))
    assert to.text("far reads highest across blocks of j") == "away reads top across blocks of l"


@pytest.mark.parametrize(
    "other",
    [
        lambda: twins(rows=32),  # another extent
        lambda: twins(more=" + 1.0"),  # other arithmetic
        lambda: twins(read="far"),  # of what a kernel made, not of an argument
        lambda: twins(results="far, away, top"),  # the maxima are wanted as well
    ],
)
def test_another_group_has_another_key(other: Callable[[], Twins]) -> None:
    t = other()
    assert t.named(("highest", "far")).key != t.named(("top", "away")).key


def test_which_tensors_are_the_same_decides() -> None:
    text = """
program products()
  input x: f32[64]
  input y: f32[64]
  dim i = 64
  a[i]: f32 = x[i] * y[i]
  b[i]: f32 = x[i] * x[i]
  c[i]: f32 = a[i] * x[i]
  d[i]: f32 = b[i] * x[i]
  return c, d
"""
    t = Twins(Graph.of(parse(text)))
    assert t.named(("a",)).key != t.named(("b",)).key
    assert t.named(("c",)).key == t.named(("d",)).key
    assert t.named(("a", "c")).key != t.named(("b", "d")).key


def test_what_is_decided_is_decided_once() -> None:
    t, asked = twins(), list[tuple[str, ...]]()

    def renamed(found: Group, names: Renaming) -> Group:
        return names.group(found)

    decided = Decided(renamed)

    def decide(members: tuple[str, ...], more: str = "") -> Group:
        def find() -> Group:
            asked.append(members)
            return Group(members, t.g.by_name[members[-1]].dims)

        return decided.of(t.named(members), more, find)

    assert decide(("highest", "far")) == Group(("highest", "far"), ("i", "j"))
    assert decide(("top", "away")) == Group(("top", "away"), ("k", "l"))
    assert asked == [("highest", "far")]
    decide(("top", "away"), "for another device")
    assert asked == [("highest", "far"), ("top", "away")]
