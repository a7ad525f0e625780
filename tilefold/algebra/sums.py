"""Sums and products that depend on earlier results.

Scalar repair (RedFuser 3.2, Neptune 4): F(x, D) = G(x) * H(D), and then
    h(t, D, D') = t * H(D)^-1 * H(D').
A body that is a sum of such groups becomes one state variable a group.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from tilefold.algebra import simplify as sm
from tilefold.algebra.cascade import Reduction
from tilefold.algebra.context import Context, identity_const, is_exponential, own_load
from tilefold.algebra.expr import Call, Const, Expr, Load, Size, call, walk
from tilefold.algebra.fold import StateVar
from tilefold.algebra.growth import may_delay
from tilefold.algebra.guard import correction, guard_element, ratio, removed
from tilefold.algebra.known import known_sum
from tilefold.algebra.linear import Part, group_is_polynomial, linear_part
from tilefold.algebra.terms import NONE, Group, Inseparable, Mono, scale
from tilefold.algebra.text import show

#: Most operations of factors that wait.
DELAYED = 100


def derive_sum(r: Reduction, body: Expr, ctx: Context) -> tuple[Expr, Expr]:
    """State variables of a sum; its value over the state, in the loop and at the end.

    sum of x / size = (sum of x) / size: an extent is the same for all elements, so the state holds the plain sum
    (RedFuser eq. 44 divides each element, and a partial sum of those is no mean of what was seen).
    """
    body, over = _extents_apart(body)
    groups = ctx.separate(body)
    if not groups and not ctx.scope.depends(body):  # 0 x is 0 only where x is finite: the body is summed as it is
        dtype = r.dtype.compute
        var = StateVar(r.name, "sum", r.dims, dtype, identity_const("sum", dtype), body)
        ctx.samples[r.name] = whole = ctx.add(var, body).load
        return whole, whole
    parts = []
    for n, g in enumerate(groups):
        delayed, core = choose_delay(g, ctx)
        coef, core = _constant(core) if delayed else (Fraction(1), core)
        name = r.name if n == 0 else ctx.fresh(f"{r.name}_part{n + 1}")
        make = linear_part if group_is_polynomial(g) else _scalar_part
        part = make(r, g, core, delayed, name, ctx)
        c = sm.number(coef)
        parts.append(replace(part, value=sm.mul(part.value, c), sample=sm.mul(part.sample, c)))
        _explain(r, g, delayed, ctx)
    sample = sm.total(apply(p.sample, p.delayed) for p in parts)
    value = sm.total(apply(p.value, p.delayed) for p in parts)
    final = sm.total(_corrected(p, ctx) for p in parts)
    if over is not None:
        ctx.law("extent", f"the elements of {r.name} share the divisor {show(over)}: it divides their sum")
        sample, value, final = (sm.div(e, over) for e in (sample, value, final))
    ctx.samples[r.name] = sample
    return value, final


def _extents_apart(body: Expr) -> tuple[Expr, Expr | None]:
    """The body without the extents that divide it, and their product; None: there are none."""
    match body:
        case Call("div", (a, b)) if _of_extents(b):
            core, over = _extents_apart(a)
            return core, b if over is None else sm.mul(over, b)
        case Call("mul", (Call("div", (c, b)), a)) | Call("mul", (a, Call("div", (c, b)))) if _of_extents(b):
            core, over = _extents_apart(sm.mul(c, a))
            return core, b if over is None else sm.mul(over, b)
    return body, None


def _of_extents(e: Expr) -> bool:
    """Whether a value follows from the program's extents alone."""
    nodes = list(walk(e))
    return any(isinstance(n, Size) for n in nodes) and all(isinstance(n, Size | Const | Call) for n in nodes)


def _constant(core: Expr) -> tuple[Fraction, Expr]:
    """A literal factor that can wait with the delayed ones (within a range that cannot matter to overflow)."""
    c, rest = sm.split_constant(core)
    return (c, rest) if 2.0**-20 < abs(c) < 2.0**20 else (Fraction(1), core)


def apply(t: Expr, h: Mono) -> Expr:
    """t * h, as quotients where powers are negative."""
    if not h:
        return t
    return (Mono({t: Fraction(1)}) * h).expr() if h.power(t) == 0 else sm.mul(t, h.expr())


def choose_delay(g: Group, ctx: Context) -> tuple[Mono, Expr]:
    """The factors of H that can wait for `finish`, and the body without them.

    What waits is in every later reduction that reads the result, so that factors of factors (rows that are scaled
    again and again) double with each: Inseparable where they have become long, and the next one has a pass of its own.
    """
    h = scale(g.terms)
    if not ctx.options.delay or not h or all(ctx.scope.pure_d(t) for t in g.terms):
        return NONE, g.expr
    if sum(1 for _ in walk(h.expr())) > DELAYED:
        raise Inseparable(f"what it is scaled by has more than {DELAYED} operations of earlier results")
    loose = Mono({a: p for a, p in h.items() if not is_exponential(a)})
    for atoms in (h, loose, *(Mono({a: p}) for a, p in h.items())):
        if atoms:
            core = removed(g, atoms, ctx)
            if core is not None and may_delay(core, atoms, ctx):
                return atoms, core
    return NONE, g.expr


def _scalar_part(r: Reduction, g: Group, core: Expr, delayed: Mono, name: str, ctx: Context) -> Part:
    kept = scale(g.terms) / delayed
    if all(ctx.scope.pure_d(t) for t in g.terms):
        return _repeated(r, g, ctx)
    known = known_sum(core, r, ctx) if kept and ctx.options.delay else None
    if known is not None and known != sm.ZERO:
        ctx.law("known sum", f"the sum of {show(core)} is {show(known)} already")
        return Part(known, core, delayed, NONE)
    dtype = r.dtype.compute
    element = guard_element(core, kept, ctx)
    repair: Expr | None = None
    if kept:
        load = own_load(StateVar(name, "sum", r.dims, dtype, sm.ZERO, core))
        repair = scalar_repair(load, kept, g, ctx)
    ctx.add(StateVar(name, "sum", r.dims, dtype, identity_const("sum", dtype), ctx.new(element), repair), core)
    return Part(own_load(ctx.infos[name].var), core, delayed, kept)


def scalar_repair(t: Load, kept: Mono, g: Group, ctx: Context, neutral: float = 0.0) -> Expr:
    """h(t, D, D') = t * H'(D')/H'(D); t itself where it is neutral and the ratio may not be finite."""
    out, safe = t, True
    factors: Expr = sm.ONE
    for atom, p in kept.items():
        q, ok = ratio(atom, p, g.terms, ctx)
        factors, safe = sm.mul(factors, q), safe and ok
    out = sm.mul(t, factors)  # type: ignore[assignment]
    return out if safe else call("where", call("eq", t, neutral), t, out)


def _repeated(r: Reduction, g: Group, ctx: Context) -> Part:
    """A body that is the same for every element: count times the body."""
    n = ctx.counter(r.dtype)
    ctx.law("constant body", f"every element adds the same {show(g.expr)}: the count of elements times it")
    return Part(sm.mul(n, g.expr), g.expr, NONE, NONE)


def _corrected(p: Part, ctx: Context) -> Expr:
    out = apply(p.value if p.settled is None else p.settled, p.delayed)
    if ctx.options.guards:
        if p.exact is not None:
            out = call("where", p.exact[0], apply(p.exact[1], p.delayed), out)
        for atom, power in p.kept.items():
            c = correction(atom, power, ctx)
            if c is not None and not math.isnan(ctx.at_identity(out)):
                out = sm.mul(out, c)
    return out


def _explain(r: Reduction, g: Group, delayed: Mono, ctx: Context) -> None:
    h = scale(g.terms)
    if not h:
        if not ctx.scope.depends(g.expr):
            ctx.law("independent", f"{r.name} does not depend on earlier results: no repair")
        return
    if not group_is_polynomial(g):
        gx = sm.total(sm.mul(sm.number(t.coef), t.x.expr()) for t in g.terms)
        ctx.law("scalar repair", f"{r.name}: F = G * H with G = {show(gx)}, H = {show(h.expr())}")
    if delayed:
        ctx.law("delay", f"{show(delayed.expr())} is needed only at the end: G grows no faster without it")
    kept = h / delayed
    if kept and ctx.options.delay:
        ctx.law("kept in the loop", f"{show(kept.expr())}: without it the partial sums could overflow where F cannot")


def derive_product(r: Reduction, body: Expr, ctx: Context) -> tuple[Expr, Expr]:
    """prod over l of G * H = (prod G) * H^n: repair (H(D')/H(D))^n, with the count n in the state."""
    groups = ctx.separate(body)
    if len(groups) != 1 or group_is_polynomial(groups[0]):
        raise Inseparable(
            f"a product of {show(body)} over n elements is a polynomial of degree n in the earlier results; "
            "no finite set of products closes"
        )
    g = groups[0]
    h = scale(g.terms)
    dtype = r.dtype.compute
    load = Load(r.name, own_load(StateVar(r.name, "prod", r.dims, dtype, sm.ONE, body)).index)
    repair: Expr | None = None
    element = body
    if h:
        n = ctx.counter(r.dtype)
        element = guard_element(body, h, ctx)
        rate = sm.product(ratio(atom, p, g.terms, ctx)[0] for atom, p in h.items())
        repair = sm.mul(load, call("pow", rate, ctx.old(n)))
        ctx.law("product repair", f"{r.name}: the product of G * H over n elements moves by (H(D')/H(D))**n")
    ctx.add(StateVar(r.name, "prod", r.dims, dtype, identity_const("prod", dtype), ctx.new(element), repair), body)
    final: Expr = load
    for atom, p in h.items():
        c = correction(atom, p, ctx) if ctx.options.guards else None
        if c is not None:
            final = sm.mul(final, call("pow", c, ctx.counter(r.dtype)))
    return load, final
