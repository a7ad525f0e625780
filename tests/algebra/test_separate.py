"""Separation of variables: the parts multiply back to the body, numerically and for every law."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import Expr, Load
from tilefold.algebra.facts import ANY, NONNEG, Range
from tilefold.algebra.separate import separate
from tilefold.algebra.simplify import total
from tilefold.algebra.terms import Inseparable, Mono, Scope, factor, scale, transparent
from tilefold.algebra.text import Names, parse, show

STATE = {"m", "t", "s", "q"}


def known(load: Load) -> Range:
    return NONNEG if load.tensor in ("t", "q", "z") else ANY


SCOPE = Scope(frozenset({"l"}), frozenset(STATE), known)


def body(text: str) -> Expr:
    return parse(text, Names(dims={"l", "e", "i"}, open_tensors=True))


def value(e: Expr) -> torch.Tensor:
    def read(name: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
        base = 0.3 + sum(map(ord, name)) % 7 * 0.2
        return torch.as_tensor(base + sum((i.double() * 0.37 for i in at), start=torch.tensor(0.0)))

    grid = Grid({"l": (0, 4), "e": (0, 2), "i": (0, 3)})
    return evaluate(e, grid, Env(read, {"l": 4, "e": 2, "i": 3}, {}, exact=True)).broadcast_to(grid.shape).double()


CASES = {
    "exp(x[l] - m)": 1,
    "exp(x[l] - m) / t * v[l, e]": 1,
    "exp2(0.5 * (x[l] - m))": 1,
    "exp(x[l] - (m + log(t)))": 1,
    "expm1(x[l] - m)": 2,
    "(x[l] / t) ** 2": 1,
    "(x[l] - s / size(l)) ** 3": 1,
    "(x[l] - s) * (y[l] - m)": 1,
    "w[l] * x[l] - w[l] * s": 1,
    "w[l] * t - t * w[l] + (x[l] * t - w[l] * s)": 2,
    "(x[l] - s) * rsqrt(q + 1e-5) * w[l, e] + b[l] * w[l, e]": 2,
    "sqrt(z[l] * t)": 1,
    "abs(x[l] * t)": 1,
    "maximum(x[l] * t, 0.0) * w[l, e]": 1,
    "sign(x[l] * t)": 1,
    "log(z[l] * t)": 1,
    "sin(x[l] + m)": 2,
    "cos(x[l] - m)": 2,
    "where(l <= i, exp(x[l] - m), 0.0)": 1,
    "where(m > 0.0, x[l] * t, 0.0)": 1,
    "where(l <= i, x[l] * t, y[l])": 2,
    "x[l] / (t * q)": 1,
    "-(x[l] - m)": 1,
    "3.0": 1,
}


@pytest.mark.parametrize("text", CASES)
def test_groups_and_terms_add_up_to_the_body(text: str) -> None:
    e = body(text)
    groups = separate(e, SCOPE)
    assert len(groups) == CASES[text]
    torch.testing.assert_close(value(total(g.expr for g in groups)), value(e))
    for g in groups:
        torch.testing.assert_close(value(total(t.expr() for t in g.terms)), value(g.expr))
        assert not any(SCOPE.depends(a) for t in g.terms for a, _ in t.x.items())
        assert not any(SCOPE.varies(a) for t in g.terms for a, _ in t.d.items())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exp(x[l] / m)", "no finite set"),
        ("e4m3(x[l] * m)", "rounding to e4m3"),
        ("i32(x[l] * m)", "rounding to i32"),
        ("floor(x[l] * m)", "floor is not separable"),
        ("tanh(x[l] - m)", "does not separate"),
        ("sqrt(x[l] * m)", "sign of m is not known"),
        ("log(x[l] * m)", "sign of m is not known"),
        ("abs(x[l] * m)", "sign of m is not known"),
        ("x[l] / (y[l] - m)", "sum of parts"),
        ("where(x[l] > m, x[l], 0.0)", "comparison"),
        ("maximum(x[l], m)", "does not separate"),
        ("sin(x[l] * m)", "argument of sin"),
    ],
)
def test_inseparable(text: str, reason: str) -> None:
    with pytest.raises(Inseparable, match=reason):
        separate(body(text), SCOPE)


def test_a_shift_joins_what_it_shifts_and_a_scale_stays_outside() -> None:
    (g,) = separate(body("(x[l] - s / size(l)) * rsqrt(q + 1.0)"), SCOPE)
    assert show(scale(g.terms).expr()) == "rsqrt(q + 1.0)"
    assert sorted(show((t.d / scale(g.terms)).expr()) for t in g.terms) == ["1.0", "s / size(l)"]


def test_precision_casts_are_transparent_only_around_results() -> None:
    assert show(transparent(body("bf16(exp(bf16(x[l]) - m)) * v[l]"), SCOPE)) == "exp(bf16(x[l]) - m) * v[l]"
    assert show(transparent(body("e4m3(x[l] * m)"), SCOPE)) == "e4m3(x[l] * m)"
    loose = Scope(SCOPE.axes, SCOPE.state, known, ignore_rounding=True)
    assert show(transparent(body("e4m3(x[l] * m) + e4m3(x[l])"), loose)) == "x[l] * m + e4m3(x[l])"


def test_factors() -> None:
    c, m = factor(body("-2.0 * t ** 2 / sqrt(q)"), SCOPE)
    assert c == -2 and m == Mono({Load("t", ()): 2, Load("q", ()): -m.power(Load("q", ())) * -1})
    c, m = factor(body("abs(t)"), SCOPE)
    assert show(m.expr()) == "t"
    c, m = factor(body("abs(s)"), SCOPE)
    assert show(m.expr()) == "abs(s)"


@pytest.mark.parametrize("text", ["(x[l] * t + y[l] * q) * (x[l] * t + y[l] * q)", "(x[l] * t + y[l] * q) ** 2"])
def test_few_elements_of_a_sum_that_may_cancel_are_multiplied_themselves(text: str) -> None:
    assert len(separate(body(text), SCOPE)) > 1
    few = replace(SCOPE, few=True)
    with pytest.raises(Inseparable, match="move differently"):
        separate(body(text), few)
    assert len(separate(body("(x[l] * t + y[l] * q) * z[l]"), few)) == 2
    assert len(separate(body("(x[l] - s / size(l)) ** 2"), few)) == 1
