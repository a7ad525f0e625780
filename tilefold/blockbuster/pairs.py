"""Significand-exponent pairs in scalar expressions: x = s * exp(t) (Blockbuster, appendix).

    number            (x, 0)                      exp(y)        (1, y)
    (s, t) (s', t')   (s s', t + t')              1 / (s, t)    (1 / s, -t)
    (s, t) + (s', t') (s exp(t - z) + s' exp(t' - z), z)  with z = max(t, t')

An exponent is a linear combination of atoms, so that t - t vanishes by itself. Every exponential
that comes out of here has an argument that is at most 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

from tilefold.algebra.expr import Call, Cast, Const, Expr, Load, call, children, lit, ops_used, rebuild

#: Exponents: atom -> coefficient. Empty: 0.
Linear = Mapping[Expr, float]
_INF = float("inf")


@dataclass(frozen=True, slots=True)
class Pair:
    """`sig * exp(sum of coefficient * atom)`."""

    sig: Expr
    exponent: Linear


def has_exp(e: Expr) -> bool:
    """Whether an exponential is computed in an expression."""
    return not ops_used(e).isdisjoint(("exp", "exp2", "expm1"))


def guarded(z: Expr) -> Expr:
    """A maximum as an exponent: that of nothing (-inf) counts as 0, as in a Fold."""
    return call("where", call("eq", z, -_INF), 0.0, z)


def pair_of(e: Expr, known: Callable[[Load], Pair | None], bounded: Callable[[Expr], bool]) -> Pair:
    """An expression as a pair. `known`: loads that are pairs; `bounded`: arguments known to be at most 0."""
    match e:
        case Load():
            return known(e) or Pair(e, {})
        case Call("exp", (y,)):
            inner = plain(pair_of(y, known, bounded))
            if nonpositive(inner) or bounded(inner):
                return Pair(call("exp", inner), {})
            return Pair(lit(1.0), {inner: 1.0})
        case Call("exp2", (y,)):
            return pair_of(call("exp", y * 0.6931471805599453), known, bounded)
        case Call("expm1", (y,)):  # expm1(y) = -expm1(-y) exp(y) keeps its digits near 0
            inner = plain(pair_of(y, known, bounded))
            small = call("expm1", -call("abs", inner))
            return Pair(call("where", call("gt", inner, 0.0), -small, small), {call("maximum", inner, 0.0): 1.0})
        case Call("neg", (a,)):
            p = pair_of(a, known, bounded)
            return Pair(-p.sig, p.exponent)
        case Call(("mul" | "div") as op, (a, b)):
            p, q = pair_of(a, known, bounded), pair_of(b, known, bounded)
            sign = 1.0 if op == "mul" else -1.0
            return Pair(_times(op, p.sig, q.sig), _sum(p.exponent, q.exponent, sign))
        case Call(("add" | "sub") as op, (a, b)):
            p, q = pair_of(a, known, bounded), pair_of(b, known, bounded)
            z = _greater(p.exponent, q.exponent)
            return Pair(call(op, _moved(p, z), _moved(q, z)), z)
        case Call("where", (c, a, b)):
            p, q = pair_of(a, known, bounded), pair_of(b, known, bounded)
            return _chosen(plain(pair_of(c, known, bounded)), p, q)
        case Call(("eq" | "ne" | "lt" | "le" | "gt" | "ge") as op, (a, Const(0, _) as zero)):
            return Pair(call(op, pair_of(a, known, bounded).sig, zero), {})
        case Call("pow", (a, Const(n, _))) if float(n) == int(n) or float(n) == 0.5:
            p = pair_of(a, known, bounded)
            return Pair(call("pow", p.sig, lit(n)), {k: c * float(n) for k, c in p.exponent.items()})
        case Call(("sqrt" | "rsqrt") as op, (a,)):
            p = pair_of(a, known, bounded)
            half = 0.5 if op == "sqrt" else -0.5
            return Pair(call(op, p.sig), {k: c * half for k, c in p.exponent.items()})
        case Call("log", (a,)):
            p = pair_of(a, known, bounded)
            return (
                Pair(call("log", p.sig) + linear_expr(p.exponent), {}) if p.exponent else Pair(call("log", p.sig), {})
            )
        case Cast(a, dtype) if not dtype.rounds:
            p = pair_of(a, known, bounded)
            return Pair(Cast(p.sig, dtype), p.exponent) if not p.exponent else p
    return Pair(rebuild(e, tuple(plain(pair_of(k, known, bounded)) for k in children(e))), {})


def plain(p: Pair) -> Expr:
    """The number itself: it overflows only where the number does. An exponent known to be <= 0 is applied at once."""
    if not p.exponent:
        return p.sig
    e = linear_expr(p.exponent)
    if nonpositive(e):
        return _scaled(p.sig, call("exp", e))
    half = call("exp", _scaled(e, lit(0.5)))
    return _scaled(_scaled(p.sig, half), half)


def linear_expr(t: Linear) -> Expr:
    """An exponent as an expression."""
    terms = [a if c == 1.0 else -a if c == -1.0 else a * c for a, c in t.items()]
    return reduce(lambda x, y: x + y, terms) if terms else lit(0.0)


def nonpositive(e: Expr) -> bool:
    """Whether an expression cannot be above 0, by its form."""
    match e:
        case Const(v, _):
            return float(v) <= 0
        case Call("neg", (a,)):
            return nonnegative(a)
        case Call("mul", (a, b)):
            return (nonpositive(a) and nonnegative(b)) or (nonnegative(a) and nonpositive(b))
        case Call("div", (a, b)):
            return nonpositive(a) and nonnegative(b)
        case Call("add", (a, b)):
            return nonpositive(a) and nonpositive(b)
        case Call("minimum", (a, b)):
            return nonpositive(a) or nonpositive(b)
        case Call("maximum", (a, b)):
            return nonpositive(a) and nonpositive(b)
        case Call("where", (_, a, b)):
            return nonpositive(a) and nonpositive(b)
        case Call("sub", (a, b)):
            return at_least(b, a) or (nonpositive(a) and nonnegative(b))
    return False


def nonnegative(e: Expr) -> bool:
    """Whether an expression cannot be below 0, by its form."""
    match e:
        case Const(v, _):
            return float(v) >= 0
        case Call(("abs" | "exp" | "exp2" | "sqrt" | "rsqrt" | "sigmoid"), _):
            return True
        case Call("neg", (a,)):
            return nonpositive(a)
        case Call("pow", (_, Const(n, _))) if float(n) == int(n) and int(n) % 2 == 0:
            return True
        case Call("mul", (a, b)):
            return a == b or (nonnegative(a) and nonnegative(b)) or (nonpositive(a) and nonpositive(b))
        case Call("add" | "div", (a, b)):
            return nonnegative(a) and nonnegative(b)
        case Call("maximum", (a, b)):
            return nonnegative(a) or nonnegative(b)
    return False


def at_least(big: Expr, small: Expr) -> bool:
    """Whether one expression is a maximum that the other is part of."""
    if big == small:
        return True
    match big:
        case Call("maximum", (a, b)):
            return at_least(a, small) or at_least(b, small)
    return False


def _times(op: str, a: Expr, b: Expr) -> Expr:
    if isinstance(b, Const) and b.value == 1:
        return a
    return b if op == "mul" and isinstance(a, Const) and a.value == 1 else call(op, a, b)


def _scaled(a: Expr, b: Expr) -> Expr:
    return _times("mul", a, b)


def _sum(a: Linear, b: Linear, sign: float) -> Linear:
    out = dict(a)
    for k, c in b.items():
        out[k] = out.get(k, 0.0) + sign * c
    return {k: c for k, c in out.items() if c}


def _greater(a: Linear, b: Linear) -> Linear:
    if dict(a) == dict(b):
        return a
    return {call("maximum", linear_expr(a), linear_expr(b)): 1.0}


def _chosen(c: Expr, p: Pair, q: Pair) -> Pair:
    """One of two numbers; where it is 0 the exponent is that of nothing."""
    sig = call("where", c, p.sig, q.sig)
    if dict(p.exponent) == dict(q.exponent):
        return Pair(sig, p.exponent)
    nothing = lit(-_INF)
    a, b = (nothing if _is_zero(x.sig) else linear_expr(x.exponent) for x in (p, q))
    return Pair(sig, {call("where", c, a, b): 1.0})


def _is_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 0


def _moved(p: Pair, z: Linear) -> Expr:
    """The significand for another, larger exponent."""
    if dict(p.exponent) == dict(z):
        return p.sig
    top = linear_expr(z)
    own = linear_expr(p.exponent)
    return _scaled(p.sig, call("exp", own - top if p.exponent else -top))
