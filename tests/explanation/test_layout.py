"""The drawing: rows, no overlaps, few crossings."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilefold.explanation.layout import CORNER, GAP_X, Box, Link, apart, crossings, place, rows, spread


def test_a_chain_goes_straight_down():
    d = place([Box("a", 40, 20), Box("b", 80, 20), Box("c", 40, 20)], [Link("a", "b"), Link("b", "c")])
    assert d.at["a"][1] < d.at["b"][1] < d.at["c"][1]
    assert d.at["a"][0] + 20 == pytest.approx(d.at["b"][0] + 40) == pytest.approx(d.at["c"][0] + 20)
    assert (d.width, d.height) == (80, 20 * 3 + 44 * 2)


def test_links_start_and_end_at_their_boxes():
    d = place([Box("a", 40, 20), Box("b", 40, 20)], [Link("a", "b", 10, -5)])
    (route,) = d.routes
    assert route[0] == pytest.approx((d.at["a"][0] + 30, 20))
    assert route[-1] == pytest.approx((d.at["b"][0] + 15, d.at["b"][1]))


def test_sources_stand_above_their_first_target():
    found = rows({"x", "a", "b", "w"}, [("x", "a"), ("a", "b"), ("w", "b")], ["x", "a", "b", "w"])
    assert found == {"x": 0, "a": 1, "w": 1, "b": 2}


def test_a_cycle_is_refused():
    with pytest.raises(ValueError, match="cycle"):
        place([Box("a", 1, 1), Box("b", 1, 1)], [Link("a", "b"), Link("b", "a")])


def test_a_link_to_nowhere_is_refused():
    with pytest.raises(KeyError):
        place([Box("a", 1, 1)], [Link("a", "b")])


def test_crossings_are_counted_and_removed():
    below = {"a": ["d"], "b": ["c"]}
    assert crossings([["a", "b"], ["c", "d"]], below) == 1
    assert crossings([["a", "b"], ["d", "c"]], below) == 0
    boxes = [Box(n, 10, 10) for n in "abcd"]
    d = place(boxes, [Link("a", "d"), Link("b", "c")])
    assert (d.at["a"][0] < d.at["b"][0]) == (d.at["d"][0] < d.at["c"][0])


@given(st.lists(st.tuples(st.floats(-500, 500), st.floats(1, 90)), min_size=1, max_size=8))
def test_spread_keeps_order_and_distance(items):
    wanted, widths = zip(*items, strict=True)
    x = spread(wanted, widths)
    for k in range(1, len(x)):
        assert x[k] - x[k - 1] >= (widths[k] + widths[k - 1]) / 2 + GAP_X - 1e-6
    assert sum(x) == pytest.approx(sum(wanted), abs=1e-3)  # blocks sit at the mean of what they want


@given(st.lists(st.floats(-500, 500), min_size=2, max_size=6), st.floats(1, 300))
def test_ends_of_one_side_stand_apart_within_it(wanted, limit):
    x = apart(sorted(wanted), limit)
    assert min(b - a for a, b in pairwise(x)) >= min(58, 2 * limit / (len(x) - 1)) - 1e-6
    assert -limit - 1e-6 <= x[0] and x[-1] <= limit + 1e-6


def test_links_of_one_box_leave_it_apart_and_do_not_cross():
    boxes = [Box("a", 200, 20), *(Box(n, 60, 20) for n in "bcd")]
    d = place(boxes, [Link("a", n) for n in "bcd"])
    starts = {n: route[0][0] for n, route in zip("bcd", d.routes, strict=True)}
    assert sorted(starts, key=starts.get) == sorted("bcd", key=lambda n: d.at[n][0])
    assert min(b - a for a, b in pairwise(sorted(starts.values()))) > 50
    assert d.at["a"][0] + CORNER <= min(starts.values()) and max(starts.values()) <= d.at["a"][0] + 200 - CORNER


def test_boxes_of_a_random_graph_do_not_overlap():
    rng = random.Random(4)
    boxes = [Box(f"n{i}", rng.randint(20, 160), rng.randint(14, 60)) for i in range(24)]
    links = [Link(f"n{rng.randrange(i)}", f"n{i}") for i in range(1, 24) for _ in range(2)]
    d = place(boxes, links)
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            (xa, ya), (xb, yb) = d.at[a.name], d.at[b.name]
            apart_x = xa + a.width <= xb + 1e-6 or xb + b.width <= xa + 1e-6
            apart_y = ya + a.height <= yb + 1e-6 or yb + b.height <= ya + 1e-6
            assert apart_x or apart_y, (a.name, b.name)


def test_pinned_boxes_stand_in_the_first_and_last_row():
    boxes = [Box(n, 10, 10) for n in ("x", "a", "b", "w", "out", "late")]
    links = [Link("x", "a"), Link("a", "b"), Link("w", "b"), Link("a", "out"), Link("b", "late")]
    free, pinned = place(boxes, links), place(boxes, links, top=frozenset("w"), bottom=frozenset({"out"}))
    assert free.at["w"][1] > free.at["x"][1] and pinned.at["w"][1] == pinned.at["x"][1]
    assert free.at["out"][1] < free.at["late"][1] and pinned.at["out"][1] == pinned.at["late"][1]
    assert len(pinned.routes[2]) == 4  # a lane beside `a`
