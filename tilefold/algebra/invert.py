"""Repair functions by change of variables and inversion (Neptune section 4, eqs. 3-9).

Write F(x, D) = g(D, C) with C := g_c(x), everything that depends on x alone. If g is
invertible in C, then  h(t, D, D') = g(D', g^-1(D, t)).  The inverse is found by walking
from the root to C and undoing one operation a step.
"""

from __future__ import annotations

from tilefold.algebra import simplify as sm
from tilefold.algebra.expr import Call, Const, Expr, Load, call, walk

VARIABLE = Load("%C", ())
_INVERSE = {"exp": "log", "log": "exp", "exp2": "log2", "log2": "exp2", "expm1": "log1p", "log1p": "expm1"}


def invert(g: Expr, t: Expr) -> Expr | None:
    """C such that g(C) = t for C := VARIABLE, on the branch of positive values; None if not found."""
    out = t
    while g != VARIABLE:
        step = _undo(g, out)
        if step is None:
            return None
        g, out = step
    return out


def _has(e: Expr) -> bool:
    return any(n == VARIABLE for n in walk(e))


def _undo(g: Expr, t: Expr) -> tuple[Expr, Expr] | None:
    """One step: g = op(.., inner, ..) and g = t give inner = ..."""
    match g:
        case Call("neg", (a,)):
            return a, sm.neg(t)
        case Call("add", (a, b)) if _has(a) != _has(b):
            return (a, sm.sub(t, b)) if _has(a) else (b, sm.sub(t, a))
        case Call("sub", (a, b)) if _has(a) != _has(b):
            return (a, sm.add(t, b)) if _has(a) else (b, sm.sub(a, t))
        case Call("mul", (a, b)) if _has(a) != _has(b):
            return (a, sm.div(t, b)) if _has(a) else (b, sm.div(t, a))
        case Call("div", (a, b)) if _has(a) != _has(b):
            return (a, sm.mul(t, b)) if _has(a) else (b, sm.div(a, t))
        case Call("pow", (a, Const() as p)) if _has(a) and float(p.value) != 0:
            return a, call("pow", t, 1.0 / float(p.value))
        case Call("sqrt", (a,)):
            return a, call("pow", t, 2)
        case Call("rsqrt", (a,)):
            return a, call("pow", t, -2)
        case Call(op, (a,)) if op in _INVERSE:
            return a, call(_INVERSE[op], t)
    return None
