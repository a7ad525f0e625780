"""Size expressions: values, estimates and host functions agree with Python's integers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilefold.algebra.expr import Call, Expr, Index, Size, Sym
from tilefold.tensor.index_simplify import const
from tilefold.tensor.sizes import TYPICAL_EXTENT, estimate, extent, extents, shape_function

PYTHON = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b, "maximum": max, "minimum": min,
}  # fmt: skip


@st.composite
def sizes(draw: st.DrawFn, depth: int = 3) -> tuple[Expr, int]:
    """A size over the symbols n = 7 and m = 12, and its value."""
    if depth == 0 or draw(st.booleans()):
        leaf = draw(st.sampled_from([(Sym("n"), 7), (Sym("m"), 12), None]))
        k = draw(st.integers(0, 30))
        return leaf or (const(k), k)
    op = draw(st.sampled_from(sorted(PYTHON)))
    a, x = draw(sizes(depth=depth - 1))
    b, y = draw(sizes(depth=depth - 1))
    if op in ("floordiv", "mod") and y == 0:
        b, y = const(5), 5
    return Call(op, (a, b)), PYTHON[op](x, y)


@settings(max_examples=200, deadline=None)
@given(sizes())
def test_values_and_host_functions(case: tuple[Expr, int]) -> None:
    e, want = case
    syms = {"n": 7, "m": 12}
    assert extent(e, syms) == want
    assert shape_function([e, const(3)])(syms) == (want, 3)
    assert estimate(e, syms) >= 0 or want < 0


def test_run_time_extents_of_dims() -> None:
    assert extent(Size("i") * const(2), {}, {"i": 9}) == 18
    with pytest.raises(KeyError):
        extent(Size("i"), {}, {})


def test_estimates_take_typical_symbols_and_never_fail() -> None:
    n = Sym("n")
    assert estimate(n * const(2)) == 2 * TYPICAL_EXTENT
    assert estimate(Call("sub", (const(3), n))) == 0
    assert estimate(Call("floordiv", (const(6), Call("sub", (const(3), n))))) == 6
    assert extents({"i": n, "j": const(6)}, {"n": 9}) == {"i": 9, "j": 6}


@pytest.mark.parametrize("e", [Index("i"), Call("exp", (Sym("n"),)), Call("div", (Sym("n"), const(2)))])
def test_what_is_no_size_is_refused(e: Expr) -> None:
    for evaluate in (lambda: extent(e, {"n": 1}), lambda: estimate(e), lambda: shape_function([e])):
        with pytest.raises(AssertionError, match="not a size"):
            evaluate()
