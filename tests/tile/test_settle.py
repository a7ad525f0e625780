"""What is known in a part of a loop is put into expressions."""

from __future__ import annotations

from tilefold.algebra.expr import Expr, Index, call
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


def test_places_that_are_one_number_decide_conditions():
    place = {Index("j"): 2, call("tile_start", Index("i")): 64}.get
    assert settle(expr("where(j + 1 < 3, b[i], b[j])"), {}, {}, {}, place) == expr("b[2]")
    assert settle(call("add", call("tile_start", Index("i")), Index("i")), {}, {}, {}, place) == expr("64 + i")


def test_a_condition_is_known_as_it_was_settled():
    condition = expr("i < 3")
    e = expr("where(i < j + 1, b[i], b[j])")
    assert settle(e, {condition: True}, {}, {}, {Index("j"): 2}.get) == expr("b[i]")
