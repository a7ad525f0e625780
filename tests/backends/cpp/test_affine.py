"""Bounds of index expressions against every value that they have: never too tight, and for linear ones exact."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym, call
from tilefold.algebra.philox import BITS, FEW_BITS
from tilefold.backends.cpp.affine import INT64, in_range, interval

SIZES = {"i": Const(3, DType.I64), "j": Const(4, DType.I64)}
LIMIT = 3  # of indices and sizes; symbols lie on both sides of 0


def const(n: int) -> Const:
    return Const(n, DType.I64)


def value(e: Expr, at: dict[Expr, int]) -> int:
    match e:
        case Const(v, _):
            return int(v)
        case Call(op, args):
            a = [value(x, at) for x in args]
            return int(MEANING[op](*a))
    return at[e]


MEANING = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "neg": lambda a: -a,
    "abs": abs, "maximum": max, "minimum": min, "lt": lambda a, b: a < b, "where": lambda c, a, b: a if c else b,
    "floordiv": lambda a, b: a // b if b else 0, "mod": lambda a, b: a % b if b else 0,
    "sign": lambda a: (a > 0) - (a < 0), "within": lambda a, n: min(max(a, 0), max(n - 1, 0)),
}  # fmt: skip
LEAVES = (Index("i"), Size("i"), Sym("n"))
RANGE = {LEAVES[0]: range(LIMIT + 1), LEAVES[1]: range(LIMIT + 1), LEAVES[2]: range(-LIMIT, LIMIT + 1)}


def expressions(depth: int = 3) -> st.SearchStrategy[Expr]:
    leaf = st.one_of(st.sampled_from(LEAVES), st.integers(-4, 4).map(const))
    if depth == 0:
        return leaf
    inner = expressions(depth - 1)
    unary = st.builds(call, st.sampled_from(("neg", "abs", "sign")), inner)
    names = ("add", "sub", "mul", "maximum", "minimum", "floordiv", "mod", "lt", "within")
    binary = st.builds(call, st.sampled_from(names), inner, inner)
    chosen = st.builds(lambda a, b, c: call("where", call("lt", a, 0), b, c), inner, inner, inner)
    return st.one_of(leaf, unary, binary, chosen)


def test_a_part_is_looked_at_once() -> None:
    e: Expr = Load("x", ())
    for _ in range(60):
        e = call("add", e, Load("x", ()))
    asked: list[str] = []
    assert interval(e, lambda t: asked.append(t) or DType.I8, LIMIT) == (-128 * 61, 127 * 61)
    assert len(asked) == 61


@given(expressions())
def test_every_value_lies_in_the_interval(e: Expr) -> None:
    lo, hi = interval(e, lambda _: DType.I64, LIMIT)
    values = [value(e, dict(zip(LEAVES, at, strict=True))) for at in product(*(RANGE[x] for x in LEAVES))]
    assert lo <= min(values) and max(values) <= hi


i, n = Index("i"), Sym("n")


@pytest.mark.parametrize(
    ("e", "bounds"),
    [
        (i, (0, 3)),
        (n, (-3, 3)),
        (const(7), (7, 7)),
        (i - n, (-3, 6)),
        (i + n, (-3, 6)),
        (-i, (-3, 0)),
        (i * n, (-9, 9)),
        (call("abs", n), (0, 3)),
        (call("maximum", i, const(-2)), (-2, 3)),
        (call("sign", i), (-1, 3)),
        (call("sign", const(0)), (-1, 1)),
        (call("floordiv", i, const(5)), (-5, 5)),
        (call("lt", i, n), (0, 1)),
        (call("within", n, const(2)), (0, 1)),
        (call("within", const(-5), const(2)), (0, 0)),
        (Call("random", ()), (0, 2**BITS - 1)),
        (Call("random16", ()), (0, 2**FEW_BITS - 1)),
        (call("within", i, const(9)), (0, 3)),
        (call("where", call("lt", i, n), const(5), n), (-3, 5)),
        (Load("x", (i,)), (-128, 127)),
        (Cast(n, DType.U8), (0, 255)),
        (Cast(n, DType.BOOL), (0, 1)),
        (const(INT64[1]) + i, INT64),
        (const(INT64[0]) - i, INT64),
        (const(INT64[1] - 3) + i, (INT64[1] - 3, INT64[1])),
        (const(INT64[0] + 3) - i, (INT64[0], INT64[0] + 3)),
        (call("exp", i), INT64),
    ],
)
def test_intervals_are_as_tight_as_this(e: Expr, bounds: tuple[int, int]) -> None:
    assert interval(e, lambda _: DType.I8, LIMIT) == bounds


@given(st.integers(-3, 3), st.integers(-3, 3), st.integers(-9, 15), st.integers(1, 25))
def test_linear_indices_are_in_range_exactly_where_all_of_them_are(a: int, b: int, c: int, extent: int) -> None:
    e = Index("i") * a + Index("j") * b + c
    inside = all(0 <= a * x + b * y + c < extent for x in range(3) for y in range(4))
    assert in_range(e, const(extent), SIZES) == inside


def test_what_is_not_known_is_not_in_range() -> None:
    assert not in_range(Load("x", ()), const(100), SIZES)
    assert not in_range(Index("k"), const(100), SIZES)  # no dim of the kernel
    assert not in_range(-Index("i"), const(100), SIZES) and not in_range(-Index("i"), const(3), {"i": const(2)})
    assert not in_range(Sym("n"), const(100), SIZES) and not in_range(const(0), Sym("n"), SIZES)
    moved = {"i": Sym("n"), "j": const(4)}
    assert in_range(Index("i"), Sym("n"), moved) and not in_range(Index("i") + 1, Sym("n"), moved)
    assert not in_range(Index("i"), Sym("m"), moved) and not in_range(Index("i"), Sym("n") + Sym("m"), moved)
    assert in_range(Index("i") + 1, Sym("n") + 1, moved) and not in_range(Index("i") - 1, Sym("n"), moved)


def test_what_is_checked_is_in_range_of_what_it_is_checked_against_only() -> None:
    e = call("within", Load("x", ()), Sym("n") + 1)
    assert in_range(e, Sym("n") + 1, SIZES) and in_range(e, 1 + Sym("n"), SIZES)
    assert not in_range(e, Sym("n"), SIZES) and not in_range(e, Sym("n") + 2, SIZES)
