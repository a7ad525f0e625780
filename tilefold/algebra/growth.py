"""How fast an expression grows with its inputs: the rule that says when a factor may be delayed.

Moving a factor of H from the loop to `finish` leaves partial sums of a larger G. That is
safe when G grows no faster, in each input, than something the cascade computes anyway:
the body of an earlier reduction, F itself at the D that belongs to it, or the input itself.
So 1/t of a softmax may wait, exp(-m) may not, and neither may the 1/m**2 of a stable L2 norm.
"""

from __future__ import annotations

import math

from tilefold.algebra.context import Context, exponent, is_exponential
from tilefold.algebra.expr import Call, Cast, Const, Expr, Load
from tilefold.algebra.separate import summands
from tilefold.algebra.terms import Mono, factor

Growth = dict[str, float]


def growth(e: Expr, ctx: Context) -> Growth:
    """Degree of growth in each input tensor; inf for exponential growth."""
    match e:
        case Load(name, _):
            info = ctx.infos.get(name)
            if info is None:
                return {name: 1.0}
            if name not in ctx.growth:  # each reads those before it: asked again, they would double with each
                inner = growth(info.element, ctx)
                product = info.var.reducer == "prod"
                ctx.growth[name] = {k: (math.inf if v else 0.0) for k, v in inner.items()} if product else inner
            return ctx.growth[name]
        case Cast(arg, _):
            return growth(arg, ctx)
        case Call() if is_exponential(e):
            if bounded_exponent(exponent(e), ctx):
                return {}
            return {k: math.inf for k, v in growth(exponent(e), ctx).items() if v > 0}
        case Call(op, args):
            return _call(op, args, ctx)
    return {}


def _call(op: str, args: tuple[Expr, ...], ctx: Context) -> Growth:
    match op:
        case "mul":
            return _combine(growth(args[0], ctx), growth(args[1], ctx))
        case "div":
            return growth(args[0], ctx)
        case "pow":
            p = float(args[1].value) if isinstance(args[1], Const) else math.inf
            return _scaled(growth(args[0], ctx), max(p, 0.0))
        case "sqrt":
            return _scaled(growth(args[0], ctx), 0.5)
        case "lgamma":  # x log x
            return _scaled(growth(args[0], ctx), 2.0)
        case "rsqrt" | "tanh" | "sigmoid" | "erf" | "erfinv" | "sin" | "cos" | "sign" | "log" | "log2" | "log1p":
            return {}
        case "lt" | "le" | "gt" | "ge" | "eq" | "ne" | "and" | "or" | "not" | "isnan" | "isinf" | "random" | "random16":
            return {}
        case "expm1":
            return {k: math.inf for k, v in growth(args[0], ctx).items() if v > 0}
        case "where":
            return _widest(growth(args[1], ctx), growth(args[2], ctx))
    out: Growth = {}
    for a in args:
        out = _widest(out, growth(a, ctx))
    return out


def _combine(a: Growth, b: Growth) -> Growth:
    return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in {**a, **b}}


def _widest(a: Growth, b: Growth) -> Growth:
    return {k: max(a.get(k, 0.0), b.get(k, 0.0)) for k in {**a, **b}}


def _scaled(a: Growth, p: float) -> Growth:
    return {k: v * p for k, v in a.items() if v and p}


def bounded_exponent(e: Expr, ctx: Context) -> bool:
    """Whether e = c * (x - max x) + (something <= 0): exp of it never exceeds 1."""
    rest = summands(e)
    for info in ctx.infos.values():
        if info.var.reducer not in ("max", "min"):
            continue
        sign = 1 if info.var.reducer == "max" else -1
        plus = [p for p in rest if scaled_copy(p, info.element, sign, ctx)]
        minus = [p for p in rest if scaled_copy((-p[0], p[1]), info.load, sign, ctx)]
        if plus and minus:
            others = [p for p in rest if p not in (plus[0], minus[0])]
            if all(ctx.range(p).hi <= 0 if s > 0 else ctx.range(p).lo >= 0 for s, p in others):
                return True
    inner = e.args if isinstance(e, Call) and e.op == "mul" else ()
    for a, b in (inner, inner[::-1]) if inner else ():
        if isinstance(a, Const) and float(a.value) > 0 and bounded_exponent(b, ctx):
            return True
    return ctx.range(e).hi <= 0


def scaled_copy(part: tuple[int, Expr], of: Expr, sign: int, ctx: Context) -> bool:
    """Whether a signed summand is c * `of` with sign(c) = sign."""
    c, m = factor(part[1], ctx.scope)
    d, n = factor(of, ctx.scope)
    return m == n and d != 0 and c * part[0] / d * sign > 0


def may_delay(core: Expr, scale: Mono, ctx: Context) -> bool:
    """Whether summing `core` instead of core * scale cannot overflow where the original could not."""
    mine = growth(core, ctx)
    own = dict(mine)
    for atom, p in scale.items():
        for k, v in growth(atom, ctx).items():
            own[k] = own.get(k, 0.0) + (float(p) * v if not math.isinf(v) else (-math.inf if p < 0 else 0.0))
            if math.isnan(own[k]):
                own[k] = 0.0
    allowed = dict(own)
    for info in ctx.infos.values():
        allowed = _widest(allowed, growth(info.element, ctx))
    return all(v <= max(1.0, allowed.get(k, 0.0)) for k, v in mine.items())


def can_overflow(e: Expr, ctx: Context) -> bool:
    """Whether an exponential in `e` is not held down by a maximum: its overflow is the user's own."""
    return any(math.isinf(v) for v in growth(e, ctx).values())
