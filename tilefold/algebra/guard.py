"""Non-invertible H: the identity stands in for it, decided at run time (RedFuser A.1, eqs. 27-28).

Three kinds of value cannot be undone, and each has its stand-in:
  a maximum of nothing (or of masked elements only) inside an exponent or a shift: -inf -> 0,
  a factor that is zero (amax of zeros, a sum of nothing): 0 -> 1,
  a shift that is not finite in the state of no elements (log of an empty sum): -> 0.
+inf is never guarded: where torch gives NaN, so does a Fold. What a guard hides is undone
in `finish` by H(D) * H'(D)^-1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from tilefold.algebra import simplify as sm
from tilefold.algebra.context import Context, exponent, is_exponential, with_exponent
from tilefold.algebra.expr import Call, Cast, Expr, Load, call, rebuild, substitute, walk
from tilefold.algebra.growth import scaled_copy
from tilefold.algebra.separate import summands
from tilefold.algebra.terms import Group, Inseparable, Mono, Term, factor


def infinite_loads(e: Expr, ctx: Context) -> list[Load]:
    """State loads in the D-only `e` whose value for no elements is infinite and makes `e` not finite."""
    out = []
    for load in ctx.deps(e):
        identity = ctx.infos[load.tensor].identity
        if math.isinf(identity):
            state = {n: (i.identity if n == load.tensor else 1.0) for n, i in ctx.infos.items()}
            if not math.isfinite(ctx.probe(e, state)):
                out.append(load)
    return out


def finite(load: Load, ctx: Context) -> Expr:
    """The load with 0 in place of its infinite identity."""
    return call("where", call("eq", load, ctx.infos[load.tensor].var.identity), 0.0, load)


def guard_exponents(e: Expr, ctx: Context) -> Expr:
    """Exponents of `e` made finite: exp(x - m) becomes exp(x - where(m == -inf, 0, m))."""
    if not ctx.scope.depends(e):
        return e
    if isinstance(e, Call) and is_exponential(e):
        return with_exponent(e, guard_shifts(exponent(e), ctx))
    match e:
        case Call(_, args):
            return rebuild(e, tuple(guard_exponents(a, ctx) for a in args))
        case Cast(arg, _):
            return rebuild(e, (guard_exponents(arg, ctx),))
    return e


def guard_shifts(e: Expr, ctx: Context) -> Expr:
    """Infinite identities inside the D-only parts of `e` replaced by 0."""
    if not ctx.scope.depends(e):
        return e
    if not ctx.scope.varies(e):
        return substitute(e, {load: finite(load, ctx) for load in infinite_loads(e, ctx)})
    match e:
        case Call(_, args):
            return rebuild(e, tuple(guard_shifts(a, ctx) for a in args))
        case Cast(arg, _):
            return rebuild(e, (guard_shifts(arg, ctx),))
    return e


def guard_shift(u: Expr, ctx: Context) -> Expr:
    """A D-only shift that is finite in every state."""
    u = guard_divisors(substitute(u, {load: finite(load, ctx) for load in infinite_loads(u, ctx)}), ctx)
    v = ctx.at_identity(u)
    if math.isinf(v):
        return call("where", call("eq", u, sm.number(v)), 0.0, u)
    return u


def guard_divisors(u: Expr, ctx: Context) -> Expr:
    """Divisors that may be zero replaced by 1 where they are."""
    match u:
        case Call("div", (a, b)) if ctx.scope.depends(b) and not ctx.range(b, partial=True).never_zero:
            return call("div", guard_divisors(a, ctx), call("where", call("eq", b, 0.0), 1.0, b))
        case Call(_, args):
            return rebuild(u, tuple(guard_divisors(a, ctx) for a in args))
    return u


def hidden_tests(u: Expr, ctx: Context) -> list[Expr]:
    """Conditions under which `guard_shift` replaces something, in states of at least one element."""
    tests = [call("eq", n, ctx.infos[n.tensor].var.identity) for n in infinite_loads(u, ctx)]
    for n in walk(u):
        if (
            isinstance(n, Call)
            and n.op == "div"
            and ctx.scope.depends(n.args[1])
            and not ctx.range(n.args[1]).never_zero
        ):
            tests.append(call("eq", n.args[1], 0.0))
    return tests


def guard_factor(a: Expr, ctx: Context) -> Expr:
    """A factor over D with 1 in place of 0 and of its infinite identity."""
    out = a
    if not ctx.range(a, partial=True).never_zero:
        out = call("where", call("eq", a, 0.0), 1.0, out)
    v = ctx.at_identity(a)
    if math.isinf(v):
        out = call("where", call("eq", a, sm.number(v)), 1.0, out)
    return out


def guard_element(e: Expr, kept: Mono, ctx: Context) -> Expr:
    """An element with its kept factors and exponents guarded."""
    if not ctx.options.guards:
        return e
    e = guard_exponents(e, ctx)
    for atom, _ in kept.items():
        if not is_exponential(atom):
            e = sm.replace(e, atom, guard_factor(atom, ctx))
    return e


# -- domination: where H is not invertible, all elements seen so far are zero ---------------


def x_atoms(groups: Iterable[Group]) -> frozenset[Expr]:
    """Atoms over x of all terms, signs and absolute values ignored."""
    return frozenset(_bare(a) for g in groups for t in g.terms for a, _ in t.x.items())


def _bare(a: Expr) -> Expr:
    return a.args[0] if isinstance(a, Call) and a.op == "abs" else a


def dominated_exponent(atom: Expr, terms: Iterable[Term], ctx: Context) -> bool:
    """Whether exp(x) of every element is 0 while the maximum in the exponent of `atom` is -inf."""
    loads = [n for n in ctx.deps(exponent(atom)) if ctx.infos[n.tensor].var.reducer in ("max", "min")]
    exps = [n for t in terms for a, _ in t.x.items() for n in walk(a) if isinstance(n, Call) and is_exponential(n)]
    for load in loads:
        info = ctx.infos[load.tensor]
        sign = 1 if info.var.reducer == "max" else -1
        for e in exps:
            if any(scaled_copy(p, info.element, sign, ctx) for p in _flat(exponent(e))):
                return True
    return False


def _flat(e: Expr) -> list[tuple[int, Expr]]:
    return summands(e)


def dominated_factor(atom: Expr, terms: tuple[Term, ...], ctx: Context) -> bool:
    """Whether every element seen so far is 0 while `atom` is 0: it sums or maximises |factors of G|."""
    if not isinstance(atom, Load) or atom.tensor not in ctx.infos:
        return False
    info = ctx.infos[atom.tensor]
    if info.groups is None or not info.range.nonneg or info.var.reducer not in ("sum", "max"):
        return False
    mine = [frozenset(_bare(a) for a, _ in t.x.items()) for t in terms]
    vanish = {_bare(a) for a in x_atoms(info.groups) if not ctx.range(a).never_zero or is_exponential(a)}
    return bool(vanish) and len(info.groups) == 1 and all(vanish <= atoms for atoms in mine)


# -- ratios ---------------------------------------------------------------------------------


def ratio(atom: Expr, p: Fraction, terms: tuple[Term, ...], ctx: Context, alone: bool = True) -> tuple[Expr, bool]:
    """H(D')/H(D) for the factor atom^p, and whether it is finite in every state.

    `alone`: it multiplies one sum, which is 0 where a dominating factor is 0.
    """
    if is_exponential(atom):
        return _exp_ratio(atom, p, terms, ctx)
    if not ctx.options.guards:
        old = new = atom
        safe = True
    else:
        new = guard_factor(atom, ctx)
        dominated = alone and p < 0 and dominated_factor(atom, terms, ctx) and math.isfinite(ctx.at_identity(atom))
        old = atom if dominated else guard_factor(atom, ctx)
        safe = dominated or new == atom or p > 0
    a, b = ctx.old(old), ctx.new(new)
    return (sm.power(sm.div(a, b), -p) if p < 0 else sm.power(sm.div(b, a), p)), safe


def _exp_ratio(atom: Expr, p: Fraction, terms: tuple[Term, ...], ctx: Context) -> tuple[Expr, bool]:
    """exp(b(D')) / exp(b(D)) = exp(b(D') - b(D)), difference taken summand by summand."""
    b = exponent(atom)
    dominated = ctx.options.guards and dominated_exponent(atom, terms, ctx)
    guarded = guard_shifts(b, ctx) if ctx.options.guards else b
    before = b if dominated else guarded
    parts = []
    for (s, old), (_, new) in zip(summands(before), summands(guarded), strict=True):
        parts.append(sm.sub(ctx.old(old), ctx.new(new)) if s < 0 else sm.sub(ctx.new(new), ctx.old(old)))
    out = with_exponent(atom, sm.mul(sm.number(p), sm.total(parts)))
    if not ctx.options.guards:
        return out, True
    if dominated:
        v = ctx.at_identity(b)
        if math.isfinite(v):  # the user's own guard: exp(x - where(m == -inf, 0, m))
            load = next(n for n in ctx.deps(b) if ctx.infos[n.tensor].var.reducer in ("max", "min"))
            seen = call("eq", ctx.old(load), ctx.infos[load.tensor].var.identity)
            out = call("where", seen, 0.0, out)
        return out, True
    return out, guarded == b and not infinite_loads(b, ctx) and not _starts_infinite(b, ctx)


def _starts_infinite(b: Expr, ctx: Context) -> bool:
    return any(math.isinf(ctx.infos[n.tensor].identity) for n in ctx.deps(b))


def correction(atom: Expr, p: Fraction, ctx: Context) -> Expr | None:
    """H(D) * H'(D)^-1 for a kept factor: 1 unless its guard was active at the final D."""
    if is_exponential(atom):
        b = exponent(atom)
        hidden = [call("eq", n, ctx.infos[n.tensor].var.identity) for n in infinite_loads(b, ctx)]
        raw = with_exponent(atom, b)
    else:
        hidden = [call("eq", atom, 0.0)] if not ctx.range(atom, partial=False).never_zero else []
        raw = Mono({atom: p}).expr()
    if not hidden:
        return None
    test = hidden[0]
    for h in hidden[1:]:
        test = call("or", test, h)
    return call("where", test, raw, 1.0)


# -- delaying -------------------------------------------------------------------------------


def strip(e: Expr, atoms: frozenset[Expr], ctx: Context) -> Expr:
    """`e` with the given factors over D removed from its products."""
    scope = ctx.scope
    if not scope.depends(e):
        return e
    if not scope.varies(e):
        c, m = factor(e, scope)
        kept = Mono({a: p for a, p in m.items() if a not in atoms})
        return e if kept == m else sm.mul(sm.number(c), kept.expr())
    match e:
        case Call(("exp" | "exp2"), (arg,)):
            return rebuild(e, (sm.simplify(_strip_logs(arg, atoms)),))
        case Call(("mul" | "div" | "add" | "sub" | "neg" | "sqrt" | "rsqrt" | "abs" | "maximum" | "minimum"), args):
            return sm.simplify(rebuild(e, tuple(strip(a, atoms, ctx) for a in args)))
        case Call("pow", (base, p)):
            return rebuild(e, (strip(base, atoms, ctx), p))
        case Call("where", (test, a, b)):
            return rebuild(e, (test, strip(a, atoms, ctx), strip(b, atoms, ctx)))
        case Cast(arg, _):
            return rebuild(e, (strip(arg, atoms, ctx),))
    return e


def _strip_logs(e: Expr, atoms: frozenset[Expr]) -> Expr:
    for a in sorted(atoms, key=repr):
        e = sm.replace(e, call("log", a), sm.ZERO)
    return e


def removed(group: Group, atoms: Mono, ctx: Context) -> Expr | None:
    """group.expr / atoms, None if the expression does not allow it (checked by separating again)."""
    e = strip(group.expr, frozenset(a for a, _ in atoms.items()), ctx)
    try:
        again = ctx.separate(e)
    except Inseparable:
        return None
    want = {(t.x, t.d / atoms): t.coef for t in group.terms}
    if len(again) == 1 and {(t.x, t.d): t.coef for t in again[0].terms} == want:
        return e
    return None
