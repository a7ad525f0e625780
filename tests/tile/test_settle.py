"""What is known in a part of a loop is put into expressions."""

from __future__ import annotations

from tilefold.algebra.expr import Expr
from tilefold.algebra.text import Names, parse
from tilefold.tile.settle import settle


def expr(text: str) -> Expr:
    return parse(text, Names(dims={"i", "j"}, tensors={"b"}, syms=set()))


def test_known_conditions_and_scales_are_put_in():
    e = expr("where(j <= i, b[i] + 1.0, -inf)")
    (condition, *_) = e.args
    assert settle(e, {condition: True}, {}, {}) == expr("b[i] + 1.0")
    assert settle(e, {condition: False}, {}, {}) == expr("-inf")
    assert settle(e, {}, {}, {}) == e
    scaled = settle(expr("b[i] + b[j]"), {}, {}, {"b": 0.5})
    assert scaled == expr("b[i] * 0.5 + b[j] * 0.5")
