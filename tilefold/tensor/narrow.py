"""Simplify conditions over indices, and use them inside the branches they guard.

Laws, for 0 <= r < D:   D q + r < D c  <=>  q < c
                        where(c, a, b) = a if c holds for all indices in range, b if it never does
                        where(x < c, a, b): in a, x <= c - 1; in b, x >= c; x is known where one value is left

This is what turns the concatenation of the parts of a fused projection into plain reads once the
axis has been split into (part, rest).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, children, rebuild, substitute
from tilefold.tensor.index_simplify import const, divide, interval, nonnegative, poly, simplify, to_expr, within
from tilefold.tensor.ir import Program

_Range = tuple[int, int]


def narrow(p: Program) -> Program:
    """Every body with its index conditions simplified."""
    ranges = {d: (0, int(e.value) - 1) for d, e in p.sizes.items() if isinstance(e, Const) and e.value > 0}
    return replace(p, body=tuple(replace(c, body=_narrow(c.body, ranges, p.sizes)) for c in p.body))


def _narrow(e: Expr, ranges: Mapping[str, _Range], sizes: Mapping[str, Expr]) -> Expr:
    if not isinstance(e, Call) or e.op != "where":
        return rebuild(e, tuple(_narrow(k, ranges, sizes) for k in children(e)))
    condition, a, b = e.args
    condition = _condition(_narrow(condition, ranges, sizes), sizes)
    if isinstance(condition, Const):
        return _narrow(a if condition.value else b, ranges, sizes)
    match condition:
        case Call("lt", (Index(d), Const(bound, DType.I64))) if d in ranges:
            low, high = ranges[d]
            inside = _within(a, d, (low, min(high, int(bound) - 1)), ranges, sizes)
            outside = _within(b, d, (max(low, int(bound)), high), ranges, sizes)
            return Call("where", (condition, inside, outside))
    return Call("where", (condition, _narrow(a, ranges, sizes), _narrow(b, ranges, sizes)))


def _within(e: Expr, d: str, known: _Range, ranges: Mapping[str, _Range], sizes: Mapping[str, Expr]) -> Expr:
    """A branch in which dim d is known to lie in a range."""
    low, high = known
    if low == high:
        e = _resimplified(substitute(e, {Index(d): const(low)}), sizes)
    return _narrow(e, {**ranges, d: known}, sizes)


def _resimplified(e: Expr, sizes: Mapping[str, Expr]) -> Expr:
    """Canonical indices of loads, and conditions, after a substitution."""
    if isinstance(e, Load):
        return Load(e.tensor, tuple(simplify(i, sizes) for i in e.index))
    e = rebuild(e, tuple(_resimplified(k, sizes) for k in children(e)))
    return _condition(e, sizes)


def _condition(e: Expr, sizes: Mapping[str, Expr]) -> Expr:
    """A comparison `index < constant` in lowest terms, or its value where that is certain."""
    match e:
        case Call("lt", (left, Const(bound, DType.I64))):
            pass
        case _:
            return e
    p, limit = poly(left, sizes), poly(const(int(bound)), sizes)
    if within(p, limit, sizes):
        return Const(True, DType.BOOL)
    r = interval(p, sizes)
    if r is not None and nonnegative(poly(to_expr(r[0]) - to_expr(limit), sizes)):
        return Const(False, DType.BOOL)
    for mono, by in p.items():
        if len(mono) == 1 and by > 1 and int(bound) % by == 0:
            quotient, rest = divide(p, {(): by})
            if within(rest, {(): by}, sizes):
                return Call("lt", (to_expr(quotient), const(int(bound) // by)))
    return e
