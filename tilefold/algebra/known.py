"""Sums that the state holds already, or that vanish by the definition of a shift (sum of x - mean)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from tilefold.algebra import simplify as sm
from tilefold.algebra.cascade import Reduction
from tilefold.algebra.context import Context, Info, key_of, reindex
from tilefold.algebra.expr import Call, Expr, Index, Load, call, dims_used, loads, walk
from tilefold.algebra.guard import dominated_factor, guard_divisors
from tilefold.algebra.terms import Mono, Term


@dataclass(frozen=True, slots=True)
class Raw:
    """A plain sum in the state: load = sum of coef * x."""

    x: Mono
    coef: Fraction
    load: Expr


def known_sum(phi: Expr, r: Reduction, ctx: Context) -> Expr | None:
    """Sum over the elements of `phi`, over state variables that exist already; 0 where it vanishes."""
    held = held_sum(phi, r, ctx)
    return vanishing_sum(phi, r, ctx) if held is None else held


def held_sum(phi: Expr, r: Reduction, ctx: Context) -> Expr | None:
    """Sum over the elements of `phi` where it is a state variable already, but for a factor."""
    lead, key = key_of(tuple(t for g in ctx.separate(phi) for t in g.terms))
    for info in ctx.infos.values():
        if info.var.reducer != "sum" or info.groups is None:
            continue
        for at in _assignments(info, r, phi, ctx):
            element, load = reindex(info.element, at), reindex(info.load, at)
            mine = tuple(t for g in ctx.separate(element) for t in g.terms)
            c, other = key_of(mine)
            if other == key:
                return sm.mul(sm.number(lead / c), load)
    return None


def vanishing_sum(phi: Expr, r: Reduction, ctx: Context) -> Expr | None:
    """0 where the sum over the elements of `phi` is that by the definition of its shifts (see `_vanishing`)."""
    terms = tuple(t for g in ctx.separate(phi) for t in g.terms)
    raw: list[Raw] = []
    for info in ctx.infos.values():
        if info.var.reducer != "sum" or info.groups is None:
            continue
        for at in _assignments(info, r, phi, ctx):
            element, load = reindex(info.element, at), reindex(info.load, at)
            mine = tuple(t for g in ctx.separate(element) for t in g.terms)
            if len(mine) == 1 and not mine[0].d and info.var.repair is None:
                raw.append(Raw(mine[0].x, mine[0].coef, load))
    return _vanishing(terms, raw, ctx)


def _assignments(info: Info, r: Reduction, phi: Expr, ctx: Context) -> Iterator[dict[str, Expr]]:
    """Dims of a state -> dims of `r`, distinct ones, for which what is summed in the state can be what `phi` sums: each
    tensor that varies in it has to be in `phi`, and be read there along these dims in the same axes. (All permutations
    of six dims are 720, windows of an image have as many.)"""
    there: dict[str, list[Load]] = {}
    for ld in loads(phi):
        there.setdefault(ld.tensor, []).append(ld)
    allowed = {a: list(r.dims) for a in info.var.dims}
    axes = set(ctx.cascade.axes)
    for ld in loads(info.element):
        others = there.get(ld.tensor, [])
        if not others and axes & dims_used(ld):
            return
        for n, ix in enumerate(ld.index if others else ()):
            if isinstance(ix, Index) and ix.dim in allowed:
                at = {x.index[n] for x in others}
                allowed[ix.dim] = [d for d in allowed[ix.dim] if Index(d) in at]
    free = [a for a in allowed if a not in dims_used(info.element)]  # along which the state is constant: anything
    held = [a for a in allowed if a not in free]
    for dims in product(*(allowed[a] for a in held)):
        rest = [d for d in r.dims if d not in dims]
        if len(set(dims)) == len(dims) and len(rest) >= len(free):
            yield {a: Index(d) for a, d in zip((*held, *free), (*dims, *rest[: len(free)]), strict=True)}


def _vanishing(terms: tuple[Term, ...], raw: list[Raw], ctx: Context) -> Expr | None:
    """0 where the terms add up to 0 by the definition of the shifts (the sum of x - mean).

    Where a shift divides by a sum that may be 0, its guard breaks the relation there, and the
    terms that do not contain the divisor remain.
    """
    parts: list[Expr] = []
    for t in terms:
        exact = (k for k in raw if k.x == t.x)
        hit = next(exact, None) or next((k for k in raw if _is_parameter(t.x / k.x, ctx)), None)
        if hit is None:
            return None
        parts.append(sm.mul(sm.number(t.coef / hit.coef), sm.mul((t.x / hit.x).expr(), sm.mul(hit.load, t.d.expr()))))
    if not _is_zero(parts, ctx):
        return None
    open_ = [d for p in parts for d in _divisors(p) if not ctx.range(d, partial=True).never_zero]
    open_ = [d for d in dict.fromkeys(open_) if not dominated_factor(d, terms, ctx)]
    if not open_ or not ctx.options.guards:
        return sm.ZERO
    d = open_[0]
    left = [guard_divisors(p, ctx) for p in parts if not _has_factor(p, d)]
    return call("where", call("eq", d, 0.0), sm.total(left), 0.0)


def _has_factor(e: Expr, d: Expr) -> bool:
    """Whether e is a product with d among its factors (in a numerator)."""
    match e:
        case Call("mul", (a, b)):
            return _has_factor(a, d) or _has_factor(b, d)
        case Call("neg", (a,)):
            return _has_factor(a, d)
        case Call("div", (a, _)):
            return _has_factor(a, d)
    return e == d


def _is_parameter(m: Mono, ctx: Context) -> bool:
    return not any(ctx.scope.varies(a) for a, _ in m.items())


def _divisors(e: Expr) -> list[Expr]:
    return list(dict.fromkeys(n.args[1] for n in walk(e) if isinstance(n, Call) and n.op == "div"))


def _is_zero(parts: list[Expr], ctx: Context) -> bool:
    """Identity test at random points (Schwartz-Zippel; the expressions are rational in the loads)."""
    rng = random.Random(0)
    names = dict.fromkeys(n.tensor for p in parts for n in loads(p))
    for _ in range(4):
        state = {n: rng.uniform(1.5, 3.5) for n in names}
        values = [ctx.probe(p, state) for p in parts]
        if not abs(sum(values)) <= 1e-10 * sum(map(abs, values)):
            return False
    return True
