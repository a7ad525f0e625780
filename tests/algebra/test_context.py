"""What is known of state variables while a cascade is derived."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tilefold.algebra.context import Context, Info, Options
from tilefold.algebra.facts import Range
from tilefold.algebra.known import held_sum
from tilefold.algebra.text import Names, parse

NAMES = Names(dims={"l"}, open_tensors=True)


def context(reducer: str, identity: float, known: Range) -> Context:
    """Of a state variable `m`, a reduction of x[l]."""
    cascade: Any = SimpleNamespace(axes=("l",), input_dtypes=(), inputs=(), few=False)
    ctx = Context(cascade, Options())
    var: Any = SimpleNamespace(name="m", dims=(), reducer=reducer, identity=SimpleNamespace(value=identity))
    x = parse("x[l]", NAMES)
    ctx.infos["m"] = Info(var, x, known, ctx.separate(x))
    return ctx


@pytest.mark.parametrize(
    ("reducer", "identity", "known", "partial"),
    [
        ("max", -math.inf, Range(2.0, 3.0, True), (-math.inf, 3.0, True)),
        ("min", math.inf, Range(-3.0, -2.0, True), (-3.0, math.inf, True)),
        ("sum", 0.0, Range(2.0, 3.0, True), (0.0, 3.0, False)),
        ("sum", 0.0, Range(-3.0, -2.0, True), (-3.0, 0.0, False)),
        ("prod", 1.0, Range(0.0, 0.5, False), (0.0, 1.0, False)),
    ],
)
def test_the_state_of_no_elements_is_its_identity(
    reducer: str, identity: float, known: Range, partial: tuple[float, float, bool]
) -> None:
    ctx = context(reducer, identity, known)
    m = ctx.infos["m"].load
    found = ctx.range(m, partial=True)
    assert (found.lo, found.hi, found.never_zero) == partial
    assert ctx.range(m) == known


@pytest.mark.parametrize(("reducer", "held"), [("sum", True), ("max", False), ("prod", False)])
def test_a_sum_is_kept_by_sums_alone(reducer: str, held: bool) -> None:
    r: Any = SimpleNamespace(dims=(), axes=("l",))
    found = held_sum(parse("2.0 * x[l]", NAMES), r, context(reducer, 0.0, Range()))
    assert (found is not None) is held
