"""Interleaved timing, and the memory policy."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise, permutations

import pytest

from tilefold.suites.timing import Series, in_turn, interleave, kept_memory


def test_contenders_take_turns():
    order = []
    found = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, budget=5.0, rounds=4, warmup=1)
    rounds = [tuple(order[n : n + 2]) for n in range(0, 10, 2)]
    assert rounds[0] == ("a", "b") and sorted(rounds[1:]) == [("a", "b")] * 2 + [("b", "a")] * 2
    assert [len(s.seconds) for s in found.values()] == [4, 4]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7])
def test_each_contender_has_each_place_and_follows_each_other_one_equally_often(count):
    names = tuple("abcdefg"[:count])
    orders = [in_turn(names, n) for n in range(2 * count * 3)]
    for place in range(count):
        assert Counter(o[place] for o in orders) == dict.fromkeys(names, 6)
    followed = Counter(pair for o in orders for pair in pairwise(o))
    assert followed == dict.fromkeys(permutations(names, 2), 6)


def test_one_contender_or_none_is_in_turn():
    assert in_turn((), 3) == () and in_turn(("a",), 3) == ("a",)


def test_rounds_do_not_always_begin_after_the_same_end():
    names = tuple("abcd")
    orders = [in_turn(names, n) for n in range(200)]
    between = Counter((a[-1], b[0]) for a, b in pairwise(orders))
    assert len(between) == 16 and max(between.values()) < 40


def test_the_budget_ends_the_series_but_not_before_three_rounds():
    found = interleave({"slow": lambda: time.sleep(0.01)}, budget=0.0, rounds=50)
    assert len(found["slow"].seconds) == 3
    assert found["slow"].median >= 0.01


def test_ratios_are_taken_round_by_round():
    """A machine that slows down tenfold half-way changes no ratio."""
    ours, theirs = Series((1.0, 1.0, 10.0, 10.0)), Series((2.0, 2.0, 20.0, 20.0))
    assert theirs.over(ours) == 2.0 and ours.over(theirs) == 0.5
    with pytest.raises(ValueError, match="shorter"):
        ours.over(Series((1.0,)))


def test_memory_policy_is_entered_and_left():
    with kept_memory() as kept:
        assert isinstance(kept, bool)
        assert bytearray(1 << 26)[-1] == 0
