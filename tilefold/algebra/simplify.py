"""Smart constructors, local simplification and differentiation of expressions.

Only rewritings that hold for every float, NaN and infinities included, are done
(x * 1 = x, x - (-y) = x + y, ...); nothing is reassociated or distributed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Load, call, children, rebuild, tensors_read, transform

ONE = Const(1.0, DType.F32)
ZERO = Const(0.0, DType.F32)
NAN = Const(math.nan, DType.F32)


def number(v: float | Fraction) -> Const:
    """A float literal (f32, which adapts to f64 operands)."""
    return Const(float(v), DType.F32)


def const_value(e: Expr) -> float | None:
    """Numeric value of a literal, else None."""
    return float(e.value) if isinstance(e, Const) and e.dtype is not DType.BOOL else None


def is_const(e: Expr, v: float) -> bool:
    return const_value(e) == v


def is_square(e: Expr) -> bool:
    """Whether e is x x. What it is subtracted from may be as much (a mean of squares): it has to be rounded first, for
    in a fused multiply-subtract the difference of equals is what was rounded off one of them."""
    return isinstance(e, Call) and e.op == "mul" and e.args[0] == e.args[1]


def add(a: Expr, b: Expr) -> Expr:
    """a + b."""
    if is_const(a, 0):
        return b
    if is_const(b, 0):
        return a
    if isinstance(b, Call) and b.op == "neg":
        return sub(a, b.args[0])
    if isinstance(a, Call) and a.op == "neg":
        return sub(b, a.args[0])
    return call("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    """a - b."""
    if is_const(b, 0):
        return a
    if is_const(a, 0):
        return neg(b)
    if isinstance(b, Call) and b.op == "neg":
        return add(a, b.args[0])
    return call("sub", a, b)


def neg(a: Expr) -> Expr:
    """-a."""
    v = const_value(a)
    if v is not None and isinstance(a, Const):
        return Const(-a.value, a.dtype)
    match a:
        case Call("neg", (b,)):
            return b
        case Call("sub", (x, y)):
            return call("sub", y, x)
        case Call("mul", (Const() as c, b)):
            return mul(neg(c), b)
    return call("neg", a)


def mul(a: Expr, b: Expr) -> Expr:
    """a * b."""
    if is_const(a, 1):
        return b
    if is_const(b, 1):
        return a
    if is_const(a, -1):
        return neg(b)
    if is_const(b, -1):
        return neg(a)
    if isinstance(b, Call) and b.op == "div" and is_const(b.args[0], 1):
        return div(a, b.args[1])
    return call("mul", a, b)


def div(a: Expr, b: Expr) -> Expr:
    """a / b."""
    return a if is_const(b, 1) else call("div", a, b)


def power(a: Expr, p: Fraction) -> Expr:
    """a ** p, written with sqrt, rsqrt and division where these say the same."""
    if p == 0:
        return ONE
    if p == 1:
        return a
    if p == Fraction(1, 2):
        return call("sqrt", a)
    if p == Fraction(-1, 2):
        return call("rsqrt", a)
    if p < 0:
        return div(ONE, power(a, -p))
    if isinstance(a, Call) and a.op == "sqrt":
        return power(a.args[0], p / 2)
    return call("pow", a, int(p) if p.denominator == 1 else float(p))


def total(parts: Iterable[Expr]) -> Expr:
    """Sum of the parts, 0.0 for none."""
    out: Expr | None = None
    for p in parts:
        out = p if out is None else add(out, p)
    return ZERO if out is None else out


def product(parts: Iterable[Expr]) -> Expr:
    """Product of the parts, 1.0 for none."""
    out: Expr | None = None
    for p in parts:
        out = p if out is None else mul(out, p)
    return ONE if out is None else out


def simplify(e: Expr) -> Expr:
    """Local simplification, bottom up."""
    return transform(e, _simplify_node)


def _simplify_node(e: Expr) -> Expr | None:
    match e:
        case Call("add", (a, b)):
            return add(a, b)
        case Call("sub", (a, b)):
            return sub(a, b)
        case Call("mul", (a, b)):
            return mul(a, b)
        case Call("div", (a, b)):
            return div(a, b)
        case Call("neg", (a,)):
            return neg(a)
        case Call("pow", (a, c)) if is_const(c, 1):
            return a
    return None


def powers(e: Expr) -> Expr:
    """Equal factors of products as powers: d * w * d becomes d ** 2 * w."""
    match e:
        case Call("mul", (_, _)):
            table: dict[Expr, Fraction] = {}
            for f in _factors(e):
                base, p = powers(f), Fraction(1)
                match base:
                    case Call("pow", (inner, Const() as c)):
                        base, p = inner, Fraction(float(c.value))
                table[base] = table.get(base, Fraction(0)) + p
            return product(power(b, p) for b, p in table.items())
        case Call(_, args):
            return rebuild(e, tuple(powers(a) for a in args))
        case Cast(arg, _):
            return rebuild(e, (powers(arg),))
    return e


def _factors(e: Expr) -> list[Expr]:
    match e:
        case Call("mul", (a, b)):
            return _factors(a) + _factors(b)
    return [e]


def diff(e: Expr, u: Expr) -> Expr | None:
    """d e / d u for a sub-expression u of e, through + - * / neg, constant powers and where; None is zero.

    A node outside these that contains u raises ValueError (callers have proved e a polynomial in u).
    """
    if e == u:
        return ONE
    if not _contains(e, u):
        return None
    match e:
        case Call(("add" | "sub") as op, (a, b)):
            da, db = diff(a, u), diff(b, u)
            if db is None:
                return da
            if da is None:
                return db if op == "add" else neg(db)
            return add(da, db) if op == "add" else sub(da, db)
        case Call("neg", (a,)):
            da = diff(a, u)
            return None if da is None else neg(da)
        case Call("mul", (a, b)):
            return _sum_or_none(_times(diff(a, u), b), _times(diff(b, u), a))
        case Call("div", (a, b)) if not _contains(b, u):
            da = diff(a, u)
            return None if da is None else div(da, b)
        case Call("pow", (a, Const() as c)):
            da, p = diff(a, u), Fraction(float(c.value))
            return None if da is None else mul(number(p), _times(da, power(a, p - 1)) or ONE)
        case Call("where", (c, a, b)) if not _contains(c, u):
            return call("where", c, diff(a, u) or ZERO, diff(b, u) or ZERO)
        case Cast(a, dtype):
            da = diff(a, u)
            return None if da is None else Cast(da, dtype)
    raise ValueError(e)


def _times(d: Expr | None, b: Expr) -> Expr | None:
    if d is None:
        return None
    if is_const(b, 1):
        return d
    return neg(b) if is_const(d, -1) else mul(d, b)


def _sum_or_none(a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None:
        return b if a is None else a
    return mul(number(2), a) if a == b else add(a, b)


def _contains(e: Expr, u: Expr) -> bool:
    if e == u:
        return True
    match e:
        case Call(_, args):
            return any(_contains(a, u) for a in args)
        case Cast(arg, _):
            return _contains(arg, u)
    return False


def split_constant(e: Expr) -> tuple[Fraction, Expr]:
    """e = constant * rest, with constants pulled out of products, quotients and signs."""
    v = const_value(e)
    if v is not None and math.isfinite(v):
        return Fraction(v), ONE
    match e:
        case Call("neg", (a,)):
            c, r = split_constant(a)
            return -c, r
        case Call("mul", (a, b)):
            ca, ra = split_constant(a)
            cb, rb = split_constant(b)
            return ca * cb, mul(ra, rb)
        case Call("div", (a, b)):
            c, r = split_constant(a)
            return c, div(r, b)
    return Fraction(1), e


def rename_loads(e: Expr, names: dict[str, str]) -> Expr:
    """Loads of the given tensors read another one instead, at the same indices."""

    if tensors_read(e).isdisjoint(names):
        return e
    new = rebuild(e, tuple([rename_loads(k, names) for k in children(e)]))
    return Load(names[new.tensor], new.index) if isinstance(new, Load) and new.tensor in names else new


def replace(e: Expr, old: Expr, new: Expr) -> Expr:
    """Every occurrence of a sub-expression replaced, outermost first."""
    if e == old:
        return new
    match e:
        case Call(_, args):
            return rebuild(e, tuple(replace(a, old, new) for a in args))
        case Cast(arg, _):
            return rebuild(e, (replace(arg, old, new),))
    return e
