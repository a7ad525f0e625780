"""What a derivation knows while it goes through a cascade: the state so far, and facts about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch

from tilefold.algebra import simplify as sm
from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate, identity_of
from tilefold.algebra.expr import (
    Call,
    Const,
    Expr,
    Index,
    Load,
    Size,
    call,
    children,
    dims_used,
    loads,
    rebuild,
    tensors_read,
    transform,
    walk,
)
from tilefold.algebra.facts import ANY, Range, after_reduction, from_dtype, range_of
from tilefold.algebra.fold import NEW, OLD, StateVar, Step
from tilefold.algebra.separate import separate
from tilefold.algebra.terms import Group, Inseparable, Mono, Scope, Term
from tilefold.algebra.text import show
from tilefold.names import free

#: The state variable that counts elements. Others are named after a reduction of theirs.
COUNTER = "n"


@dataclass(frozen=True, slots=True)
class Options:
    """Which form of a fold to build.

    `guards`: keep non-invertible H apart (RedFuser A.1). `delay`: move factors to finish where safe.
    `extremes`: an order reduction also keeps the other end, where an infinite element may become NaN.
    `residuals`: sums that are 0 but for rounding (of x - mean) are kept, and taken out of results at the end.
    """

    guards: bool = True
    delay: bool = True
    ignore_rounding: bool = False
    extremes: bool = False
    residuals: bool = True


@dataclass(frozen=True, slots=True)
class Info:
    """A state variable and what is known about it. `element` is unguarded, over unsuffixed loads."""

    var: StateVar
    element: Expr
    range: Range
    groups: tuple[Group, ...] | None

    @property
    def load(self) -> Load:
        return own_load(self.var)

    @property
    def identity(self) -> float:
        return float(self.var.identity.value)


def own_load(v: StateVar) -> Load:
    """The variable at its own indices."""
    return Load(v.name, tuple(Index(d) for d in v.dims))


@dataclass(slots=True)
class Context:
    """Mutable while one cascade is derived: the state variables, and each reduction's value over them."""

    cascade: Cascade
    options: Options
    infos: dict[str, Info] = field(default_factory=dict)
    bodies: dict[str, Expr] = field(default_factory=dict)
    values: dict[str, tuple[tuple[str, ...], Expr]] = field(default_factory=dict)
    finish: list[tuple[str, Expr]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    count: str | None = None
    separated: dict[Expr, tuple[Group, ...]] = field(default_factory=dict)
    samples: dict[str, Expr] = field(default_factory=dict)
    """What one element adds to a reduction, put together from its parts: the body, if G and H are right."""
    linear: set[str] = field(default_factory=set)
    """State variables moved by linear repair, which uses other sums beside D."""
    growth: dict[str, dict[str, float]] = field(default_factory=dict)
    """Degree of growth of state variables in each input (`algebra.growth`), once asked for."""

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(self.cascade.axes)

    @property
    def scope(self) -> Scope:
        return Scope(self.axes, frozenset(self.infos), self.known, self.options.ignore_rounding, self.cascade.few)

    def known(self, load: Load) -> Range:
        """Facts about a load; state variables after a non-empty reduction."""
        info = self.infos.get(load.tensor)
        if info is not None:
            return info.range
        for name, dtype in self.cascade.input_dtypes:
            if name == load.tensor:
                return from_dtype(dtype)
        return ANY

    def known_partial(self, load: Load) -> Range:
        """Facts that also hold for the state of no elements."""
        info = self.infos.get(load.tensor)
        if info is None:
            return self.known(load)
        r, v = info.range, info.identity
        return Range(min(r.lo, v), max(r.hi, v), r.never_zero and v != 0)

    def range(self, e: Expr, partial: bool = False) -> Range:
        return range_of(e, self.known_partial if partial else self.known)

    def separate(self, e: Expr) -> tuple[Group, ...]:
        """`separate` in this scope, memoised; raises Inseparable."""
        hit = self.separated.get(e)
        if hit is None:
            hit = self.separated[e] = separate(e, self.scope)
        return hit

    def law(self, name: str, text: str) -> None:
        self.steps.append(Step(name, text))

    # -- state ---------------------------------------------------------------------------

    def fresh(self, base: str) -> str:
        """A name that no reduction, input or state variable has."""
        taken = {n for r in self.cascade.reductions for n in (r.name, r.index_name) if n}
        taken |= {n for n, _ in self.cascade.input_dtypes} | set(self.infos) | loads_of(self.cascade)
        return free(base, taken)

    def add(self, var: StateVar, element: Expr) -> Info:
        """Append a state variable; `element` is its unguarded element over unsuffixed loads."""
        rng = after_reduction(var.reducer, self.range(element))
        try:
            groups: tuple[Group, ...] | None = self.separate(element)
        except Inseparable:
            groups = None
        if var.identity.value in (float("-inf"), float("inf")) and self.range(element).nonneg and var.reducer == "max":
            var = replace(var, identity=Const(0.0, var.identity.dtype))
        info = Info(var, element, rng, groups)
        self.infos[var.name] = info
        return info

    def counter(self, dtype: DType) -> Load:
        """The running number of elements, a state variable of its own."""
        if self.count is None:
            self.count = self.fresh(COUNTER)
            kind = dtype.compute if dtype.is_float else DType.F32
            self.add(StateVar(self.count, "sum", (), kind, Const(0.0, kind), sm.ONE), sm.ONE)
        return Load(self.count, ())

    def is_state(self, name: str) -> bool:
        return name in self.infos

    def suffix(self, e: Expr, tag: str) -> Expr:
        """Loads of state variables read the state before (`@old`) or after (`@new`)."""
        return sm.rename_loads(e, {n: n + tag for n in self.infos})

    def new(self, e: Expr) -> Expr:
        return self.suffix(e, NEW)

    def old(self, e: Expr) -> Expr:
        return self.suffix(e, OLD)

    def deps(self, e: Expr) -> list[Load]:
        """State loads in `e`, in order of appearance."""
        return [ld for ld in loads(e) if ld.tensor in self.infos]

    def resolve(self, body: Expr) -> Expr:
        """Results of earlier reductions replaced by their value over the state."""

        def one(n: Expr) -> Expr | None:
            if isinstance(n, Load) and n.tensor in self.values:
                dims, value = self.values[n.tensor]
                return reindex(value, dict(zip(dims, n.index, strict=True)))
            return None

        return transform(body, one)

    # -- probing -------------------------------------------------------------------------

    def probe(self, e: Expr, state: Mapping[str, float], size: int = 1) -> float:
        """Value of a D-only expression for given state variables; parameters are 1."""

        def read(name: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return torch.full((), state.get(name.split("@")[0], 1.0), dtype=torch.float64)

        dims = {n.dim for n in walk(e) if isinstance(n, Index | Size)}
        env = Env(read, dict.fromkeys(dims, size), {n.name: 1 for n in walk(e) if hasattr(n, "name")}, exact=True)
        return float(evaluate(e, Grid(dict.fromkeys(dims, (0, 1))), env).reshape(-1)[0])

    def at_identity(self, e: Expr, size: int = 1) -> float:
        """Value of a D-only expression in the state of no elements."""
        return self.probe(e, {n: i.identity for n, i in self.infos.items()}, size)


def loads_of(cascade: Cascade) -> set[str]:
    return {t for r in cascade.reductions for t in tensors_read(r.body)}


def reindex(e: Expr, at: Mapping[str, Expr]) -> Expr:
    """Indices of `e` replaced by expressions."""
    if dims_used(e).isdisjoint(at):
        return e
    if isinstance(e, Index):
        return at[e.dim]
    return rebuild(e, tuple([reindex(k, at) for k in children(e)]))


def identity_const(reducer: str, dtype: DType) -> Const:
    """Neutral element of a reducer in a compute type."""
    v = identity_of(reducer, dtype.torch_dtype)
    return Const(bool(v) if dtype is DType.BOOL else float(v) if dtype.is_float else int(v), dtype)


def used_dims(r: Reduction, *exprs: Expr) -> tuple[str, ...]:
    """Dims of a reduction that the expressions depend on, in order."""
    used = {d for e in exprs for d in dims_used(e)}
    return tuple(d for d in r.dims if d in used)


def key_of(terms: tuple[Term, ...]) -> tuple[Fraction, frozenset[tuple[Mono, Mono, Fraction]]]:
    """Leading coefficient, and the terms divided by it as a set: equal keys, equal functions up to a factor."""
    if not terms:
        return Fraction(1), frozenset()
    lead = min(terms, key=lambda t: (show(t.x.expr()), show(t.d.expr()))).coef
    return lead, frozenset((t.x, t.d, t.coef / lead) for t in terms)


def is_exponential(atom: Expr) -> bool:
    match atom:
        case Call("exp" | "exp2"):
            return True
        case Call("pow", (Const(), _)):
            return True
    return False


def exponent(atom: Expr) -> Expr:
    assert isinstance(atom, Call)
    return atom.args[1] if atom.op == "pow" else atom.args[0]


def with_exponent(atom: Expr, e: Expr) -> Expr:
    assert isinstance(atom, Call)
    return call("pow", atom.args[0], e) if atom.op == "pow" else call(atom.op, e)
