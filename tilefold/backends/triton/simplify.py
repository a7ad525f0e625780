"""Expressions as a GPU wants them: scales pulled out, exponentials in base 2.

Laws, all exact or exact up to one rounding that the original has too:

    max (k x) = k max x                       k > 0 (rounding is monotone, so also in floating point)
    where(c, k x, -inf) = k where(c, x, -inf) k > 0
    exp(k x - m) = exp2((k log2 e) x - (log2 e) m)
"""

from __future__ import annotations

import math

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr

NEG_INF = Const(-math.inf, DType.F32)


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
