"""Ranges and signs, and the z3 fallback: each proved fact beside one that must not be proved."""

from __future__ import annotations

import math

import pytest

from tilefold.algebra import smt
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Load
from tilefold.algebra.facts import ANY, NONNEG, POSITIVE, UNIT, Range, after_reduction, from_dtype, range_of
from tilefold.algebra.smt import prove_nonneg
from tilefold.algebra.text import Names, parse

KNOWN = {"pos": POSITIVE, "nonneg": NONNEG, "unit": UNIT, "small": Range(-2, 3)}


def known(load: Load) -> Range:
    return KNOWN.get(load.tensor, ANY)


def fact(text: str) -> Range:
    return range_of(parse(text, Names(dims={"i"}, open_tensors=True)), known)


@pytest.mark.parametrize(
    "text",
    ["x * x", "abs(x)", "x ** 2", "exp(x) + nonneg", "sqrt(nonneg)", "size(i) - 1", "maximum(x, 0.0)",
     "where(x > 0.0, nonneg, 1.0)", "sigmoid(x)", "pos / size(i)", "tanh(nonneg)", "i", "bf16(pos)", "e4m3(pos)",
     "-(-pos)", "log1p(nonneg)", "unit * pos"],
)  # fmt: skip
def test_nonnegative(text: str) -> None:
    assert fact(text).nonneg


@pytest.mark.parametrize(
    "text", ["x", "x + nonneg", "nonneg - pos", "tanh(x)", "x ** 3", "-pos", "log(pos)", "where(x > 0.0, pos, x)",
             "x / pos", "sin(pos)", "minimum(x, pos)", "i - 1"],
)  # fmt: skip
def test_not_nonnegative(text: str) -> None:
    assert not fact(text).nonneg


def test_never_zero() -> None:
    assert fact("nonneg + 1e-6").never_zero and fact("exp(x)").never_zero and fact("1.0 / pos").never_zero
    assert fact("rsqrt(nonneg + 1.0)").positive and fact("size(i)").never_zero
    assert not fact("nonneg").never_zero and not fact("x * x").never_zero and not fact("e4m3(pos)").never_zero
    assert not fact("maximum(x, 0.0)").never_zero and fact("maximum(x, 1.0)").never_zero


def test_intervals() -> None:
    assert fact("small + 1.0") == Range(-1, 4) and fact("small * small").nonneg
    assert fact("small * 2.0").hi == 6 and fact("-small") == Range(-3, 2)
    assert fact("exp(-nonneg)").hi == 1 and fact("exp(nonneg)").hi == math.inf
    assert fact("nan") == ANY
    for op in ("round", "floor", "ceil", "trunc"):
        assert fact(f"{op}(small * 0.4)") == Range(-1, 2) and fact(f"{op}(x)") == ANY


def test_distances_are_bounded_by_the_last_indices() -> None:
    e = parse("abs((i - j) * 2) * 0.5", Names(dims={"i", "j"}))
    found = range_of(e, known, {"i": 9, "j": 4}.__getitem__)
    assert (found.lo, found.hi) == (0, 9) and range_of(e, known).hi == math.inf


def test_reductions() -> None:
    assert after_reduction("sum", POSITIVE).positive and after_reduction("sum", NONNEG).nonneg
    assert not after_reduction("sum", Range(-1, 1)).nonneg and after_reduction("max", NONNEG).nonneg
    assert after_reduction("prod", NONNEG).nonneg and after_reduction("prod", ANY) == ANY
    assert from_dtype(DType.BOOL) == UNIT and from_dtype(DType.F32) == ANY


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("x * x + y * y - 2.0 * x * y", True),
        ("x * x + y * y - 3.0 * x * y", False),
        ("(x - y) ** 2 + 1.0", True),
        ("pos * pos - pos", False),
        ("maximum(x, y) - x", True),
        ("minimum(x, y) - x", False),
        ("abs(x) - x", True),
        ("nonneg + unit - unit * unit", True),
        ("x", False),
    ],
)
def test_z3_decides_polynomials(text: str, holds: bool) -> None:
    assert prove_nonneg(parse(text, Names(open_tensors=True)), known) is holds


def test_z3_is_not_asked_what_ranges_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smt, "_z3", lambda: pytest.fail("asked"))
    for text in ("x * y", "exp(x)", "x ** 2", "abs(x * y) / z"):
        assert not smt.prove_nonneg(parse(text, Names(open_tensors=True)), known)
