"""Strips in pieces: where conditions flip, what holds on each piece, and when pieces are worth their code."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilefold
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, loads
from tilefold.backends.cpp.pieces import WHOLE, pieces
from tilefold.backends.cpp.scope import Facts
from tilefold.tile.text import parse

SIGNS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
I = Index("i")  # noqa: E741


def number(n: int) -> Const:
    return Const(n, DType.I64)


def facts(length: int | None, extent: int) -> Facts:
    text = f"kernel k(N)\n  dim i = {'N' if length is None else length}\n  in x: f32[{extent}] unit 0\n"
    text += f"  out y: f32[{'N' if length is None else length}] unit 0\n  grid i:64\n    store y[i] over i = x[0]\n"
    found = Facts(parse(text))
    found.static["i"] = length
    return found


def either(op: str, k: int, c: int, extent: int) -> Expr:
    """x at a place that is inside on one side of the comparison alone."""
    return Call("where", (Call(op, (number(k) * I, number(c))), Load("x", (I,)), Load("x", (I - number(extent),))))


@given(op=st.sampled_from(sorted(SIGNS)), k=st.sampled_from([-3, -2, -1, 1, 2, 3]), c=st.integers(-90, 90))
def test_conditions_hold_on_all_of_a_piece(op: str, k: int, c: int):
    for p in pieces([either(op, k, c, 40)], "i", facts(80, 40)):
        for condition, value in p.facts.items():
            assert isinstance(condition, Call)
            assert all(SIGNS[op](k * i, c) == value for i in range(p.low, 80 if p.high is None else p.high))


@pytest.mark.parametrize("length", [None, 80])
def test_halves_are_two_pieces_that_need_no_clamping(length: int | None):
    first, second = pieces([either("lt", 1, 40, 40)], "i", facts(length, 40))
    assert (first.low, first.high, second.low, second.high) == (0, 40, 40, None)
    assert loads(first.settled(either("lt", 1, 40, 40))) == (Load("x", (I,)),)


def test_pieces_that_spare_nothing_are_not_made():
    inside = Call("where", (Call("lt", (I, number(40))), Load("x", (I,)), Const(0.0, DType.F32)))
    assert pieces([inside], "i", facts(80, 80)) == (WHOLE,)  # nothing to clamp
    many = [either("lt", 1, n, 40) for n in (8, 16, 24, 32)]
    assert pieces(many, "i", facts(None, 40)) == (WHOLE,)  # too much code
    assert pieces([either("lt", 1, 90, 40)], "i", facts(80, 40)) == (WHOLE,)  # it never flips


def test_ranges_of_tiles_are_cut_where_pieces_end():
    first, second = pieces([either("le", 1, 39, 40)], "i", facts(80, 40))
    assert first.range("0", "i_1") == ("0", "tf::min64(i_1, 40)")
    assert second.range("i_0", "i_1") == ("tf::max64(i_0, 40)", "i_1")
    assert second.range("0", "80") == ("40", "80")


def test_what_holds_on_a_tile_may_not_hold_on_the_next_one():
    """Strips of 64 elements: after the first tile, the second half begins within one."""
    f = facts(152, 100)
    f.static["i"] = 64
    parts = pieces([either("lt", 1, 100, 100)], "i", f)
    assert [(p.low, p.high, list(p.facts.values())) for p in parts] == [(0, 100, [True]), (100, None, [False])]


@pytest.mark.parametrize("rows", [3, 24])
def test_three_parts_side_by_side_in_tiles_of_a_product(rows):
    """Gradients of a projection that is split: 152 columns, of which a tile of a product has 128."""
    a, b, c = torch.randn(rows, 64), torch.randn(80, rows), torch.randn(rows, 8)
    x = torch.randn(rows, 32)

    def fn(a, b, c, x):
        return torch.cat([a, b.mT, (c * 2).exp()], -1).mT @ x

    for goal in ("fused", "fast"):
        got = tilefold.fuse(fn, goal=goal)(a, b, c, x)
        torch.testing.assert_close(got, fn(a, b, c, x), rtol=1e-5, atol=1e-5)
