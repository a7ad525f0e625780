"""Reductions that choose: max, min, argmax, argmin, top-k.

Law (monotone repair): if F(., D) is increasing in a key k(x), the best element is the one
with the best key, whatever D is. The state holds the key; `finish` maps it through F. A
decreasing F swaps max and min. Where the key could overflow (a growing exponential), the
state holds F itself and is repaired by a factor proved non-negative (Neptune 4.4), or by
a shift. Signs are proved (`facts`, then z3), never assumed.

F of the best key is the best element to the last bit, for both are the same operations on the same numbers. Where F
has to be put in another order to have a key, it is not: (|x| r) |w| as r (|x| |w|). What is `exact` refuses that.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tilefold.algebra import simplify as sm
from tilefold.algebra.cascade import Reduction
from tilefold.algebra.context import Context, identity_const, own_load
from tilefold.algebra.expr import Call, Cast, Const, Expr, Load, call
from tilefold.algebra.fold import StateVar
from tilefold.algebra.growth import can_overflow
from tilefold.algebra.guard import guard_divisors, guard_element, guard_exponents, guard_shifts
from tilefold.algebra.smt import prove_nonneg
from tilefold.algebra.sums import scalar_repair
from tilefold.algebra.terms import NONE, Group, Inseparable, Mono, Term, scale
from tilefold.algebra.text import show


@dataclass(frozen=True, slots=True)
class Value:
    """A result over the state: in the loop, at the end, and the index at the end (None: as held)."""

    loop: Expr
    final: Expr
    index: Expr | None = None


_SWAP = {"max": "min", "min": "max", "argmax": "argmin", "argmin": "argmax", "topk": "topk"}
_INCREASING = ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "tanh", "sigmoid", "erf", "erfinv",
               "floor", "ceil", "trunc", "round")  # fmt: skip


def derive_order(r: Reduction, body: Expr, ctx: Context) -> Value:
    """State variables of an order reduction, and its value over them."""
    if not ctx.scope.depends(body):
        load = _add(r, r.reducer, body, None, body, ctx)
        return Value(load, load)
    found = _monotone_key(body, ctx) if ctx.options.delay or r.exact else None
    if r.exact and found is None:
        raise Inseparable(
            f"{r.name} is compared with its elements, which {show(body)} has in one order of factors only"
        )
    if found is not None and ctx.options.delay:
        key, sign = found
        ctx.law("monotone repair", f"{r.name}: {show(body)} is {'in' if sign > 0 else 'de'}creasing in {show(key)}")
        return _by_key(r, body, key, sign, ctx)
    return _separated(r, body, ctx)


def _add(r: Reduction, reducer: str, element: Expr, repair: Expr | None, plain: Expr, ctx: Context) -> Load:
    dtype = r.dtype.compute
    start = identity_const(reducer, dtype)
    var = StateVar(r.name, reducer, r.dims, dtype, start, ctx.new(element), repair, r.index_name)
    ctx.add(var, plain)
    return own_load(var)


def _by_key(r: Reduction, body: Expr, key: Expr, sign: int, ctx: Context) -> Value:
    """The state holds the best key; F maps it. `body` has `key` as its only part over x."""
    negated = sign < 0 and r.reducer == "topk"
    element = sm.neg(key) if negated else key
    reducer = r.reducer if sign > 0 else _SWAP[r.reducer]
    load = _add(r, reducer, element, None, element, ctx)
    value = sm.replace(body, key, sm.neg(load) if negated else load)
    ctx.samples[r.name] = sm.replace(value, load, element)
    if not ctx.options.extremes or r.reducer == "topk":
        return Value(value, value)
    return _with_other_end(r, body, key, load, value, reducer, ctx)


def _with_other_end(r: Reduction, body: Expr, key: Expr, load: Load, value: Expr, reducer: str, ctx: Context) -> Value:
    """NaN wins: an infinite key at the other end may become NaN under F (inf * 0, inf - inf)."""
    other = ctx.fresh(f"{r.name}_other")
    index = ctx.fresh(f"{r.name}_other_index") if r.index_name is not None else None
    swapped, dtype = _SWAP[reducer], r.dtype.compute
    var = StateVar(other, swapped, r.dims, dtype, identity_const(swapped, dtype), ctx.new(key), None, index)
    ctx.add(var, key)
    far = call("isnan", sm.replace(body, key, own_load(var)))
    final = call("where", far, sm.NAN, value)
    ctx.law("other end", f"{r.name}: {other} tells whether an infinite element turns into NaN")
    if r.index_name is None or index is None:
        return Value(value, final)
    mine, theirs = Load(r.index_name, load.index), Load(index, load.index)
    first = call("where", call("isnan", value), call("minimum", mine, theirs), theirs)
    return Value(value, final, call("where", far, first, mine))


# -- direction of growth ---------------------------------------------------------------------


def _keys(e: Expr, ctx: Context) -> list[Expr]:
    """Maximal sub-expressions over x alone, outermost first."""
    if not ctx.scope.varies(e):
        return []
    if not ctx.scope.depends(e):
        return [e]
    match e:
        case Call(_, args):
            return list(dict.fromkeys(k for a in args for k in _keys(a, ctx)))
        case Cast(arg, _):
            return _keys(arg, ctx)
    return [e]


def _monotone_key(body: Expr, ctx: Context) -> tuple[Expr, int] | None:
    keys = _keys(body, ctx)
    if len(keys) != 1:
        return None
    sign = direction(body, keys[0], ctx)
    return (keys[0], sign) if sign else None


def direction(e: Expr, key: Expr, ctx: Context) -> int:
    """+1 if `e` is proved non-decreasing in `key`, -1 if non-increasing, 0 if neither is proved."""
    if e == key:
        return 1
    match e:
        case Cast(arg, _):
            return direction(arg, key, ctx)
        case Call("neg", (a,)):
            return -direction(a, key, ctx)
        case Call(("add" | "maximum" | "minimum") as op, (a, b)):
            return _agree(a, b, key, ctx, 1)
        case Call("sub", (a, b)):
            return _agree(a, b, key, ctx, -1)
        case Call(("mul" | "div") as op, (a, b)):
            if not ctx.scope.varies(b):
                return direction(a, key, ctx) * sign_of(b, ctx)
            if not ctx.scope.varies(a):
                flip = -1 if op == "div" and _definite(b, ctx) else (1 if op == "mul" else 0)
                return direction(b, key, ctx) * sign_of(a, ctx) * flip
        case Call("pow", (a, Const() as c)):
            p = float(c.value)
            if p > 0 and (p % 2 == 1 or ctx.scope.nonneg(a)):
                return direction(a, key, ctx)
        case Call("rsqrt", (a,)):
            return -direction(a, key, ctx)
        case Call(op, (a,)) if op in _INCREASING:
            return direction(a, key, ctx)
        case Call("where", (c, a, b)) if not ctx.scope.varies(c):
            da, db = (direction(x, key, ctx) if ctx.scope.varies(x) else 2 for x in (a, b))
            return da if db in (da, 2) else (db if da == 2 else 0)
    return 0


def _agree(a: Expr, b: Expr, key: Expr, ctx: Context, sign_b: int) -> int:
    if not ctx.scope.varies(b):
        return direction(a, key, ctx)
    if not ctx.scope.varies(a):
        return sign_b * direction(b, key, ctx)
    da, db = direction(a, key, ctx), sign_b * direction(b, key, ctx)
    return da if da == db else 0


def _definite(e: Expr, ctx: Context) -> bool:
    r = ctx.range(e)
    return r.nonneg or r.nonpos


def sign_of(h: Expr, ctx: Context) -> int:
    """+1 where h >= 0 is proved, -1 where h <= 0 is, else 0."""
    r = ctx.range(h)
    if r.nonneg:
        return 1
    if r.nonpos:
        return -1
    if prove_nonneg(h, ctx.known):
        ctx.law("sign by z3", f"{show(h)} >= 0")
        return 1
    if prove_nonneg(sm.neg(h), ctx.known):
        ctx.law("sign by z3", f"{show(h)} <= 0")
        return -1
    return 0


# -- separated bodies ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Affine:
    """F = G(x) * h(D) + shift(D)."""

    group: Group
    h: Mono
    shift: tuple[Term, ...]


def _affine(body: Expr, ctx: Context) -> Affine:
    terms = [t for g in ctx.separate(body) for t in g.terms]
    moving = tuple(t for t in terms if not ctx.scope.pure_d(t))
    still = tuple(t for t in terms if ctx.scope.pure_d(t))
    if not moving:
        raise Inseparable(f"{show(body)} is the same for every element, so its order says nothing until D is final")
    h = moving[0].d
    if any(t.d != h for t in moving):
        raise Inseparable(f"{show(body)} orders its elements differently as the earlier results change")
    common = moving[0].x.only(a for a, _ in moving[0].x.items() if not ctx.scope.varies(a) and len(moving) == 1)
    expr = sm.total(Term(t.coef, t.x / common, NONE).expr() for t in moving)
    return Affine(Group(expr, moving), h * common, still)


def _separated(r: Reduction, body: Expr, ctx: Context) -> Value:
    f = _affine(body, ctx)
    shift = sm.total(t.expr() for t in f.shift)
    sign = 1
    if f.h:
        sign = sign_of(f.h.expr(), ctx)
        if sign == 0:
            raise Inseparable(
                f"the sign of {show(f.h.expr())} cannot be proved, and multiplying by a factor of unknown sign "
                f"does not keep the order that {r.reducer} needs"
            )
    if ctx.options.delay and not can_overflow(f.group.expr, ctx):
        way = ">=" if sign > 0 else "<="
        ctx.law("monotone repair", f"{r.name}: F = G * H with G = {show(f.group.expr)}, H {way} 0")
        key = f.group.expr
        whole = sm.add((Mono({key: Fraction(1)}) * f.h).expr(), shift)
        return _by_key(r, whole, key, sign, ctx)
    if sign < 0:
        raise Inseparable(f"{show(f.h.expr())} <= 0 turns the order round, and its partial results could overflow")
    return _repaired(r, body, f, shift, ctx)


def _repaired(r: Reduction, body: Expr, f: Affine, shift: Expr, ctx: Context) -> Value:
    """The paper's form: the state holds F(x, D) and moves with D."""
    g = Group(body, f.group.terms)
    kept = scale(g.terms)
    load = Load(r.name, own_load(StateVar(r.name, r.reducer, r.dims, r.dtype.compute, sm.ZERO, body)).index)
    guarded = ctx.options.guards
    element = guard_element(body, kept, ctx) if guarded else body
    if f.shift and kept:
        raise Inseparable(f"{show(body)} both scales and shifts with the earlier results, and may overflow")
    if f.shift:
        s = guard_shifts(shift, ctx) if guarded else shift
        element = guard_divisors(guard_shifts(element, ctx), ctx) if guarded else element
        repair = sm.add(load, sm.sub(ctx.new(s), ctx.old(s)))
    else:
        neutral = float(identity_const(r.reducer, r.dtype.compute).value)
        repair = scalar_repair(load, kept, g, ctx, neutral)
        if guarded and not (isinstance(repair, Call) and repair.op == "where"):
            repair = call("where", call("eq", load, neutral), load, repair)
    ctx.law("scalar repair", f"{r.name}: distributes over {r.reducer}, the factor is >= 0")
    load = _add(r, r.reducer, guard_exponents(element, ctx) if guarded else element, repair, body, ctx)
    return Value(load, load)
