"""Which statements share loops: what one writes and another touches is at one place of every shared loop."""

from __future__ import annotations

from typing import Any

import pytest

from tilefold.algebra.expr import Expr, Index, Load
from tilefold.backends.cpp import nests
from tilefold.backends.cpp.nests import Step, groups

AT, ALONG = Index("i"), Index("j")
FACTS: Any = None  # what only the choice of strips asks, which is given here


def step(target: str, expr: Expr, *index: Expr) -> Step:
    index = index or (AT,)
    return Step(target, index, tuple(e.dim for e in index if isinstance(e, Index)), expr)


def at(tensor: str, *index: Expr) -> Load:
    return Load(tensor, index or (AT,))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps whose strip was asked for; it is always i."""
    found: list[Step] = []
    monkeypatch.setattr(nests, "best_strip", lambda s, _: found.append(s) or "i")
    return found


CASES = {
    "read where it was written": ([step("t", at("x")), step("u", at("t"))], [2]),
    "read beside it": ([step("t", at("x")), step("u", at("t", AT + 1))], [1, 1]),
    "written beside where it was read": ([step("u", at("t", AT + 1)), step("t", at("x"))], [1, 1]),
    "written beside where it was written": ([step("t", at("x")), step("t", at("x"), AT + 1)], [1, 1]),
    "the first of two before": ([step("t", at("x")), step("v", at("x")), step("u", at("t", AT + 1))], [2, 1]),
    "nothing of each other": ([step("t", at("x")), step("u", at("x", AT + 1))], [2]),
    "along j alone, which is not shared": ([step("t", at("x"), AT, ALONG), step("u", at("t", AT, ALONG + 1))], [2]),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_share_loops_where_each_meets_the_others_at_one_place(case: str, asked: list[Step]) -> None:
    steps, sizes = CASES[case]
    found = groups(steps, FACTS)
    assert [len(g.steps) for g in found] == sizes
    assert [s for g in found for s in g.steps] == steps


def test_only_the_dims_that_all_share_are_common(asked: list[Step]) -> None:
    (group,) = groups(
        [step("t", at("x"), AT, ALONG), step("u", at("t", AT, ALONG), AT, ALONG), step("v", at("u", AT, ALONG))], FACTS
    )
    assert (group.common, group.strip) == (("i",), "i")


def test_the_strip_of_each_step_is_looked_for_once(asked: list[Step]) -> None:
    steps = [step(f"t{n + 1}", at(f"t{n}")) for n in range(30)]
    (group,) = groups(steps, FACTS)
    assert group.steps == tuple(steps)
    assert asked == steps
