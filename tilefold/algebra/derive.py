"""From a cascade to its Fold: one law for each reducer, applied in dependency order.

Sources: RedFuser (decomposition F = G (*) H, eqs. 4-16, fixed point eq. 23, A.1), Neptune
(change of variables and inversion, section 4), and closure under differentiation for what
neither covers (`algebra.linear`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tilefold.algebra.beside import side_by_side
from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.check import check_fold, reads_other_rows
from tilefold.algebra.context import Context, Options, identity_const
from tilefold.algebra.expr import Expr, Index, Load, Size, call, loads, walk
from tilefold.algebra.facts import ANY
from tilefold.algebra.fold import Check, Fold, StateVar
from tilefold.algebra.growth import can_overflow
from tilefold.algebra.nameless import Names
from tilefold.algebra.order import Value, derive_order
from tilefold.algebra.sums import derive_product, derive_sum
from tilefold.algebra.symbolic import prove, prove_methods
from tilefold.algebra.terms import Inseparable, Scope, transparent
from tilefold.algebra.trials import NAMED
from tilefold.errors import NotFusibleError

_ROUNDING_HINT = (
    "split the cascade there (quantise exactly, then reduce), or derive_fold(..., ignore_rounding=True) "
    "for the form that treats rounding as the identity"
)
_RANGE_HINT = (
    "on such inputs a result moves so far between parts of the data that what depends on it leaves the range "
    "of numbers, though the definition does not; exponents stay in range if a maximum over the same is subtracted"
)


def derive_fold(cascade: Cascade, *, ignore_rounding: bool = False) -> Fold:
    """The Fold of a cascade, checked symbolically and numerically before it is returned.

    Raises NotFusibleError with `.reduction`, the first reduction that cannot join, and the reason.
    `ignore_rounding` treats quantising casts of values that depend on earlier results as the
    identity (RedFuser eqs. 21-22); the result then differs from exact quantisation.
    """
    return _derive(cascade, ignore_rounding)


@lru_cache(maxsize=1024)
def _derive(cascade: Cascade, ignore_rounding: bool) -> Fold:
    found = side_by_side(cascade, lambda part: _derive(part, ignore_rounding))
    return found or _derive_together(cascade, ignore_rounding)


def _derive_together(cascade: Cascade, ignore_rounding: bool) -> Fold:
    bodies = _without_rounding(cascade) if ignore_rounding else cascade.reductions
    failed: list[Check] = []
    for extremes in (False, True):
        ctx = _derive_all(cascade, Options(ignore_rounding=ignore_rounding, extremes=extremes))
        fold = _fold_of(ctx)
        checks = _closed(cascade, fold) or check_fold(cascade, fold, bodies, _unbounded(ctx))
        bad = [c for c in checks if not c.ok]
        failed = failed or bad
        if not bad:
            return replace(fold, checks=_proof(cascade, fold, ignore_rounding, ctx) + checks)
    raise _own_check_failed(failed[0])


def _closed(cascade: Cascade, fold: Fold) -> tuple[Check, ...]:
    """A failed check for each result that would be finished from elements, which are gone then, or from a state of a
    row that checks have none of; usually none."""
    axes = frozenset(fold.axes)
    stray = [name for name, e in fold.finish if any(isinstance(x, Index) and x.dim in axes for x in walk(e))]
    apart = reads_other_rows(cascade, fold)
    return (
        *(Check("results follow from the state", "symbolic", False, f"{name} needs elements") for name in stray),
        *(Check("results follow from the state", "symbolic", False, f"{name} needs another row's") for name in apart),
    )


def _proof(cascade: Cascade, fold: Fold, ignore_rounding: bool, used: Context) -> tuple[Check, ...]:
    """The laws, proved on the unguarded form in use, and the two methods' agreement on the papers' form.

    A cascade and Fold that differ from others in names only have the same proof; it is remembered without names.
    """
    names = Names()
    known = _proved(names.fold(fold), names.cascade(cascade), ignore_rounding)
    if known:
        return names.named(known[0])
    found = _prove(cascade, ignore_rounding, used)
    if (nameless := names.checks(found)) is not None:
        known.append(nameless)
    return found


@lru_cache(maxsize=1024)
def _proved(fold: Fold, cascade: Cascade, ignore_rounding: bool) -> list[tuple[Check, ...]]:
    """Where the proof of a nameless Fold is kept: empty until there is one."""
    return []


def _prove(cascade: Cascade, ignore_rounding: bool, used: Context) -> tuple[Check, ...]:
    plain = _derive_all(cascade, Options(guards=False, ignore_rounding=ignore_rounding), used)
    checks = prove(plain)
    if any(s.law == "delay" for s in plain.steps) and not plain.linear:
        paper = _derive_all(cascade, Options(guards=False, delay=False, ignore_rounding=ignore_rounding))
        checks = tuple({c.name: c for c in checks + prove_methods(paper)}.values())
    for c in checks:
        if not c.ok:
            raise _own_check_failed(c)
    return checks


def _own_check_failed(c: Check) -> NotFusibleError:
    moved = c.method == "numeric" and not any(f"({name})" in c.detail for name in NAMED)
    return NotFusibleError(
        f"derivation failed its own check: {c.name}: {c.detail}", hint=_RANGE_HINT if moved else None
    )


def _without_rounding(cascade: Cascade) -> tuple[Reduction, ...]:
    """The reductions with rounding of values that depend on earlier ones taken as the identity."""
    out: list[Reduction] = []
    for r in cascade.reductions:
        scope = Scope(frozenset(cascade.axes), frozenset(p.name for p in out), lambda _: ANY, True)
        out.append(replace(r, body=transparent(r.body, scope)))
    return tuple(out)


@lru_cache(maxsize=1024)
def build_fold(cascade: Cascade, options: Options) -> Fold:
    """The Fold in one of its forms, unchecked: for printing."""
    found = side_by_side(cascade, lambda part: build_fold(part, options))
    return found or _fold_of(_derive_all(cascade, options))


def _derive_all(cascade: Cascade, options: Options, like: Context | None = None) -> Context:
    """`like`: a derivation with the same state variables, whose separations can be used again."""
    ctx = Context(cascade, options)
    if like is not None:
        ctx.separated.update(like.separated)
    for r in cascade.reductions:
        try:
            value = _derive_one(r, ctx)
        except Inseparable as why:
            rounds = "rounding" in str(why) or "which integer" in str(why)
            raise NotFusibleError(
                f"{r.name} = {r.reducer} over {', '.join(cascade.axes)} cannot join the reductions before it: {why}",
                reduction=r.name,
                loc=r.loc,
                hint=_ROUNDING_HINT if rounds else None,
            ) from None
        ctx.bodies[r.name] = transparent(ctx.resolve(r.body), ctx.scope)
        ctx.values[r.name] = (r.dims, value.loop)
        ctx.finish.append((r.name, _for_empty(r, value.final, ctx) if options.guards else value.final))
        if r.index_name is not None:
            index = Load(r.index_name, tuple(Index(d) for d in r.dims))
            ctx.finish.append((r.index_name, value.index or index))
    return ctx


def _unbounded(ctx: Context) -> frozenset[str]:
    """Results from the first exponential on that no maximum holds down."""
    for n, r in enumerate(ctx.cascade.reductions):
        info = ctx.infos.get(r.name)
        if info is not None and can_overflow(info.element, ctx):
            return frozenset(later.name for later in ctx.cascade.reductions[n:])
    return frozenset()


def _fold_of(ctx: Context) -> Fold:
    return Fold(
        axes=ctx.cascade.axes,
        state=tuple(i.var for i in ctx.infos.values()),
        finish=tuple(ctx.finish),
        derivation=tuple(ctx.steps),
    )


def _derive_one(r: Reduction, ctx: Context) -> Value:
    body = transparent(ctx.resolve(r.body), ctx.scope)
    for load in (n for n in walk(body) if isinstance(n, Load)):
        if load.tensor in _index_results(ctx):
            raise Inseparable(f"{load.tensor} is an index result: it is only known at the end")
    match r.reducer:
        case "sum":
            return Value(*derive_sum(r, body, ctx))
        case "prod":
            return Value(*derive_product(r, body, ctx))
        case "max" | "min" | "argmax" | "argmin" | "topk":
            return derive_order(r, body, ctx)
    if ctx.scope.depends(body):
        raise Inseparable(f"{r.reducer} of a condition on earlier results cannot be repaired when they change")
    dtype = r.dtype.compute
    var = StateVar(r.name, r.reducer, r.dims, dtype, identity_const(r.reducer, dtype), body)
    load = ctx.add(var, body).load
    return Value(load, load)


def _index_results(ctx: Context) -> set[str]:
    return {r.index_name for r in ctx.cascade.reductions if r.index_name is not None}


def _for_empty(r: Reduction, final: Expr, ctx: Context) -> Expr:
    """The reduction of nothing is the reducer's identity, also where `finish` divides by a sum."""
    want = identity_const(r.reducer, r.dtype.compute)
    known = all(ctx.is_state(n.tensor) for n in loads(final))  # a parameter might have any value
    if r.reducer == "topk" or (known and ctx.at_identity(final, size=0) == float(want.value)):
        return final
    empty: Expr | None = None
    for axis in ctx.cascade.axes:
        test = call("eq", Size(axis), 0)
        empty = test if empty is None else call("or", empty, test)
    assert empty is not None
    return call("where", empty, want, final)
