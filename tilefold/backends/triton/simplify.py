"""Expressions as a GPU wants them: conditions that are settled, scales pulled out, exponentials in base 2.

Laws, all exact or exact up to one rounding that the original has too:

    where(c, a, b) = a                        c certain in this part of a loop (`Facts`)
    max (k x) = k max x                       k > 0 (rounding is monotone, so also in floating point)
    where(c, k x, -inf) = k where(c, x, -inf) k > 0
    exp(k x - m) = exp2((k log2 e) x - (log2 e) m)
    round(round(x)) = round(x)                to the same type
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Load, Size, children, rebuild

#: Conditions known on the whole current tile.
Facts = Mapping[Expr, bool]
NEG_INF = Const(-math.inf, DType.F32)
TRUE, FALSE = Const(True, DType.BOOL), Const(False, DType.BOOL)


def settle(e: Expr, facts: Facts, sizes: Mapping[str, Expr], scales: Mapping[str, float]) -> Expr:
    """`e` with known conditions and static sizes put in; loads of a buffer in `scales` times its scale."""
    if e in facts:
        return TRUE if facts[e] else FALSE
    if isinstance(e, Size):
        known = sizes.get(e.dim)
        return known if isinstance(known, Const) else e
    e = rebuild(e, tuple(settle(k, facts, sizes, scales) for k in children(e)))
    if isinstance(e, Load) and e.tensor in scales:
        return Call("mul", (e, Const(scales[e.tensor], DType.F32)))
    return _fold(e)


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


def pull_scale(e: Expr, *, loose: bool) -> tuple[float, Expr]:
    """(k, x) with e = k x and k > 0 constant; `loose` allows one more rounding (division by a constant)."""
    match e:
        case Call("mul", (x, Const(v, d))) if d.is_float and 0 < float(v) < math.inf:
            k, inner = pull_scale(x, loose=loose)
            return k * float(v), inner
        case Call("div", (x, Const(v, d))) if loose and d.is_float and 0 < float(v) < math.inf:
            k, inner = pull_scale(x, loose=loose)
            return k / float(v), inner
        case Call("where", (c, x, b)) if b == NEG_INF:
            k, inner = pull_scale(x, loose=loose)
            return (k, Call("where", (c, inner, b))) if k != 1.0 else (1.0, e)
        case Cast(x, to) if loose and to.is_float and not to.rounds:
            return pull_scale(x, loose=loose)
    return 1.0, e


def terms(e: Expr) -> list[tuple[float, Expr]]:
    """`e` as a sum of scaled terms."""
    match e:
        case Call("add", (a, b)):
            return terms(a) + terms(b)
        case Call("sub", (a, b)):
            return terms(a) + [(-k, x) for k, x in terms(b)]
        case Call("neg", (a,)):
            return [(-k, x) for k, x in terms(a)]
        case Call("mul", (a, Const(v, d))) if d.is_float and math.isfinite(float(v)):
            return (
                [(k * float(v), x) for k, x in terms(a)]
                if not isinstance(a, Call) or a.op == "mul"
                else [(float(v), a)]
            )
    return [(1.0, e)]
