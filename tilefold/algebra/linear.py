"""Linear repair: F(x, D) is a polynomial in shifts u(D), so its sums move by a matrix T(D, D').

Law (Taylor, exact for polynomials):  F(x, u') = sum over a of (u' - u)^a / a! * d^a F/du^a (x, u).

The derivatives of F span a finite space, closed under differentiation; the sum of each
basis function is a state variable, unless it is known already. For the mean u = s / n the
sum of x - u is s - n u = 0 and drops out: what remains is Chan's parallel variance. The
running count n stands in for the extent of the axes, so that the u of a partial result is
the mean of what it has seen and every sum stays centred (stable), never a raw moment.

In the numbers of a machine u is s / n rounded, and the sum of x - u is not 0: with values near
1e5 a float32 mean is off by 4e-3, and with a spread of 1 the sum of squares about it by 1e-5 of
itself and more, at each merge. So that sum is a state variable after all, the *residual*: the sums
are exact about whatever u was used, moved exactly from one u to the next, and `finish` moves them
to the u at which the residual is 0. For squares, sum (x - u)^2 - (sum (x - u))^2 / n (Chan, Golub,
LeVeque 1983, eq. 1.7, the corrected two-pass algorithm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce

from tilefold.algebra import simplify as sm
from tilefold.algebra.cascade import Reduction
from tilefold.algebra.context import Context, identity_const, is_exponential, key_of, used_dims
from tilefold.algebra.expr import Call, Cast, Expr, Index, Load, Size, call, rebuild, substitute, tensors_read, walk
from tilefold.algebra.fold import StateVar
from tilefold.algebra.guard import guard_element, guard_shift, hidden_tests, ratio
from tilefold.algebra.known import held_sum, vanishing_sum
from tilefold.algebra.terms import Group, Inseparable, Mono, Term, factor, scale
from tilefold.algebra.text import show

MAX_BASIS = 24


@dataclass(frozen=True, slots=True)
class Shift:
    """A variable u of the polynomial: its expression over D, with the running count, and a placeholder."""

    source: Expr
    running: Expr
    symbol: Load


@dataclass(slots=True)
class Basis:
    """Functions closed under differentiation: `diffs[i][v] = (c, j)` says d phi_i / d u_v = c * phi_j."""

    functions: list[Expr]
    diffs: list[dict[int, tuple[Fraction, int]]]


def shifts_of(terms: tuple[Term, ...], h: Mono) -> list[Expr]:
    """Atoms over D that the terms of a group have in different powers; Inseparable if not a polynomial."""
    out: list[Expr] = []
    for t in terms:
        for atom, p in (t.d / h).items():
            if p < 0 or p.denominator != 1 or is_exponential(atom):
                raise Inseparable(f"the parts of the body scale differently with {show(atom)}")
            if atom not in out:
                out.append(atom)
    return out


def running(u: Expr, r: Reduction, ctx: Context) -> Expr:
    """u with the running count in place of the extent of the reduced axes."""
    axes = ctx.cascade.axes
    if not any(isinstance(n, Size) and n.dim in axes for n in walk(u)):
        return u
    n: Expr = ctx.counter(r.dtype)
    n = call("maximum", n, 1.0) if ctx.options.guards else n
    if len(axes) == 1:
        return substitute(u, {Size(axes[0]): n})
    c, m = factor(u, ctx.scope)
    powers = {m.power(Size(a)) for a in axes}
    if len(powers) == 1 and not any(isinstance(k, Size) for a, _ in m.items() for k in walk(a) if k != a):
        rest = m / m.only(Size(a) for a in axes)
        return sm.mul(sm.number(c), (rest * Mono({n: powers.pop()})).expr())
    others = sm.product(Size(a) for a in axes[1:])
    return substitute(u, {Size(axes[0]): sm.div(n, others)})


def place(e: Expr, shifts: list[Shift], ctx: Context) -> Expr:
    """Shifts in `e` replaced by their placeholders, outside exponents and scale factors."""
    scope = ctx.scope
    if not scope.depends(e) or (isinstance(e, Call) and is_exponential(e)):
        return e
    if not scope.varies(e):
        return _place_pure(e, shifts, ctx)
    match e:
        case Call(_, args):
            return rebuild(e, tuple(place(a, shifts, ctx) for a in args))
        case Cast(arg, _):
            return rebuild(e, (place(arg, shifts, ctx),))
    return e


def _place_pure(e: Expr, shifts: list[Shift], ctx: Context) -> Expr:
    c, m = factor(e, ctx.scope)
    for s in shifts:
        if e == s.source:
            return s.symbol
    for s in shifts:
        _, k = factor(s.source, ctx.scope)
        if m == k or (m and k and all(m.power(a) % p == 0 for a, p in k.items()) and m == k ** (_power(m, k))):
            return sm.mul(sm.number(c), sm.power(s.symbol, _power(m, k)))
    if isinstance(e, Call) and e.op in ("add", "sub", "neg", "mul"):
        return rebuild(e, tuple(place(a, shifts, ctx) for a in e.args))
    return e


def _power(m: Mono, k: Mono) -> Fraction:
    a, p = next(iter(k.items()))
    return m.power(a) / p


def close(f: Expr, shifts: list[Shift], ctx: Context) -> Basis:
    """The basis of derivatives of `f`; Inseparable if it does not stay finite."""
    basis = Basis([f], [])
    keys = {_key(f, shifts, ctx)[1]: 0}
    leads = [_key(f, shifts, ctx)[0]]
    while len(basis.diffs) < len(basis.functions):
        at = basis.functions[len(basis.diffs)]
        row: dict[int, tuple[Fraction, int]] = {}
        for v, s in enumerate(shifts):
            try:
                d = sm.diff(sm.powers(at), s.symbol)
            except ValueError:
                raise Inseparable(f"{show(at)} is not a polynomial in {show(s.source)}") from None
            if d is None:
                continue
            c, phi = sm.split_constant(sm.simplify(d))
            lead, key = _key(phi, shifts, ctx)
            if not key:
                continue
            if key not in keys:
                keys[key] = len(basis.functions)
                basis.functions.append(phi)
                leads.append(lead)
            j = keys[key]
            row[v] = (c * lead / leads[j], j)
        basis.diffs.append(row)
        if len(basis.functions) > MAX_BASIS:
            raise Inseparable(f"the derivatives of {show(f)} do not stay in a small finite set")
    return basis


def _key(phi: Expr, shifts: list[Shift], ctx: Context):  # type: ignore[no-untyped-def]
    concrete = substitute(phi, {s.symbol: s.running for s in shifts})
    groups = ctx.separate(concrete)
    return key_of(tuple(t for g in groups for t in g.terms))


def taylor(basis: Basis, i: int, shifts: int) -> dict[int, dict[tuple[int, ...], Fraction]]:
    """F_i(u') = sum over j of (polynomial in u' - u) F_j(u): coefficients by exponents of u' - u."""
    out: dict[int, dict[tuple[int, ...], Fraction]] = {}
    layer = {(tuple([0] * shifts)): (Fraction(1), i)}
    while layer:
        after: dict[tuple[int, ...], tuple[Fraction, int]] = {}
        for a, (c, j) in layer.items():
            fact = math.prod(math.factorial(k) for k in a)
            row = out.setdefault(j, {})
            row[a] = row.get(a, Fraction(0)) + c / fact
            for v, (k, target) in basis.diffs[j].items():
                b = tuple(n + (m == v) for m, n in enumerate(a))
                after[b] = (c * k, target)
        layer = after
    return out


@dataclass(frozen=True, slots=True)
class Part:
    """What a group of a sum became: the state it is read from, and the factor left for finish.

    `value` is over the state, `sample` what one element adds to it. `exact`: where a guard hides
    a shift at the final D, the condition and the value moved to the shift itself (NaN, usually).
    `settled`: the value at the end, with what the rounding of shifts added to it taken out.
    """

    value: Expr
    sample: Expr
    delayed: Mono
    kept: Mono
    exact: tuple[Expr, Expr] | None = None
    settled: Expr | None = None


def linear_part(r: Reduction, g: Group, core: Expr, delayed: Mono, name: str, ctx: Context) -> Part:
    """State variables for a group that is a polynomial in shifts; `core` = g.expr / delayed."""
    h = scale(g.terms)
    kept = h / delayed
    shifts = []
    for n, u in enumerate(shifts_of(g.terms, h)):
        shifts.append(Shift(u, running(u, r, ctx), Load(f"%u{n}", ())))
    f = place(core, shifts, ctx)
    if any(ctx.scope.depends(n) and n in [s.source for s in shifts] for n in walk(_without_exponents(f))):
        f = _from_terms(g, delayed, shifts)
    basis = close(f, shifts, ctx)
    concrete: dict[Expr, Expr] = {s.symbol: s.running for s in shifts}
    functions = [substitute(phi, concrete) for phi in basis.functions]
    expansions = [taylor(basis, i, len(shifts)) for i in range(len(functions))]
    order = sorted(range(len(functions)), key=lambda i: (sum(len(x) for x in expansions[i].values()), -i))
    sums: dict[int, Expr] = {}
    for i in order:
        if i:
            known = held_sum(functions[i], r, ctx)
            if known is None and not (ctx.options.residuals and _slope(basis, i) is not None):
                known = vanishing_sum(functions[i], r, ctx)
            if known is not None:
                sums[i] = known
                continue
        var = name if i == 0 else ctx.fresh(f"{name}_{i}")
        element = _guarded(basis.functions[i], shifts, kept, ctx)
        repair = _repair(own(r, var, functions[i], i), i, expansions[i], sums, shifts, kept, g, ctx)
        sums[i] = own(r, var, functions[i], i)
        dtype, dims = r.dtype.compute, (used_dims(r, functions[i]) if i else r.dims)
        ctx.add(StateVar(var, "sum", dims, dtype, identity_const("sum", dtype), ctx.new(element), repair), functions[i])
        ctx.linear.add(var)
    ctx.law("linear repair", _describe(r, functions, sums, shifts, ctx))
    exact = _exact(expansions[0], sums, shifts, ctx)
    residual = {i for i in sums if i and ctx.options.residuals and _left_over(functions[i], sums[i], r, ctx)}
    settled = _settled(basis, functions[0], expansions[0], sums, residual, ctx)
    return Part(sums[0], functions[0], delayed, kept, exact, settled)


def _left_over(phi: Expr, held: Expr, r: Reduction, ctx: Context) -> bool:
    """Whether the sum of `phi` is only a residual: 0 by definition, and no result that the user asks for (and may
    take out of others: the residual must not be taken out twice)."""
    asked = {x.name for x in ctx.cascade.reductions}
    return not asked & tensors_read(held) and vanishing_sum(phi, r, ctx) is not None


def _slope(basis: Basis, i: int) -> tuple[int, Fraction, int] | None:
    """v, c, j where function i varies with the shift u_v only, by c times function j, which counts elements.

    Sums with weights of their own keep no residual: it would be a sum a weight and tile more, and weights may cancel.
    """
    if len(basis.diffs[i]) != 1:
        return None
    ((v, (c, j)),) = basis.diffs[i].items()
    return None if basis.diffs[j] or tensors_read(basis.functions[j]) else (v, c, j)


def _settled(
    basis: Basis,
    first: Expr,
    expansion: Mapping[int, Mapping[tuple[int, ...], Fraction]],
    sums: Mapping[int, Expr],
    residuals: set[int],
    ctx: Context,
) -> Expr | None:
    """The sum of function 0, `first`, moved to the shifts at which the residuals are 0; None without residuals.

    A residual r of slope c S puts the shift itself at u - r / (c S). Nothing is moved where r overflows or S is 0.
    """
    deltas: dict[int, Expr] = {}
    for i in sorted(residuals):
        slope = _slope(basis, i)
        if slope is None:
            continue
        v, c, j = slope
        deltas[v] = sm.mul(sm.number(-1 / c), sm.div(sums[i], sums[j]))
    powers: dict[Mono, Fraction] = {}
    for j, row in expansion.items():
        for a, c in row.items():
            if any(a) and all(v in deltas for v, k in enumerate(a) if k):
                factors = [sm.power(deltas[v], Fraction(k)) for v, k in enumerate(a) if k]
                k, m = factor(sm.product([sums[j], *factors]), ctx.scope)
                powers[m] = powers.get(m, Fraction(0)) + c * Fraction(k)
    if not any(powers.values()):
        return None
    moved = sm.total(sm.mul(sm.number(k), m.expr()) for m, k in powers.items() if k)
    out = call("where", call("lt", call("abs", moved), math.inf), sm.add(sums[0], moved), sums[0])
    return call("maximum", out, 0.0) if ctx.range(first).nonneg else out


def _without_exponents(e: Expr) -> Expr:
    if isinstance(e, Call) and is_exponential(e):
        return sm.ONE
    match e:
        case Call(_, args):
            return rebuild(e, tuple(_without_exponents(a) for a in args))
    return e


def _from_terms(g: Group, delayed: Mono, shifts: list[Shift]) -> Expr:
    """The polynomial written out, where the user's own expression does not show the shifts."""
    table = {s.source: s.symbol for s in shifts}
    parts = []
    for t in g.terms:
        d = Mono({table.get(a, a): p for a, p in (t.d / delayed).items()})
        parts.append(Term(t.coef, t.x, d).expr())
    return sm.total(parts)


def own(r: Reduction, name: str, element: Expr, i: int) -> Load:
    """The variable of basis function i at its own indices; auxiliary ones have only the dims they use."""
    dims = used_dims(r, element) if i else r.dims
    return Load(name, tuple(Index(d) for d in dims))


def _guarded(phi: Expr, shifts: list[Shift], kept: Mono, ctx: Context) -> Expr:
    """A basis function over the shifts, with exponents, scales and shifts finite in every state."""
    if not ctx.options.guards:
        return substitute(phi, {s.symbol: s.running for s in shifts})
    out = guard_element(phi, kept, ctx)
    return substitute(out, {s.symbol: guard_shift(s.running, ctx) for s in shifts})


def _repair(
    load: Load,
    i: int,
    expansion: Mapping[int, Mapping[tuple[int, ...], Fraction]],
    sums: Mapping[int, Expr],
    shifts: list[Shift],
    kept: Mono,
    g: Group,
    ctx: Context,
) -> Expr | None:
    """Row i of T(D, D'), times the ratio of the scale kept in the loop."""
    terms = []
    for j, row in expansion.items():
        total = load if j == i else ctx.old(sums[j])
        if not sm.is_const(total, 0):
            terms += [(total, c, a) for a, c in row.items()]
    if ctx.options.residuals and len(shifts) == 1:
        moved = _horner(terms, shifts[0], ctx)
    else:
        moved = sm.total(_taylor_term(total, c, a, shifts, ctx) for total, c, a in terms)
    rate, safe = sm.ONE, True  # type: tuple[Expr, bool]
    for atom, p in kept.items():
        q, ok = ratio(atom, p, g.terms, ctx, alone=len(terms) == 1)
        rate, safe = sm.mul(rate, q), safe and ok
    out = sm.mul(moved, rate)
    if not safe:
        out = call("where", call("eq", moved, 0.0), moved, out)
    return None if out == load else out


def _exact(
    expansion: Mapping[int, Mapping[tuple[int, ...], Fraction]],
    sums: Mapping[int, Expr],
    shifts: list[Shift],
    ctx: Context,
) -> tuple[Expr, Expr] | None:
    """The final value moved from the guarded shifts to the shifts themselves, and when that differs."""
    tests = list(dict.fromkeys(t for s in shifts for t in hidden_tests(s.running, ctx)))
    if not ctx.options.guards or not tests:
        return None
    deltas = [sm.sub(s.running, guard_shift(s.running, ctx)) for s in shifts]
    moves = [bool(hidden_tests(s.running, ctx)) for s in shifts]
    terms = []
    for j, row in expansion.items():
        for a, c in row.items():
            if all(m or not k for k, m in zip(a, moves, strict=True)) and not sm.is_const(sums[j], 0):
                factors = [sm.power(d, Fraction(k)) for k, d in zip(a, deltas, strict=True) if k]
                terms.append(sm.mul(sm.number(c), sm.product([sums[j], *factors])))
    return reduce(lambda x, y: call("or", x, y), tests), sm.total(terms)


def _horner(terms: list[tuple[Expr, Fraction, tuple[int, ...]]], s: Shift, ctx: Context) -> Expr:
    """sum of c (u' - u)^a total, innermost the highest power: where that overflows, a residual beside it does not
    turn it into inf - inf.
    """
    u = guard_shift(s.running, ctx) if ctx.options.guards else s.running
    delta = sm.sub(ctx.new(u), ctx.old(u))
    by_power: dict[int, list[Expr]] = {}
    for total, c, (k,) in terms:
        by_power.setdefault(k, []).append(sm.mul(sm.number(c), total))
    out: Expr = sm.ZERO
    for k in range(max(by_power), -1, -1):
        out = sm.total([*by_power.get(k, []), sm.mul(delta, out)] if out != sm.ZERO else by_power.get(k, []))
    return out


def _taylor_term(total: Expr, c: Fraction, a: tuple[int, ...], shifts: list[Shift], ctx: Context) -> Expr:
    """c * (u' - u)^a * total, with the sign of odd powers of a single shift folded into the difference."""
    parts: list[Expr] = []
    for k, s in zip(a, shifts, strict=True):
        if k:
            u = guard_shift(s.running, ctx) if ctx.options.guards else s.running
            delta = sm.sub(ctx.old(u), ctx.new(u)) if c * (-1) ** sum(a) > 0 else sm.sub(ctx.new(u), ctx.old(u))
            parts.append(sm.power(delta, Fraction(k)))
    sign = (-1) ** sum(a) if c * (-1) ** sum(a) > 0 else 1
    return sm.mul(sm.mul(sm.number(c * sign), total) if c * sign != 1 else total, sm.product(parts))


def _describe(r: Reduction, functions: list[Expr], sums: Mapping[int, Expr], shifts: list[Shift], ctx: Context) -> str:
    u = ", ".join(show(s.running) for s in shifts)
    rows = [f"sum of {show(functions[i])} = {show(sums[i])}" for i in sorted(sums)]
    return f"{r.name} is a polynomial in {u}; closed under differentiation: " + "; ".join(rows)


def group_is_polynomial(g: Group) -> bool:
    """Whether the terms of a group differ in their dependence on D."""
    h = scale(g.terms)
    return any(t.d != h for t in g.terms)
