"""Index simplification: the laws by hand, and random expressions against evaluation."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Expr, Index, Load, Size, Sym, call
from tilefold.algebra.text import show
from tilefold.tensor.index_simplify import _nameless, const, divide, is_one, poly, product, same, simplify, within
from tilefold.tensor.sizes import extent

B, H, D = Sym("B"), Sym("H"), Sym("D")
SIZES = {"b": B, "h": H, "d": const(64), "j": D, "k": D + 1, "g": const(32), "n": B * H, "r": H // B}
b, h, d, j, k, g, n, r = (Index(x) for x in "bhdjkgnr")


def div(x: Expr, y: Expr | int) -> Expr:
    return x // y


@pytest.mark.parametrize(
    "e, want",
    [
        (div(h * 64 + d, 64), "h"),
        ((h * 64 + d) % 64, "d"),
        (div(b * H + h, H), "b"),
        ((b * H + h) % H, "h"),
        (div(b * (H * D) + h * D + j, D) % H, "h"),
        (div(b * (H * D) + h * D + j, H * D), "b"),
        (div(h * (D + 1) + k, D + 1), "h"),
        ((h * (D + 1) + k) % (D + 1), "k"),
        (div(b * (H // B) + r, H // B), "b"),  # H // B may be 0, but then r has no index
        ((b * (H // B) + r) % (H // B), "r"),
        (div(d + 64, 64), "1"),
        (div(div(g, 4), 2), "g // 8"),
        (div(g, 4) % 8, "g // 4"),
        (div(h * 64 + d, 448), "h // 7"),
        ((h * 64 + d) % 448, "d + h % 7 * 64"),
        (div((h * 64 + d) % 448, 64), "h % 7"),
        ((h * 64 + d) % 448 % 64 % 8, "d % 8"),
        (h % 12 % 4, "h % 4"),
        (div(n, H) * H + n % H, None),
        (j - D + 1, "j - D + 1"),
        (Size("n") - B * H, "0"),
        (g * 3 - g - g, "g"),
    ],
)
def test_laws(e, want):
    got = show(simplify(e, SIZES))
    if want is not None:
        assert got == want


@pytest.mark.parametrize(
    "e, kept",
    [
        (div(h * 64 + d + 1, 64), "//"),  # d + 1 may reach 64
        ((d - 1) % 64, "%"),  # d - 1 may be negative
        (div(d, 48), "//"),  # 48 does not divide
        (div(h * 64 + d + 32, 448), "32) //"),  # d + 32 may reach 64
        (h % 12 % 5, "% 12 % 5"),
        ((b * H + j) % H, "%"),  # j is not bounded by H
        (div(Load("ids", (h,)) * 64 + d, 128), "//"),
        (div(b * (H // B), H // B), "//"),  # H // B may be 0
        ((h * (H // B)) % (H // B), "%"),
    ],
)
def test_what_may_not_be_simplified(e, kept):
    assert kept in show(simplify(e, SIZES))


def test_indices_inside_loads_are_simplified():
    e = Load("x", (div(h * 64 + d, 64), Load("ids", ((h * 64 + d) % 64,))))
    assert show(simplify(e, SIZES)) == "x[h, ids[d]]"


def test_sizes_compare_as_polynomials():
    assert same(B * H * 2, H * (B + B)) and not same(B * H, B + H)
    assert show(product((B, const(1), const(3), B))) == "B * B * 3"
    assert is_one(const(1)) and not is_one(B) and not is_one(const(2))


EXTENTS = {"i": 6, "j": 4, "k": 1}


@st.composite
def expressions(draw, depth=3):
    if depth == 0 or draw(st.booleans()):
        leaf = draw(st.sampled_from([Index("i"), Index("j"), Index("k"), Sym("S"), 0]))
        return leaf if isinstance(leaf, Expr) else const(draw(st.integers(-5, 30)))
    op = draw(st.sampled_from(["add", "sub", "mul", "floordiv", "mod"]))
    left = draw(expressions(depth=depth - 1))
    right = const(draw(st.integers(1, 12))) if op in ("floordiv", "mod") else draw(expressions(depth=depth - 1))
    return Call(op, (left, right))


def evaluate(e: Expr, at: dict[str, int], s: int) -> int:
    match e:
        case Index(name):
            return at[name]
        case Call(op, args):
            return extent(Call(op, tuple(const(evaluate(a, at, s)) for a in args)), {})
    return extent(e, {"S": s})


@settings(max_examples=300, deadline=None)
@given(expressions(), st.integers(1, 5))
def test_random_expressions_keep_their_value(e, s):
    sizes = {name: const(extent) for name, extent in EXTENTS.items()}
    simple = simplify(e, sizes)
    assert simplify(simple, sizes) == simple
    for point in itertools.product(*(range(x) for x in EXTENTS.values())):
        at = dict(zip(EXTENTS, point, strict=True))
        assert evaluate(simple, at, s) == evaluate(e, at, s), (show(e), show(simple), at)


def test_nothing_is_cancelled_in_a_division_by_an_extent_of_no_elements():
    assert show(simplify(div(h, 0), SIZES)) == "h // 0"
    assert divide(poly(Size("n"), SIZES), {}) == ({}, poly(Size("n"), SIZES))


def test_what_is_remembered_of_a_division_cannot_be_changed():
    quotient = div(h * 64 + d, 64)
    poly(quotient, SIZES).clear()
    assert poly(quotient, SIZES) == {(h,): 1}


def test_positions_kept_inside_of_an_axis_are_inside_of_it():
    """Of images made larger: whatever the position is computed from, it lies between the first and the last."""
    sizes, at = {"d": const(131)}, Cast(Cast(d, DType.F32), DType.I64)
    rows = call("maximum", d * 65 - 33, 0) // 131
    assert within(poly(rows, sizes), {(): 65}, sizes) and not within(poly(rows, sizes), {(): 64}, sizes)
    for e in (call("minimum", rows + 1, 64), call("minimum", call("maximum", at - 1, 0), 64)):
        assert within(poly(e, sizes), {(): 65}, sizes) and not within(poly(e, sizes), {(): 64}, sizes)
    chosen = call("where", call("gt", at, 3), 32, 0) + call("where", call("gt", at, 5), 0, 16)  # a search, step by step
    assert within(poly(chosen, sizes), {(): 49}, sizes) and not within(poly(chosen, sizes), {(): 48}, sizes)
    for e in (call("minimum", at, 64), call("maximum", at, 0), call("maximum", call("minimum", at, 64), -1)):
        assert not within(poly(e, sizes), {(): 65}, sizes)


def test_what_differs_in_names_is_simplified_once() -> None:
    """Operators have dims of their own: the same index of others costs nothing. Terms are in the order of names."""
    sizes = {x: const(64) for x in ("u1", "u2", "u30", "v")}
    first = simplify(((Index("u1") * 64 + Index("u2")) * 7 + 5) % 64, sizes)
    known = _nameless.cache_info().misses
    other = simplify(((Index("u2") * 64 + Index("u30")) * 7 + 5) % 64, sizes)
    assert _nameless.cache_info().misses == known
    assert show(other) == show(first).replace("u2", "u30").replace("u1", "u2")
    assert show(simplify(Index("v") + Index("u1"), sizes)) == "u1 + v"
    assert show(simplify(Index("u1") + Index("v"), sizes)) == "u1 + v"
