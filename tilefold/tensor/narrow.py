"""Simplify conditions over indices, and use them inside the branches they guard.

Laws, for 0 <= r < D:   D q + r < D c  <=>  q < c
                        where(c, a, b) = a if c holds for all indices in range, b if it never does
                        x - c < n  <=>  x < n + c
                        within(a, n) = a if 0 <= a < n for all indices in range (a check that cannot fail)
                        where(x < c, a, b): in a, x <= c - 1; in b, x >= c; x is known where one value is left
                        where(x < c, t[within(i, n)], b) = where(x < c, t[within(where(x < c, i, 0), n)], b)

This is what turns the concatenation of the parts of a fused projection into plain reads once the
axis has been split into (part, rest).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Const,
    Expr,
    Index,
    Load,
    Rewritten,
    Size,
    Sym,
    call,
    children,
    rebuild,
    substitute,
    transform,
    walk,
)
from tilefold.tensor.index_simplify import const, divide, interval, nonnegative, poly, simplify, to_expr, within
from tilefold.tensor.ir import Program

_Range = tuple[int, int]


def narrow(p: Program) -> Program:
    """Every body with its index conditions simplified."""
    ranges = _ranges(p.sizes)
    return replace(p, body=tuple(replace(c, body=_narrow(c.body, ranges, p.sizes, {})) for c in p.body))


def narrowed(e: Expr, sizes: Mapping[str, Expr]) -> Expr:
    """An expression over dims of these sizes likewise."""
    return _narrow(e, _ranges(sizes), sizes, {})


def _ranges(sizes: Mapping[str, Expr]) -> dict[str, _Range]:
    return {d: (0, int(e.value) - 1) for d, e in sizes.items() if isinstance(e, Const) and e.value > 0}


def _narrow(e: Expr, ranges: Mapping[str, _Range], sizes: Mapping[str, Expr], done: Rewritten) -> Expr:
    """done: with the same ranges."""
    kids = children(e)
    if not kids:
        return decided(e, sizes)
    if id(e) not in done:
        if isinstance(e, Call) and e.op == "where":
            made = _chosen(e, ranges, sizes, done)
        else:
            made = decided(rebuild(e, tuple([_narrow(k, ranges, sizes, done) for k in kids])), sizes)
        done[id(e)] = e, made
    return done[id(e)][1]


def _chosen(e: Call, ranges: Mapping[str, _Range], sizes: Mapping[str, Expr], done: Rewritten) -> Expr:
    """A `where`, each branch over what its elements are."""
    condition, a, b = e.args
    condition = _by_dim(_narrow(condition, ranges, sizes, done))
    if isinstance(condition, Const):
        return _narrow(a if condition.value else b, ranges, sizes, done)
    match condition:
        case Call("lt", (Index(d), Const(bound, DType.I64))) if d in ranges:
            low, high = ranges[d]
            inside = _within(a, d, (low, min(high, int(bound) - 1)), ranges, sizes)
            outside = _within(b, d, (max(low, int(bound)), high), ranges, sizes)
            return Call("where", (condition, inside, outside))
    return Call("where", (condition, _narrow(a, ranges, sizes, done), _narrow(b, ranges, sizes, done)))


def _by_dim(e: Expr) -> Expr:
    """x - c < n as x < n + c: a part of a part of a concatenation."""
    match e:
        case Call("lt", (Call("add" | "sub" as op, (Index() as d, Const(c, DType.I64))), Const(bound, DType.I64))):
            return Call("lt", (d, const(int(bound) - int(c) if op == "add" else int(bound) + int(c))))
    return e


def _within(e: Expr, d: str, known: _Range, ranges: Mapping[str, _Range], sizes: Mapping[str, Expr]) -> Expr:
    """A branch in which dim d is known to lie in a range.

    There d = low + d' with d' in [0, high - low]: simplifying over d' uses both bounds.
    """
    low, high = known
    if high >= low and (low, high) != ranges[d]:
        offset = Index(f"{d}@")
        moved = substitute(e, {Index(d): offset + low if high > low else const(low)})
        moved = resimplified(moved, {**sizes, offset.dim: const(high - low + 1)})
        e = resimplified(substitute(moved, {offset: Index(d) - low}), {**sizes, d: const(high + 1)})
    return _checked_there(_narrow(e, {**ranges, d: known}, sizes, {}), d, known, ranges)


def _checked_there(e: Expr, d: str, known: _Range, ranges: Mapping[str, _Range]) -> Expr:
    """A branch whose indices that data choose are checked where it is taken alone: all lanes compute it."""
    (low, high), (least, most) = known, ranges[d]
    bounds = ((call("ge", Index(d), low), low > least), (call("lt", Index(d), high + 1), high < most))
    there = [c for c, cut in bounds if cut]

    def one(x: Expr) -> Expr | None:
        if not (isinstance(x, Call) and x.op == "within" and Index(d) in walk(x.args[0])):
            return None
        at = x.args[0]
        for c in there:
            at = call("where", c, at, 0)
        return call("within", at, x.args[1])

    return transform(e, one) if there and high >= low else e


def resimplified(e: Expr, sizes: Mapping[str, Expr]) -> Expr:
    """Canonical indices of loads, and conditions, after a substitution."""
    return _resimplified(e, sizes, {})


def _resimplified(e: Expr, sizes: Mapping[str, Expr], done: Rewritten) -> Expr:
    if isinstance(e, Load):
        return Load(e.tensor, tuple(simplify(transform(i, lambda x: decided(x, sizes)), sizes) for i in e.index))
    if isinstance(e, Call) and _over_indices(e):
        return simplify(e, sizes)
    if id(e) not in done:
        done[id(e)] = e, decided(rebuild(e, tuple([_resimplified(k, sizes, done) for k in children(e)])), sizes)
    return done[id(e)][1]


def decided(e: Expr, sizes: Mapping[str, Expr]) -> Expr:
    """A condition in lowest terms, or its value where that is certain, and what hangs on it."""
    match e:
        case Call("where", (Const(value, _), a, b)):
            return a if value else b
        case Call("within", (a, n)) if _over_indices(a) and _over_indices(n):
            return a if within(poly(a, sizes), poly(n, sizes), sizes) else e
        case Call("and", (Const(value, _), x) | (x, Const(value, _))):
            return x if value else Const(False, DType.BOOL)
        case Call("or", (Const(value, _), x) | (x, Const(value, _))):
            return Const(True, DType.BOOL) if value else x
        case Call("not", (Const(value, _),)):
            return Const(not value, DType.BOOL)
        case Call(("eq" | "ne") as op, (Const(x, _), Const(y, _))):
            return Const((x == y) == (op == "eq"), DType.BOOL)
        case Call("lt" | "le" | "gt" | "ge", (a, b)) if _over_indices(a) and _over_indices(b):
            known = _compared(e.op, a, b, sizes)
            return _lowest_terms(e, sizes) if known is None else Const(known, DType.BOOL)
    return e


def _over_indices(e: Expr) -> bool:
    """Integer arithmetic over indices and sizes alone."""
    match e:
        case Call("add" | "sub" | "mul" | "floordiv" | "mod" | "neg", args):
            return all(map(_over_indices, args))
        case Const(_, dtype):
            return dtype is DType.I64
    return isinstance(e, Index | Size | Sym)


def _compared(op: str, a: Expr, b: Expr, sizes: Mapping[str, Expr]) -> bool | None:
    """What a comparison gives for all indices in range; None where it varies or cannot be told."""
    r = interval(poly(a - b, sizes), sizes)
    if r is None:
        return None
    low, high = to_expr(r[0]), to_expr(r[1])
    strict = 1 if op in ("lt", "ge") else 0
    # a < b  <=>  a - b <= -1;   a <= b  <=>  a - b <= 0
    less = nonnegative(poly(-high - strict, sizes))
    not_less = nonnegative(poly(low - (1 - strict), sizes))
    if not less and not not_less:
        return None
    return less if op in ("lt", "le") else not_less


def _lowest_terms(e: Call, sizes: Mapping[str, Expr]) -> Expr:
    """D q + r < D c with 0 <= r < D as q < c."""
    left, bound = e.args
    if e.op != "lt" or not isinstance(bound, Const):
        return e
    p = poly(left, sizes)
    for mono, by in p.items():
        if len(mono) == 1 and by > 1 and int(bound.value) % by == 0:
            quotient, rest = divide(p, {(): by})
            if within(rest, {(): by}, sizes):
                return Call("lt", (to_expr(quotient), const(int(bound.value) // by)))
    return e
