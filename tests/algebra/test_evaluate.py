"""What an expression means, and how often its parts are computed."""

from __future__ import annotations

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import Const, Index, Load, call


def test_what_an_expression_has_several_times_is_evaluated_once():
    """Of sixteen doublings, 65,536 loads as a tree."""
    asked = []

    def read(name, at):
        asked.append(name)
        return torch.ones(3, dtype=torch.float64)[at[0]]

    e = Load("x", (Index("i"),))
    for _ in range(16):
        e = e + e
    found = evaluate(e, Grid({"i": (0, 3)}), Env(read, {"i": 3}, {}, exact=True))
    assert asked == ["x"] and found.tolist() == [2.0**16] * 3


def test_zeros_of_both_signs_are_two_numbers():
    zero, minus = (call("div", 1.0, Const(z, DType.F32)) for z in (0.0, -0.0))
    found = evaluate(call("minimum", zero, minus), Grid({}), Env(lambda name, at: at[0], {}, {}))
    assert found.item() == -torch.inf
