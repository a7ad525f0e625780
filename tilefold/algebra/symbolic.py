"""The laws of a Fold, proved with sympy on its unguarded forms.

For every repaired state variable:
    h(sum F(x, D), D, D') = sum F(x, D')           on two generic elements (tag update, Neptune Def. 4.2)
    h(t, D, D) = t,  h(h(t, D, D'), D', D'') = h(t, D, D'')
    h(a + b) = h(a) + h(b)                         (RedFuser eq. 5, Neptune eq. 4)
and for scalar repair the two derivations of the papers, which must agree with it:
    F(x, D) F(x0, D0) = F(x, D0) F(x0, D)          fixed point (RedFuser eq. 23)
    h(t, D, D') = g(D', g^-1(D, t))                inversion (Neptune eq. 5)

and for every reduction  finish(F) = F: the body is recovered from what the state adds up.

Symbols stand for positive numbers; both sides are analytic, so an identity there is an
identity where they are defined. Scalar repair is decided by expansion in sympy. The larger
expressions of linear repair, and what sympy does not expand, are decided at random points:
exactly where both sides are rational, else in float64 (then the check says "numeric").
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch

from tilefold.algebra import simplify as sm
from tilefold.algebra.context import Context, reindex
from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym, loads, substitute, transform, walk
from tilefold.algebra.fold import NEW, OLD, Check, StateVar
from tilefold.algebra.invert import VARIABLE, invert
from tilefold.algebra.nameless import numbered
from tilefold.algebra.terms import Inseparable
from tilefold.algebra.text import show


@lru_cache(maxsize=1)
def sympy() -> Any:
    """The sympy module, loaded at the first derivation."""
    import sympy as loaded  # noqa: PLC0415  (half a second that `import tilefold` need not pay)

    return loaded


def to_sympy(e: Expr) -> Any:
    """The expression over positive symbols, one for each distinct load, index, size or symbol."""
    return _convert(e, sympy())


def _convert(e: Expr, sp: Any) -> Any:
    match e:
        case Const(value, _):
            return _number(float(value), sp)
        case Load() | Index() | Size() | Sym():
            return sp.Symbol(show(e), positive=True)
        case Cast(arg, dtype):
            return _convert(arg, sp) if dtype.is_float else sp.Function(dtype.value, positive=True)(_convert(arg, sp))
        case Call(op, args):
            a = [_convert(x, sp) for x in args]
            return _OPERATIONS[op](sp, *a) if op in _OPERATIONS else sp.Function(op, positive=True)(*a)
    raise AssertionError(e)


def _number(v: float, sp: Any) -> Any:
    if v != v or v in (float("inf"), float("-inf")):
        return sp.nan if v != v else (sp.oo if v > 0 else -sp.oo)
    f = _literal(v)
    return sp.Rational(f.numerator, f.denominator)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda sp, a, b: a + b,
    "sub": lambda sp, a, b: a - b,
    "mul": lambda sp, a, b: a * b,
    "div": lambda sp, a, b: a / b,
    "neg": lambda sp, a: -a,
    "pow": lambda sp, a, b: a**b,
    "exp": lambda sp, a: sp.exp(a),
    "exp2": lambda sp, a: 2**a,
    "expm1": lambda sp, a: sp.exp(a) - 1,
    "log": lambda sp, a: sp.log(a),
    "log2": lambda sp, a: sp.log(a) / sp.log(2),
    "log1p": lambda sp, a: sp.log(1 + a),
    "sqrt": lambda sp, a: sp.sqrt(a),
    "rsqrt": lambda sp, a: 1 / sp.sqrt(a),
    "abs": lambda sp, a: sp.Abs(a),
    "sin": lambda sp, a: sp.sin(a),
    "cos": lambda sp, a: sp.cos(a),
}


def is_zero(d: Any) -> bool:
    """Whether a sympy expression expands to zero."""
    sp = sympy()
    if d == 0 or sp.expand(d) == 0:
        return True
    if d.has(sp.sin, sp.cos):
        return bool(sp.expand(sp.expand_trig(d)) == 0)
    return bool(sp.expand(sp.powsimp(sp.expand(d))) == 0)


def equal_at_points(lhs: Expr, rhs: Expr, given: Mapping[Expr, Expr]) -> tuple[bool, str]:
    """Identity test at random points (Schwartz-Zippel): exact where both sides are rational, else float64.

    `given`: what some names stand for, in terms of others: written out, their expressions would double with each.
    """
    method = "symbolic"
    for seed in range(3):
        at = _Point(seed, given)
        try:
            if at.rational(lhs) != at.rational(rhs):
                return False, method
        except ZeroDivisionError:  # a divisor that is 0 there, as one that is always: nothing is shown
            return False, method
        except ValueError:
            method = "numeric"
            a, b = at.rounded(lhs), at.rounded(rhs)
            if not abs(a - b) <= 1e-9 * max(abs(a), abs(b)):
                return False, method
    return True, method


class _Point:
    """A reproducible value for each name that is not `given`, and the values of expressions there."""

    def __init__(self, seed: int, given: Mapping[Expr, Expr]):
        self.seed, self.given = seed, given
        self._fractions: dict[Expr, Fraction] = {}
        self._floats: dict[Expr, float] = {}

    def rational(self, e: Expr) -> Fraction:
        """Exactly; ValueError: it has operations that leave the rationals."""
        match e:
            case Const(value, _):
                return _literal(float(value))
            case Load() | Index() | Size() | Sym():
                if e not in self._fractions:
                    self._fractions[e] = self.rational(self.given[e]) if e in self.given else self._random(e)
                return self._fractions[e]
            case Call("pow", (a, Const() as c)) if float(c.value).is_integer():
                return self.rational(a) ** int(c.value)
            case Call(op, args) if op in _FIELD:
                return _FIELD[op](*(self.rational(a) for a in args))
        raise ValueError(e)

    def rounded(self, e: Expr) -> float:
        """In float64."""
        names = {n: Load(f"%{k}", ()) for k, n in enumerate(_names(e))}
        values = {v.tensor: self._float_of(n) for n, v in names.items()}
        env = Env(lambda name, at: torch.tensor(values[name], dtype=torch.float64), {}, {}, exact=True)
        return float(evaluate(substitute(e, names), Grid({}), env))

    def _float_of(self, name: Expr) -> float:
        if name not in self._floats:
            self._floats[name] = self.rounded(self.given[name]) if name in self.given else float(self._random(name))
        return self._floats[name]

    def _random(self, name: Expr) -> Fraction:
        rng = random.Random(f"{self.seed} {show(name)}")
        return Fraction(rng.randint(20, 97), rng.randint(20, 97))


def _literal(v: float) -> Fraction:
    """The simple fraction that a literal stands for (0.16666666666666666 is 1/6)."""
    exact = Fraction(repr(v))
    near = exact.limit_denominator(10**6)
    return near if float(near) == v else exact


_FIELD: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "abs": abs,
    "maximum": max,
    "minimum": min,
}


def _names(e: Expr) -> list[Expr]:
    match e:
        case Load() | Index() | Size() | Sym():
            return [e]
        case Call(_, args):
            return list(dict.fromkeys(n for a in args for n in _names(a)))
        case Cast(arg, _):
            return _names(arg)
    return []


# -- the laws --------------------------------------------------------------------------------


def prove(ctx: Context) -> tuple[Check, ...]:
    """Checks of every reduction and every repaired state variable of an unguarded derivation."""
    out = [_recovered(name, ctx.bodies[name], ctx) for name in ctx.samples if ctx.scope.depends(ctx.bodies[name])]
    for info in ctx.infos.values():
        v = info.var
        if v.repair is None:
            continue
        if v.reducer in ("sum", "prod"):
            out.append(_tag_update(v, ctx))
        else:
            out.append(_order_update(v, ctx))
        out += _laws_of_h(v, ctx)
        out += _scalar_laws(v, info.element, ctx)
    return tuple(out)


def prove_methods(ctx: Context) -> tuple[Check, ...]:
    """Only the agreement of the two papers' methods, for the undelayed form."""
    return tuple(c for i in ctx.infos.values() if i.var.repair is not None for c in _scalar_laws(i.var, i.element, ctx))


def _check(name: str, lhs: Expr, rhs: Expr, by_points: bool = False, given: Mapping[Expr, Expr] | None = None) -> Check:
    named = [e for pair in (given or {}).items() for e in pair]
    ok, method = _equal(numbered(lhs, rhs, *named), by_points)
    return Check(name, method, ok, "" if ok else f"{show(lhs)} differs from {show(rhs)}")


#: Operations that are expanded by sympy: products of sums of products grow beyond any time, values at points do not.
EXPANDED = 130


@lru_cache(maxsize=1024)
def _equal(exprs: tuple[Expr, ...], by_points: bool) -> tuple[bool, str]:
    """Whether the first two expressions (`numbered`) are equal, and the method that told. The others: names, and what
    each stands for."""
    lhs, rhs, *named = exprs
    short = sum(1 for e in (lhs, rhs) for _ in walk(e)) <= EXPANDED
    if short and not by_points and is_zero(to_sympy(lhs) - to_sympy(rhs)):
        return True, "symbolic"
    return equal_at_points(lhs, rhs, dict(zip(named[::2], named[1::2], strict=True)))


def _recovered(name: str, body: Expr, ctx: Context) -> Check:
    """What one element contributes, put together from G and H, is the body."""
    lhs, rhs = _sized(ctx.samples[name], ctx), _sized(body, ctx)
    return _check(f"{name}: F is recovered, F = G (*) H", lhs, rhs, bool(ctx.linear))


def _sized(e: Expr, ctx: Context) -> Expr:
    """The extent of the axes as the count of elements."""
    if ctx.count is None:
        return e
    axes = ctx.cascade.axes
    table: dict[Expr, Expr] = {Size(a): Load(f"%{a}", ()) for a in axes}
    extent = sm.product(table[Size(a)] for a in axes)
    return substitute(e, {**table, Load(ctx.count, ()): extent})


def _element_at(e: Expr, n: int, ctx: Context) -> Expr:
    """The element of position n: indices of the axes become the literal n."""
    axes = ctx.axes
    return transform(e, lambda x: Const(n, sm.ONE.dtype) if isinstance(x, Index) and x.dim in axes else None)


def _over_elements(e: Expr, ctx: Context, v: StateVar) -> Expr:
    parts = [_element_at(e, n, ctx) for n in (0, 1)]
    return sm.product(parts) if v.reducer == "prod" else sm.total(parts)


def _tag_update(v: StateVar, ctx: Context) -> Check:
    """h(R F(x, D), D, D') = R F(x, D') for two generic elements.

    Linear repair uses other sums than D: there, all sums are those of the two elements.
    """
    assert v.repair is not None
    held: dict[Expr, Expr] = {Load(v.name, tuple(Index(d) for d in v.dims)): _at_old(v, ctx)}
    lhs, rhs = substitute(v.repair, held), _over_elements(v.element, ctx, v)
    if v.reducer == "prod" and ctx.count is not None:
        lhs = substitute(lhs, {Load(ctx.count + OLD, ()): Const(2.0, sm.ONE.dtype)})
    linear = v.name in ctx.linear
    return _check(f"{v.name}: h(R F(x, D), D, D') = R F(x, D')", lhs, rhs, linear, _sums(lhs, ctx) if linear else None)


def _at_old(v: StateVar, ctx: Context) -> Expr:
    names = {u + NEW: u + OLD for u in ctx.infos}
    return _over_elements(sm.rename_loads(v.element, names), ctx, v)


def _sums(e: Expr, ctx: Context) -> dict[Expr, Expr]:
    """What sums `@old` that `e` reads, and those that these read, are over the two elements."""
    sums = {i.var.name + OLD: i.var for i in ctx.infos.values() if i.var.reducer == "sum"}
    found: dict[Expr, Expr] = {}
    todo = [e]
    while todo:
        for load in loads(todo.pop()):
            if load.tensor in sums and load not in found:
                v = sums[load.tensor]
                found[load] = reindex(_at_old(v, ctx), dict(zip(v.dims, load.index, strict=True)))
                todo.append(found[load])
    return found


def _order_update(v: StateVar, ctx: Context) -> Check:
    """For max and min it is enough that h moves every element: h(F(x, D), D, D') = F(x, D')."""
    assert v.repair is not None
    old = sm.rename_loads(v.element, {u + NEW: u + OLD for u in ctx.infos})
    lhs = substitute(v.repair, {Load(v.name, tuple(Index(d) for d in v.dims)): old})
    return _check(f"{v.name}: h(F(x, D), D, D') = F(x, D')", lhs, v.element)


def _laws_of_h(v: StateVar, ctx: Context) -> list[Check]:
    assert v.repair is not None
    t = Load(v.name, tuple(Index(d) for d in v.dims))
    same = sm.rename_loads(v.repair, {u + NEW: u + OLD for u in ctx.infos})
    out = [_check(f"{v.name}: h(t, D, D) = t", same, t, v.name in ctx.linear)]
    if v.name in ctx.linear or v.reducer == "prod":
        return out
    later = {u + NEW: u + "@later" for u in ctx.infos}
    second = sm.rename_loads(sm.rename_loads(v.repair, later), {u + OLD: u + NEW for u in ctx.infos})
    twice = substitute(second, {t: v.repair})
    out.append(_check(f"{v.name}: h(h(t, D, D'), D', D'') = h(t, D, D'')", twice, sm.rename_loads(v.repair, later)))
    if v.reducer == "sum":
        a, b = Load("%a", ()), Load("%b", ())
        lhs = substitute(v.repair, {t: sm.add(a, b)})
        rhs = sm.add(substitute(v.repair, {t: a}), substitute(v.repair, {t: b}))
        out.append(_check(f"{v.name}: h(a + b) = h(a) + h(b)", lhs, rhs))
    elif v.reducer in ("max", "min", "argmax", "argmin", "topk"):
        out.append(Check(f"{v.name}: h is increasing, so h(max(a, b)) = max(h(a), h(b))", "facts", True, "H'/H >= 0"))
    return out


def _scalar_laws(v: StateVar, element: Expr, ctx: Context) -> list[Check]:
    """Fixed point and inversion, where F is one product (or one sum, for max and min) of x and D parts."""
    assert v.repair is not None
    try:
        groups = ctx.separate(element)
    except Inseparable:
        return []
    terms = [t for g in groups for t in g.terms]
    if v.reducer in ("sum", "max", "min") and len(groups) == 1 and len({t.d for t in terms}) == 1 and terms[0].d:
        out = [_fixed_point(v, element, ctx)]
        g = sm.mul(VARIABLE, terms[0].d.expr())
        back = invert(g, Load(v.name, tuple(Index(d) for d in v.dims)))
        if back is not None:
            h = substitute(ctx.new(g), {VARIABLE: ctx.old(back)})
            h = sm.rename_loads(h, {v.name + OLD: v.name})
            out.append(_check(f"{v.name}: change of variables + inversion gives the same h", h, v.repair))
        return out
    return []


def _fixed_point(v: StateVar, element: Expr, ctx: Context) -> Check:
    """RedFuser eq. 23 with a generic fixed point (x0, D0)."""

    def at(n: int, tag: str) -> Expr:
        return _element_at(ctx.suffix(element, tag), n, ctx)

    lhs, rhs = sm.mul(at(1, NEW), at(0, OLD)), sm.mul(at(1, OLD), at(0, NEW))
    return _check(f"{v.name}: fixed-point test F(x, D) F(x0, D0) = F(x, D0) F(x0, D)", lhs, rhs)
