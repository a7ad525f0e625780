"""Sign conditions that ranges cannot decide, as questions to z3 about real polynomials."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from tilefold.algebra.expr import Call, Cast, Const, Expr
from tilefold.algebra.facts import Known, range_of

TIMEOUT_MS = 100


def prove_nonneg(e: Expr, known: Known) -> bool:
    """Whether z3 proves e >= 0 for all real values that satisfy the known ranges."""
    if not _worth_asking(e):
        return False
    z3 = _z3()
    constraints: list[Any] = []
    value = _translate(e, known, {}, constraints, z3)
    solver = z3.Solver()
    solver.set("timeout", TIMEOUT_MS)
    solver.add(*constraints)
    solver.add(value < 0)
    return bool(solver.check() == z3.unsat)


def _worth_asking(e: Expr) -> bool:
    """Only sums and differences can hide a sign from the ranges."""
    match e:
        case Call("add" | "sub" | "maximum" | "minimum" | "where", _):
            return True
        case Call(_, args):
            return any(_worth_asking(a) for a in args)
    return False


@lru_cache(maxsize=1)
def _z3() -> Any:
    import z3  # noqa: PLC0415  (loaded only when a sign has to be proved)

    return z3


def _translate(e: Expr, known: Known, names: dict[Expr, Any], out: list[Any], z3: Any) -> Any:
    match e:
        case Const(value, _) if math.isfinite(float(value)):
            return z3.RealVal(str(float(value)))
        case Cast(arg, dtype) if dtype.is_float and not dtype.rounds:
            return _translate(arg, known, names, out, z3)
        case Call(("add" | "sub" | "mul" | "neg" | "maximum" | "minimum" | "abs" | "div" | "pow") as op, args):
            done = _arithmetic(op, args, known, names, out, z3)
            if done is not None:
                return done
    if e not in names:
        v = names[e] = z3.Real(f"v{len(names)}")
        r = range_of(e, known)
        out += [v >= z3.RealVal(str(r.lo))] if math.isfinite(r.lo) else []
        out += [v <= z3.RealVal(str(r.hi))] if math.isfinite(r.hi) else []
        out += [v != 0] if r.nonzero else []
    return names[e]


def _arithmetic(op: str, args: tuple[Expr, ...], known: Known, names: dict[Expr, Any], out: list[Any], z3: Any) -> Any:
    if op == "pow":
        p = args[1].value if isinstance(args[1], Const) else 0.5
        if not (float(p).is_integer() and 1 <= p <= 6):
            return None
        base = _translate(args[0], known, names, out, z3)
        value = base
        for _ in range(int(p) - 1):
            value = value * base
        return value
    a, *rest = (_translate(x, known, names, out, z3) for x in args)
    match op:
        case "add":
            return a + rest[0]
        case "sub":
            return a - rest[0]
        case "mul":
            return a * rest[0]
        case "div":
            out.append(rest[0] != 0)
            return a / rest[0]
        case "neg":
            return -a
        case "abs":
            return z3.If(a >= 0, a, -a)
        case "maximum":
            return z3.If(a >= rest[0], a, rest[0])
    return z3.If(a <= rest[0], a, rest[0])
