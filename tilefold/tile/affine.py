"""Whether an element's address tells two values of a dim apart: what makes parallel stores safe.

An index is written as a sum of `coefficient * dim` where it has that form with constant
coefficients. Two terms a * x and b * y of a sum meet in one value for different x where
a x = b y has a solution inside the extents: the smallest is x = b / g, y = a / g, g = gcd(a, b).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tilefold.algebra.expr import Call, Const, Expr, Index, call, dims_used


def coefficients(e: Expr) -> dict[str, int] | None:
    """The constant coefficient of each dim in `e`, None where `e` is not such a sum.

    The constant term is dropped: it tells no two elements apart.
    """
    match e:
        case Index(d):
            return {d: 1}
        case _ if not dims_used(e):
            return {}
        case Call(("add" | "sub") as op, (a, b)):
            left, right = coefficients(a), coefficients(b)
            if left is None or right is None:
                return None
            sign = 1 if op == "add" else -1
            return {d: left.get(d, 0) + sign * right.get(d, 0) for d in (*left, *right)}
        case Call("mul", (Const(c), x)) | Call("mul", (x, Const(c))):
            inner = coefficients(x)
            return None if inner is None else {d: int(c) * n for d, n in inner.items()}
    return None


def slope(e: Expr, dim: str) -> float | None:
    """How far `e` goes on from one value of the dim to the next, on average and at most; None where that depends on
    more than the dim, or on data."""
    match e:
        case Index(d):
            return 1.0 if d == dim else None
        case Const():
            return 0.0
        case Call("add" | "sub", (a, b)):
            left, right = slope(a, dim), slope(b, dim)
            return None if left is None or right is None else left + right
        case Call("mul", (Const(c), x)) | Call("mul", (x, Const(c))):
            inner = slope(x, dim)
            return None if inner is None else abs(c) * inner
        case Call("floordiv", (x, Const(c))) if c > 0:
            inner = slope(x, dim)
            return None if inner is None else inner / c
        case Call("mod" | "within", (x, Const())) | Call("abs" | "neg", (x,)):
            return slope(x, dim)
        case Call("maximum" | "minimum", (a, b)) | Call("where", (_, a, b)) if dims_used(e) <= {dim}:
            left, right = slope(a, dim), slope(b, dim)
            return None if left is None or right is None else max(left, right)
    return None


def separates(index: Sequence[Expr], dim: str, extents: Mapping[str, int | None]) -> bool:
    """False where two values of `dim` are certain to meet in one element, other dims permitting.

    `extents`: the known sizes of dims, None for symbolic ones. True also where that cannot be
    decided (indirect indices, symbolic extents in a formula).
    """
    terms = [coefficients(e) for e in index]
    if any(dim in dims_used(e) and t is None for e, t in zip(index, terms, strict=True)):
        return True
    mine = [t for t in terms if t is not None and t.get(dim, 0) != 0]
    if len(mine) != 1:
        return len(mine) > 1
    elsewhere = {d for e, t in zip(index, terms, strict=True) if t is not mine[0] for d in dims_used(e)}
    a = abs(mine[0][dim])
    for d, b in mine[0].items():
        if d == dim or d in elsewhere or b == 0:
            continue
        g = math.gcd(a, b)
        x, y = abs(b) // g, a // g
        bounds = ((x, extents[dim]), (y, extents[d]))
        if all(v < n if n is not None else v == 1 for v, n in bounds):
            return False
    return True


def _counts(e: Expr) -> bool:
    """Whether an expression is certain not to be negative, whatever its dims and sizes are."""
    match e:
        case Const(n):
            return n >= 0
        case Call("add" | "mul", args):
            return all(map(_counts, args))
        case Call("maximum", args):
            return any(map(_counts, args))
    return False


def segment_of(start: Expr | None, stop: Expr | None) -> str | None:
    """The dim d whose indices share a loop out without overlap: it runs from d n, or a number of indices behind it, to
    (d + 1) n or an earlier end, where n may be a product (of axes that are one with the one cut)."""
    match start:
        case Call("add", (first, behind)) if _counts(behind):
            start = first
    match stop:
        case Call("minimum", (_, end)):
            factors: set[str] = set()
            while True:
                match start, end:
                    case Call("mul", (a, n)), Call("mul", (b, m)) if n == m:
                        start, end, factors = a, b, factors | dims_used(n)
                    case Call("tile_start", (Index(d),)) as at, _:
                        return d if end == call("add", at, 1) and d not in factors else None
                    case _:
                        return None
    return None
