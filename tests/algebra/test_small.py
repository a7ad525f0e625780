"""Simplification, differentiation, inversion, growth; sympy's and the process's state."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from tests.algebra import cascades as c
from tests.algebra.cascades import cascade
from tilefold import algebra
from tilefold.algebra.context import Options
from tilefold.algebra.derive import _derive, _derive_all, derive_fold
from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import Const, Expr, Load, substitute
from tilefold.algebra.growth import bounded_exponent, growth
from tilefold.algebra.invert import VARIABLE, invert
from tilefold.algebra.simplify import diff, number, powers, simplify, split_constant
from tilefold.algebra.symbolic import sympy
from tilefold.algebra.text import Names, parse, show
from tilefold.errors import ParseError


def e(text: str) -> Expr:
    return parse(text, Names(dims={"l"}, open_tensors=True))


def at(expr: Expr, **values: float) -> float:
    read = Env(lambda name, _: torch.tensor(values[name], dtype=torch.float64), {}, {}, exact=True)
    return float(evaluate(expr, Grid({}), read))


@pytest.mark.parametrize("value", [0, 2**63 - 1, -(2**63 - 1), -(2**63)])
def test_whole_numbers_have_64_bits(value: int) -> None:
    assert e(str(value)) == Const(value, DType.I64) and show(e(str(value))) == str(value)


@pytest.mark.parametrize("text", [str(2**63), str(-(2**63) - 1), f"x - {2**63}"])
def test_more_bits_are_refused(text: str) -> None:
    with pytest.raises(ParseError, match="more than 64 bits"):
        e(text)


@pytest.mark.parametrize(
    ("text", "want"),
    [("x * 1.0", "x"), ("0.0 + x", "x"), ("x - -y", "x + y"), ("x + -y", "x - y"), ("-(-x)", "x"),
     ("-(x - y)", "y - x"), ("x / 1.0", "x"), ("-1.0 * x", "-x"), ("x * 0.0", "x * 0.0"), ("x - x", "x - x")],
)  # fmt: skip
def test_simplify(text: str, want: str) -> None:
    assert show(simplify(e(text))) == want


@pytest.mark.parametrize(
    "text", ["(x - u) ** 3", "w * (x - u) * (y - u)", "u", "-(u / 2.0) + x", "where(x > 1.0, u * u, x)"]
)
def test_derivatives_match_differences(text: str) -> None:
    u, h = Load("u", ()), 1e-6
    d = diff(e(text), u)
    assert d is not None
    values = {"x": 1.7, "y": 0.4, "w": 2.2}
    slope = (at(e(text), u=0.9 + h, **values) - at(e(text), u=0.9 - h, **values)) / (2 * h)
    assert at(d, u=0.9, **values) == pytest.approx(slope, rel=1e-6)


def test_derivatives_outside_polynomials() -> None:
    assert diff(e("x * y"), Load("u", ())) is None
    with pytest.raises(ValueError):
        diff(e("exp(u)"), Load("u", ()))


def test_equal_factors_become_powers() -> None:
    assert show(powers(e("(x - u) * w * (x - u) * (x - u)"))) == "(x - u) ** 3 * w"
    assert show(powers(e("x ** 2 * x + y * z"))) == "x ** 3 + y * z"


def test_split_constant() -> None:
    k, rest = split_constant(e("-(3.0 * (x * 0.5))"))
    assert float(k) == -1.5 and show(rest) == "x"


@pytest.mark.parametrize(
    "text", ["exp(C - m)", "C / t", "t / C", "(C / t) ** 2", "sqrt(C + m)", "rsqrt(C)", "m - log(C)", "expm1(C) * t"]
)
def test_inverse(text: str) -> None:
    g = substitute(e(text), {Load("C", ()): VARIABLE})
    back = invert(g, Load("y", ()))
    assert back is not None
    y = at(substitute(g, {VARIABLE: number(1.3)}), m=0.4, t=2.5)
    assert at(back, y=y, m=0.4, t=2.5) == pytest.approx(1.3)


def test_no_inverse() -> None:
    assert invert(substitute(e("C * exp(C)"), {Load("C", ()): VARIABLE}), Load("y", ())) is None
    assert invert(substitute(e("floor(C)"), {Load("C", ()): VARIABLE}), Load("y", ())) is None


def test_growth_and_bounded_exponents() -> None:
    ctx = _derive_all(cascade(c.ATTENTION), Options(guards=False))
    body = ctx.bodies["t"]
    assert growth(body, ctx) == {} and growth(e("x[l] ** 2 * y"), ctx) == {"x": 2.0, "y": 1.0}
    assert growth(e("exp(x[l])"), ctx) == {"x": float("inf")} and growth(e("exp(-abs(x))"), ctx) == {}
    assert bounded_exponent(body.args[0], ctx) and not bounded_exponent(e("p[0, l] - q"), ctx)


def test_sympy_state_is_untouched_and_loaded_late() -> None:
    sp = sympy()
    before = (sp.Symbol.__init__, sp.simplify, dict(vars(sp.core.parameters.global_parameters)))
    _derive.cache_clear()
    for text in (c.ATTENTION, c.MOMENTS, c.SUM_SUM):
        derive_fold(cascade(text))
    after = (sp.Symbol.__init__, sp.simplify, dict(vars(sp.core.parameters.global_parameters)))
    assert before == after
    assert sp.Symbol("x").is_positive is None


def test_solvers_are_loaded_only_when_a_proof_needs_them() -> None:
    for path in Path(algebra.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"sympy", "z3"} & set(names), path.name
