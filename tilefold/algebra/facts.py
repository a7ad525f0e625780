"""Facts about values: ranges and signs, proved from the shape of an expression.

The facts speak of real values (NaN is excluded, infinities count as large reals) of
non-empty reductions: `Size >= 1`. What the ranges cannot decide goes to z3 as a
question about polynomials (`algebra.smt`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size
from tilefold.algebra.philox import BITS, FEW_BITS

INF = math.inf


@dataclass(frozen=True, slots=True)
class Range:
    """lo <= value <= hi, and value != 0 if `nonzero`."""

    lo: float = -INF
    hi: float = INF
    nonzero: bool = False

    @property
    def nonneg(self) -> bool:
        return self.lo >= 0

    @property
    def nonpos(self) -> bool:
        return self.hi <= 0

    @property
    def positive(self) -> bool:
        return self.lo > 0 or (self.lo == 0 and self.nonzero)

    @property
    def never_zero(self) -> bool:
        return self.nonzero or self.lo > 0 or self.hi < 0


ANY = Range()
NONNEG = Range(0, INF)
POSITIVE = Range(0, INF, True)
UNIT = Range(0, 1)

Known = Callable[[Load], Range]


def range_of(e: Expr, known: Known, last: Callable[[str], float] = lambda d: INF) -> Range:
    """What is proved about the value of `e`; `known` gives the facts about loads, `last` the last index of a dim."""
    match e:
        case Const(value, _):
            v = float(value)
            return ANY if math.isnan(v) else Range(v, v, v != 0)
        case Index(d):
            return Range(0, last(d))
        case Size():
            return Range(1, INF, True)
        case Load():
            return known(e)
        case Cast(arg, dtype):
            return _cast(range_of(arg, known, last), dtype)
        case Call(op, args):
            if op == "mul" and args[0] == args[1]:
                a = range_of(args[0], known, last)
                return Range(0, INF, a.never_zero)
            if op == "where":
                return _join(range_of(args[1], known, last), range_of(args[2], known, last))
            return _call(op, [range_of(a, known, last) for a in args], args)
    return ANY


def _join(a: Range, b: Range) -> Range:
    return Range(min(a.lo, b.lo), max(a.hi, b.hi), a.never_zero and b.never_zero)


def _cast(a: Range, dtype: DType) -> Range:
    if dtype is DType.BOOL:
        return UNIT
    if dtype is DType.U8:
        return NONNEG
    lo, hi = (0.0 if a.nonneg else -INF), (0.0 if a.nonpos else INF)
    return Range(lo, hi) if dtype.rounds else a


def _call(op: str, r: list[Range], args: tuple[Expr, ...]) -> Range:
    a = r[0]
    match op:
        case "add":
            b = r[1]
            return Range(a.lo + b.lo, a.hi + b.hi, (a.nonneg and b.positive) or (b.nonneg and a.positive))
        case "sub":
            b = r[1]
            return Range(_minus(a.lo, b.hi), _minus(a.hi, b.lo))
        case "neg":
            return Range(-a.hi, -a.lo, a.nonzero)
        case "mul":
            return _mul(a, r[1])
        case "div":
            b = r[1]
            inverse = Range(0.0 if b.nonneg else -INF, 0.0 if b.nonpos else INF, True)
            if b.lo > 0:
                inverse = Range(1 / b.hi, 1 / b.lo, True)
            return _mul(a, inverse)
        case "pow":
            return _pow(a, args[1])
        case "abs":
            return Range(max(0.0, a.lo, -a.hi), max(abs(a.lo), abs(a.hi)), a.never_zero)
        case "maximum":
            b = r[1]
            return Range(max(a.lo, b.lo), max(a.hi, b.hi), a.positive or b.positive)
        case "minimum":
            b = r[1]
            return Range(min(a.lo, b.lo), min(a.hi, b.hi), a.positive and b.positive)
        case "floordiv" if a.nonneg and r[1].lo > 0:
            return Range(0, math.floor(a.hi / r[1].lo) if a.hi < INF else INF)
        case "mod" if r[1].lo > 0:
            return Range(0, r[1].hi)
        case "exp" | "exp2":
            return Range(0, 1 if a.nonpos else INF, True)
        case "sqrt":
            return Range(math.sqrt(a.lo) if 0 <= a.lo < INF else 0, INF, a.positive)
        case "rsqrt":
            return POSITIVE
        case "sigmoid":
            return Range(0, 1, True)
        case "tanh" | "erf" | "sin" | "cos" | "sign":
            monotone = op in ("tanh", "erf", "sign")
            return Range(0 if monotone and a.nonneg else -1, 0 if monotone and a.nonpos else 1)
        case "lt" | "le" | "gt" | "ge" | "eq" | "ne" | "and" | "or" | "not" | "isnan" | "isinf":
            return UNIT
        case "random":
            return Range(0, 2.0**BITS - 1)
        case "random16":
            return Range(0, 2.0**FEW_BITS - 1)
        case "floor" | "trunc" | "round" | "ceil":
            lo, hi = (math.floor(a.lo) if a.lo > -INF else -INF), (math.ceil(a.hi) if a.hi < INF else INF)
            return Range(lo, hi)
        case "expm1":
            return Range(0 if a.nonneg else -INF, 0 if a.nonpos else INF)
        case "log" | "log2":
            return Range(0 if a.lo >= 1 else -INF, 0 if a.lo >= 0 and a.hi <= 1 else INF)
        case "log1p":
            return Range(0 if a.nonneg else -INF, INF)
    return ANY


def _minus(a: float, b: float) -> float:
    return a - b if not (math.isinf(a) and a == b) else -INF


def _mul(a: Range, b: Range) -> Range:
    ends = [_times(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return Range(min(ends), max(ends), a.never_zero and b.never_zero)


def _times(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def _pow(a: Range, exponent: Expr) -> Range:
    p = exponent.value if isinstance(exponent, Const) else None
    if p is not None and float(p).is_integer() and int(p) % 2 == 0:
        return Range(0, INF, a.never_zero)
    if a.nonneg:
        return Range(0, INF, a.never_zero)
    return ANY


def after_reduction(reducer: str, element: Range) -> Range:
    """Facts about a non-empty reduction of values in `element`."""
    match reducer:
        case "max" | "min" | "argmax" | "argmin" | "topk":
            return element
        case "sum":
            lo = -INF if element.lo < 0 else element.lo
            return Range(lo, INF if element.hi > 0 else element.hi, element.positive)
        case "prod":
            return NONNEG if element.nonneg else ANY
        case "any" | "all":
            return UNIT
    return ANY


def from_dtype(dtype: DType) -> Range:
    """Facts that hold for every tensor of a dtype."""
    if dtype is DType.BOOL:
        return UNIT
    return NONNEG if dtype is DType.U8 else ANY
