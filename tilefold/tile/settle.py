"""Expressions in a part of a loop: conditions that are settled there are put in, and what follows is folded.

Laws, exact or of one rounding fewer:

    where(c, a, b) = a         c certain in this part of a loop (`Facts`)
    i < n, i + k               numbers, where i is one (a range of one index, where a tile begins)
    round(round(x)) = round(x) to the same type
    (x a) b = x (a b)          a and b constants
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Load, Size, children, rebuild

#: Conditions known on the whole current tile.
Facts = Mapping[Expr, bool]
TRUE, FALSE = Const(True, DType.BOOL), Const(False, DType.BOOL)


def settle(
    e: Expr,
    facts: Facts,
    sizes: Mapping[str, Expr],
    scales: Mapping[str, float],
    place: Callable[[Expr], int | None] = lambda e: None,
) -> Expr:
    """`e` with known conditions and static sizes put in; loads of a buffer in `scales` times its scale. place: the
    number that an index, or the start of a tile, is; None of others."""
    if e in facts:
        return TRUE if facts[e] else FALSE
    if (at := place(e)) is not None:
        return Const(at, DType.I64)
    if isinstance(e, Size):
        known = sizes.get(e.dim)
        return known if isinstance(known, Const) else e
    kids = children(e)
    if kids:
        e = rebuild(e, tuple([settle(k, facts, sizes, scales, place) for k in kids]))
    if isinstance(e, Load):
        return Call("mul", (e, Const(scales[e.tensor], DType.F32))) if e.tensor in scales else e
    if not kids:
        return e
    e = _fold(e)
    return (TRUE if facts[e] else FALSE) if e in facts else e


def _fold(e: Expr) -> Expr:
    match e:
        case Call(op, (Const(x, DType.I64), Const(y, DType.I64))) if op in _INTEGER and not (
            y == 0 and op in ("floordiv", "mod")
        ):
            return Const(_INTEGER[op](int(x), int(y)), DType.I64)
        case Call("where", (Const(v, _), a, b)):
            return a if v else b
        case Call("and", (a, b)):
            if FALSE in (a, b):
                return FALSE
            return b if a == TRUE else a if b == TRUE else e
        case Call("or", (a, b)):
            if TRUE in (a, b):
                return TRUE
            return b if a == FALSE else a if b == FALSE else e
        case Call("not", (Const(v, _),)):
            return FALSE if v else TRUE
        case Call(("eq" | "ne" | "lt" | "le" | "gt" | "ge") as op, (Const(x, _), Const(y, _))):
            return TRUE if _COMPARE[op](x, y) else FALSE
        case Call("mul", (Call("mul", (x, Const() as a)), Const() as b)) if a.dtype.is_float and b.dtype.is_float:
            return Call("mul", (x, Const(float(a.value) * float(b.value), a.dtype)))
        case Call("mul", (Const() as a, x)) if not isinstance(x, Const):
            return _fold(Call("mul", (x, a)))
        case Call("div", (x, Const(v, d))) if d.is_float and _power_of_two(float(v)):
            return _fold(Call("mul", (x, Const(1.0 / float(v), d))))
        case Cast(Cast(_, d) as inner, to) if d is to and d.is_float:
            return inner
        case Cast(Const(v, d), to) if to.is_float and not to.rounds and d.is_float and to is not DType.F16:
            return Const(float(v), to.compute)
    return e


_INTEGER: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "maximum": max,
    "minimum": min,
}
_COMPARE = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


def _power_of_two(v: float) -> bool:
    return math.isfinite(v) and v != 0 and abs(math.frexp(v)[0]) == 0.5
