"""Reductions that have nothing to do with each other are derived apart, and are what they are together."""

from __future__ import annotations

import pytest

from tilefold.algebra import derive
from tilefold.algebra.beside import side_by_side
from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.dtypes import DType
from tilefold.algebra.text import Names, parse

INPUTS = ("x", "y")


def cascade(*given: tuple[str, str, str]) -> Cascade:
    """(name, reducer, body) over l, results along i."""
    tensors = {*INPUTS, *(name for name, _, _ in given)}
    names = Names(dims={"i", "l"}, tensors=tensors, syms=set())
    reductions = tuple(Reduction(n, op, ("i",), parse(body, names), DType.F32) for n, op, body in given)
    return Cascade(("l",), reductions, tuple((t, DType.F32) for t in INPUTS))


SOFTMAX = (("m", "max", "x[l]"), ("s", "sum", "exp(x[l] - m[i])"))


@pytest.mark.parametrize(
    "given",
    [
        (("a", "sum", "x[l]"), ("b", "max", "y[l]"), ("c", "sum", "x[l] * y[l]")),
        (("a", "sum", "y[l]"), *SOFTMAX, ("c", "min", "x[l]")),
        (*SOFTMAX, ("o", "sum", "exp(x[l] - m[i]) * y[l]"), ("c", "min", "x[l]")),
        (SOFTMAX[0], ("a", "sum", "y[l] / size(l)"), SOFTMAX[1]),
    ],
)
def test_reductions_apart_are_what_they_are_together(given):
    c = cascade(*given)
    assert derive.derive_fold(c) == derive._derive_together(c, False)


def test_what_stands_alone_is_derived_once(monkeypatch):
    """However many stand beside it."""
    derived = []
    together = derive._derive_together
    monkeypatch.setattr(derive, "_derive_together", lambda c, rounds: derived.append(c) or together(c, rounds))
    sums = [(f"alone_{n}", "sum", f"x[l] * {n}.5") for n in range(6)]
    for n in range(1, len(sums) + 1):
        assert len(derive.derive_fold(cascade(*sums[:n])).state) == n
    assert all(len(c.reductions) == 1 for c in derived)


def test_what_depends_on_the_same_is_derived_with_that_alone(monkeypatch):
    derived = []
    together = derive._derive_together
    monkeypatch.setattr(derive, "_derive_together", lambda c, rounds: derived.append(c) or together(c, rounds))
    sums = [(f"weighted_{n}", "sum", f"exp(x[l] - m[i]) * y[l] * {n}.5") for n in range(5)]
    fold = derive.derive_fold(cascade(SOFTMAX[0], *sums))
    assert [v.name for v in fold.state] == ["m", *(name for name, _, _ in sums)]
    assert all(len(c.reductions) == 2 for c in derived)


@pytest.mark.parametrize(
    "given",
    [
        SOFTMAX,  # one depends on the other
        (("a", "sum", "x[l]"),),
        (("a", "sum", "x[l]"), *SOFTMAX, ("t", "sum", "exp(x[l] - m[i]) * y[l]"), ("v", "sum", "(x[l] - a[i]) * y[l]")),
        (("a", "sum", "x[l]"), ("b", "sum", "exp(y[l])"), ("v", "sum", "(x[l] - a[i] / size(l)) * y[l]")),  # of a count
    ],
)
def test_what_shares_variables_is_derived_together(given):
    c = cascade(*given)
    apart = side_by_side(c, derive.derive_fold)
    assert apart is None or apart == derive._derive_together(c, False)
