"""Separation of variables: F(x, D) = sum over k of c_k * G_k(x) * H_k(D).

D are the values of earlier state variables, x everything that varies along the reduced
axes. The result is a list of *groups*; the terms of a group share their scale and differ
by powers of shifts, as in r * (x - u): one group with the terms r*x and -r*u. A group
keeps the expression it came from, because the way the user wrote it is the stable way
to evaluate it: (x - u)**2, never x**2 - 2*x*u + u**2. Of few elements,
what moves in several ways is no factor of its own kind: of (x/n + y/m)**2, where x/n is nearly -y/m, sums of x**2,
x*y and y**2 have nothing left.

Laws used: distributivity; exp(a + b) = exp(a) exp(b); log(a b) = log a + log b and
(a b)^p = a^p b^p for factors of proved sign; sin and cos of sums; masks `where(c(x), F, 0)`.
Casts to f16 and bf16 are precision hints and are looked through; casts that quantise are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from math import gcd

from tilefold.algebra import simplify as sm
from tilefold.algebra.expr import Call, Cast, Const, Expr, call
from tilefold.algebra.terms import NONE, Group, Inseparable, Mono, Scope, Term, collect, factor, scale
from tilefold.algebra.text import show

MAX_POWER = 8


def separate(e: Expr, scope: Scope) -> tuple[Group, ...]:
    """The groups of `e`; raises Inseparable with a reason."""
    return tuple(_drop_zeros(_merge(_groups(e, scope), e, scope)))


def _drop_zeros(groups: list[Group]) -> list[Group]:
    return [g for g in groups if any(t.coef for t in g.terms)]


def _leaf(e: Expr, scope: Scope) -> Group:
    """An expression over x only, or over D and parameters only."""
    coef, mono = factor(e, scope)
    x = mono.only(a for a, _ in mono.items() if not scope.depends(a))
    return Group(e, (Term(coef, x, mono / x),))


def _groups(e: Expr, scope: Scope) -> list[Group]:
    if not (scope.depends(e) and scope.varies(e)):
        return [_leaf(e, scope)]
    match e:
        case Call("neg", (a,)):
            return [Group(sm.neg(g.expr), _scaled(g.terms, -1)) for g in _groups(a, scope)]
        case Call("add", (a, b)):
            return _merge([*_groups(a, scope), *_groups(b, scope)], e, scope)
        case Call("sub", (a, b)):
            right = [Group(sm.neg(g.expr), _scaled(g.terms, -1)) for g in _groups(b, scope)]
            return _merge([*_groups(a, scope), *right], e, scope)
        case Call("mul", (a, b)):
            return _products(_groups(a, scope), _groups(b, scope), e, scope)
        case Call("div", (a, b)):
            return _products(_groups(a, scope), _single(b, scope, Fraction(-1)), e, scope)
        case Call("pow", (a, Const() as c)):
            return _powers(a, Fraction(float(c.value)), e, scope)
        case Call("sqrt", (a,)):
            return [Group(e, _single(a, scope, Fraction(1, 2))[0].terms)]
        case Call("rsqrt", (a,)):
            return [Group(e, _single(a, scope, Fraction(-1, 2))[0].terms)]
        case Call(("exp" | "exp2") as op, (a,)):
            return [_exponential(e, a, lambda part: call(op, part), scope)]
        case Call("pow", (Const() as c, a)) if float(c.value) > 0:
            return [_exponential(e, a, lambda part: call("pow", c, part), scope)]
        case Call("expm1", (a,)):
            return [*_groups(call("exp", a), scope), Group(sm.number(-1), (Term(Fraction(-1), NONE, NONE),))]
        case Call(("log" | "log2") as op, (a,)):
            return _logarithm(e, op, a, scope)
        case Call(("sin" | "cos") as op, (a,)):
            return _angle_sum(op, a, scope)
        case Call(("abs" | "sign" | "maximum" | "minimum"), _):
            return [_homogeneous(e, scope)]
        case Call("where", (c, a, b)):
            return _where(e, c, a, b, scope)
        case Cast(arg, dtype) if dtype.is_float and not dtype.rounds:
            return [Group(Cast(g.expr, dtype), g.terms) for g in _groups(arg, scope)]
    raise Inseparable(_refusal(e))


def _refusal(e: Expr) -> str:
    match e:
        case Cast(_, dtype):
            return (
                f"rounding to {dtype.value} is not separable: which value an element rounds to "
                f"depends on the final result of the earlier reduction"
            )
        case Call(("floor" | "ceil" | "trunc" | "round" | "floordiv" | "mod") as op, _):
            return f"{op} is not separable: which integer {show(e)} rounds to depends on the earlier result"
        case Call(("lt" | "le" | "gt" | "ge" | "eq" | "ne") as op, _):
            return f"the comparison {show(e)} is not separable: its outcome ({op}) changes with the earlier result"
    return f"{show(e)} does not separate into a part of the inputs and a part of the earlier results"


def _scaled(terms: tuple[Term, ...], c: int) -> tuple[Term, ...]:
    return tuple(Term(t.coef * c, t.x, t.d) for t in terms)


def _products(left: list[Group], right: list[Group], whole: Expr, scope: Scope) -> list[Group]:
    """Distributivity; a product of two groups is `whole` itself where there is only one.

    Of two sums, each of parts that move differently, it is none of numbers: what cancels in either to its share d is
    d**2 in their product, and its parts' errors are of 1, where a product of rounded sums has an error of d. So it is
    of few elements, three coordinates of two opposite directions, which are had again for nothing; all of a long row
    seldom cancel, and another pass reads them from memory.
    """
    if scope.few and len(left) > 1 and len(right) > 1:
        raise Inseparable(
            f"{show(whole)} is a product of two sums whose parts move differently with the earlier results: "
            "sums of products of the parts lose what is left where these cancel"
        )
    out = []
    for a in left:
        for b in right:
            terms = collect(Term(s.coef * t.coef, s.x * t.x, s.d * t.d) for s in a.terms for t in b.terms)
            out.append(Group(sm.mul(a.expr, b.expr), terms))
    return [Group(whole, out[0].terms)] if len(out) == 1 else out


def _single(e: Expr, scope: Scope, p: Fraction) -> list[Group]:
    """e^p where e is one product; fractional powers only of factors of proved sign."""
    groups = _groups(e, scope)
    if len(groups) != 1 or len(groups[0].terms) != 1:
        raise Inseparable(f"{show(e)} is a sum of parts that move differently with the earlier results")
    t = groups[0].terms[0]
    if t.coef == 0:
        raise Inseparable(f"{show(e)} is zero")
    if p.denominator != 1:
        signs = [scope.nonneg(a) for a, q in t.d.items() if q % 2 != 0]
        if not all(signs) or t.coef < 0:
            raise Inseparable(f"the sign of {show(t.d.expr())} is not known, and a root of {show(e)} is taken")
        x = sm.mul(sm.number(t.coef), t.x.expr())
        mono = Mono({x: p}) if x != sm.ONE else NONE
        return [Group(sm.power(e, p), (Term(Fraction(1), mono, t.d**p),))]
    return [Group(sm.power(e, p), (Term(t.coef**p.numerator, t.x**p, t.d**p),))]


def _powers(a: Expr, p: Fraction, e: Expr, scope: Scope) -> list[Group]:
    groups = _groups(a, scope)
    if p.denominator == 1 and 0 < p <= MAX_POWER:
        out = groups
        for n in range(2, int(p) + 1):
            out = _merge(_products(out, groups, sm.power(a, Fraction(n)), scope), e, scope)
        return out
    return [Group(e, _single(a, scope, p)[0].terms)]


def summands(e: Expr) -> list[tuple[int, Expr]]:
    """e as a signed sum, as written."""
    match e:
        case Call("add", (a, b)):
            return summands(a) + summands(b)
        case Call("sub", (a, b)):
            return summands(a) + [(-s, x) for s, x in summands(b)]
        case Call("neg", (a,)):
            return [(-s, x) for s, x in summands(a)]
    return [(1, e)]


def _signed(s: int, e: Expr) -> Expr:
    return e if s > 0 else sm.neg(e)


def _exponential(e: Expr, arg: Expr, wrap: Callable[[Expr], Expr], scope: Scope) -> Group:
    """exp(a(x) + b(D)) = exp(a(x)) exp(b(D)); logarithms in b(D) become powers."""
    xs: list[Expr] = []
    ds: list[Expr] = []
    powers: dict[Expr, Fraction] = {}
    for s, part in summands(arg):
        if not scope.depends(part):
            xs.append(_signed(s, part))
        elif isinstance(part, Call) and part.op == "log" and not scope.varies(part) and e == call("exp", arg):
            powers[part.args[0]] = powers.get(part.args[0], Fraction(0)) + s
        elif not scope.varies(part):
            ds.append(_signed(s, part))
        else:
            for t in (t for g in _groups(part, scope) for t in g.terms):
                if t.d and not scope.pure_d(t):
                    raise Inseparable(_endless(e, t))
                (ds if t.d else xs).append(_signed(s, t.expr()))
    x = Mono({wrap(sm.total(xs)): Fraction(1)}) if xs else NONE
    d = Mono({wrap(sm.total(ds)): Fraction(1)}) if ds else NONE
    return Group(e, (Term(Fraction(1), x, d * Mono(powers)),))


def _endless(e: Expr, t: Term) -> str:
    h, g = show(t.d.expr()), show(t.x.expr())
    return (
        f"differentiating {show(e)} by {h} brings a new function of the inputs each time "
        f"({g} * {show(e)}, then ({g})**2 * {show(e)}, ...); no finite set of sums closes under it"
    )


def _logarithm(e: Expr, op: str, a: Expr, scope: Scope) -> list[Group]:
    """log(c G H) = log(c G) + p log(H) for factors H > 0."""
    t = _single(a, scope, Fraction(1))[0].terms[0]
    if not all(scope.nonneg(atom) for atom, _ in t.d.items()):
        raise Inseparable(f"the sign of {show(t.d.expr())} is not known, and its logarithm is taken")
    inner = sm.mul(sm.number(t.coef), t.x.expr())
    terms = [Term(Fraction(1), Mono({_log(op, inner): Fraction(1)}), NONE)]
    for atom, p in t.d.items():
        terms += [Term(c, m / d, d) for c, m, d in _log_terms(op, atom, p, scope)]
    return [Group(e, collect(terms))]


def _log(op: str, a: Expr) -> Expr:
    match a:
        case Call("exp", (b,)) if op == "log":
            return b
        case Call("exp2", (b,)) if op == "log2":
            return b
    return call(op, a)


def _log_terms(op: str, atom: Expr, p: Fraction, scope: Scope) -> list[tuple[Fraction, Mono, Mono]]:
    out = []
    for s, part in summands(_log(op, atom)):
        t = _leaf(part, scope).terms[0]
        out.append((p * s * t.coef, t.x * t.d, t.d))
    return out


def _angle_sum(op: str, arg: Expr, scope: Scope) -> list[Group]:
    """sin(a + b) = sin a cos b + cos a sin b, cos(a + b) = cos a cos b - sin a sin b."""
    xs: list[Expr] = []
    ds: list[Expr] = []
    for s, part in summands(arg):
        if scope.depends(part) and scope.varies(part):
            raise Inseparable(f"the argument of {op} mixes inputs and earlier results in a product")
        (ds if scope.depends(part) else xs).append(_signed(s, part))
    a, b = sm.total(xs), sm.total(ds)
    other = "cos" if op == "sin" else "sin"
    pairs = ((1, op, "cos"), (1 if op == "sin" else -1, other, "sin"))
    out = []
    for c, f, h in pairs:
        x, d = call(f, a), call(h, b)
        term = Term(Fraction(c), Mono({x: Fraction(1)}), Mono({d: Fraction(1)}))
        out.append(Group(term.expr(), (term,)))
    return out


def _homogeneous(e: Expr, scope: Scope) -> Group:
    """f(G H) = f(G) H for H >= 0 and f one of abs, relu-like max / min with 0; sign(G H) = sign(G)."""
    assert isinstance(e, Call)
    a = e.args[0]
    if e.op in ("maximum", "minimum"):
        rest = [x for x in e.args if not sm.is_const(x, 0)]
        if len(rest) != 1:
            raise Inseparable(_refusal(e))
        a = rest[0]
    t = _single(a, scope, Fraction(1))[0].terms[0]
    if not all(scope.nonneg(sm.power(atom, p)) for atom, p in t.d.items()):
        raise Inseparable(f"the sign of {show(t.d.expr())} is not known, and {show(e)} depends on it")
    g = sm.mul(sm.number(t.coef), t.x.expr())
    x = call(e.op, g, 0.0) if e.op in ("maximum", "minimum") else call(e.op, g)
    d = NONE if e.op == "sign" else t.d
    return Group(e, (Term(Fraction(1), Mono({x: Fraction(1)}), d),))


def _where(e: Expr, c: Expr, a: Expr, b: Expr, scope: Scope) -> list[Group]:
    """A mask over x goes into G, one over D into H; a mask over both is not separable."""
    if scope.depends(c) and scope.varies(c):
        raise Inseparable(_refusal(c))
    out: list[Group] = []
    for branch, yes in ((a, True), (b, False)):
        if sm.is_const(branch, 0):
            continue
        for g in _groups(branch, scope):
            masked = call("where", c, g.expr, 0.0) if yes else call("where", c, 0.0, g.expr)
            out.append(Group(masked, tuple(_mask(t, c, yes, scope) for t in g.terms)))
    return [Group(e, out[0].terms)] if len(out) == 1 else _merge(out, e, scope)


def _mask(t: Term, c: Expr, yes: bool, scope: Scope) -> Term:
    part = t.d if scope.depends(c) else t.x
    inner = part.expr()
    masked = Mono({(call("where", c, inner, 0.0) if yes else call("where", c, 0.0, inner)): Fraction(1)})
    return Term(t.coef, t.x, masked) if scope.depends(c) else Term(t.coef, masked, t.d)


def _merge(groups: list[Group], whole: Expr, scope: Scope) -> list[Group]:
    """Join groups of one scale, and shifts (terms over D only) with what they shift."""
    todo = list(groups)
    out: list[Group] = []
    while todo:
        g = todo.pop(0)
        for n, h in enumerate(out):
            both = _join(h, g, scope) or _join(g, h, scope)
            if both is not None:
                out.pop(n)
                todo.append(both)
                break
        else:
            out.append(g)
    return [Group(whole, out[0].terms)] if len(out) == 1 and len(groups) > 1 else out


def _common_x(terms: Iterable[Term]) -> Mono:
    first, *rest = (t.x for t in terms)
    return first.only(a for a, p in first.items() if all(x.power(a) == p for x in rest))


def _join(a: Group, b: Group, scope: Scope) -> Group | None:
    """a + b as one group: equal scales, or b a shift of a (over D only, but for factors common to both)."""
    h = scale(a.terms)
    expr = sm.add(a.expr, b.expr)
    if scale(b.terms) == h:
        return Group(expr, collect(a.terms + b.terms))
    common = _common_x(a.terms + b.terms)
    rest = [Term(t.coef, t.x / common, t.d / h) for t in b.terms]
    if not all(scope.pure_d(t) for t in rest):
        return None
    if all(scope.pure_d(Term(t.coef, t.x / common, t.d)) for t in a.terms):
        return None
    if any(not t.d or any(p < 0 and h.power(atom) for atom, p in t.d.items()) for t in rest):
        return None
    shifts = tuple(Term(t.coef, common, h * _compound(t.x * t.d)) for t in rest)
    return Group(expr, collect(a.terms + shifts))


def _compound(m: Mono) -> Mono:
    """A shift as a power of one atom: s^2 n^-2 becomes (s / n)^2."""
    k = 0
    for _, p in m.items():
        k = gcd(k, int(p)) if p.denominator == 1 else 1
    k = max(k, 1)
    root = m ** Fraction(1, k)
    if [p for _, p in root.items()] == [1]:
        return m
    return Mono({root.expr(): Fraction(k)})
