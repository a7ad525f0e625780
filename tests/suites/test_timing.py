"""Interleaved timing, and the memory policy."""

from __future__ import annotations

import time

import pytest

from tilefold.suites.timing import Series, interleave, kept_memory


def test_contenders_take_turns():
    order = []
    found = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, budget=5.0, rounds=4, warmup=1)
    assert order == ["a", "b"] * 5
    assert [len(s.seconds) for s in found.values()] == [4, 4]


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
