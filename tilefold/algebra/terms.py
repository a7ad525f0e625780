"""The normal form of bodies: sums of coef * x-part * D-part, and what the names in them mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite

from tilefold.algebra import simplify as sm
from tilefold.algebra.expr import Call, Cast, Const, Expr, dims_used, tensors_read
from tilefold.algebra.facts import Known, range_of


class Inseparable(Exception):
    """Why an expression has no separation; the text is shown to users."""


class Mono:
    """A product of atoms with rational exponents; immutable, order of insertion kept for printing."""

    __slots__ = ("_powers",)

    def __init__(self, powers: Mapping[Expr, Fraction] | None = None):
        self._powers = {a: p for a, p in (powers or {}).items() if p != 0}

    def __mul__(self, o: Mono) -> Mono:
        out = dict(self._powers)
        for a, p in o._powers.items():
            out[a] = out.get(a, Fraction(0)) + p
        return Mono(out)

    def __pow__(self, p: Fraction | int) -> Mono:
        return Mono({a: q * p for a, q in self._powers.items()})

    def __truediv__(self, o: Mono) -> Mono:
        return self * o**-1

    def __eq__(self, o: object) -> bool:
        return isinstance(o, Mono) and self._powers == o._powers

    def __hash__(self) -> int:
        return hash(frozenset(self._powers.items()))

    def __bool__(self) -> bool:
        return bool(self._powers)

    def items(self) -> Iterable[tuple[Expr, Fraction]]:
        return self._powers.items()

    def power(self, atom: Expr) -> Fraction:
        return self._powers.get(atom, Fraction(0))

    def only(self, atoms: Iterable[Expr]) -> Mono:
        keep = set(atoms)
        return Mono({a: p for a, p in self._powers.items() if a in keep})

    def expr(self) -> Expr:
        """The product as an expression: numerators over denominators."""
        top = sm.product(sm.power(a, p) for a, p in self._powers.items() if p > 0 or p == Fraction(-1, 2))
        low = [sm.power(a, -p) for a, p in self._powers.items() if p < 0 and p != Fraction(-1, 2)]
        return sm.div(top, sm.product(low)) if low else top


NONE = Mono()


@dataclass(frozen=True, slots=True)
class Term:
    """coef * x * d: `x` over inputs and parameters, `d` over earlier results."""

    coef: Fraction
    x: Mono
    d: Mono

    def expr(self) -> Expr:
        return sm.mul(sm.number(self.coef), sm.mul(self.x.expr(), self.d.expr()))


@dataclass(frozen=True, slots=True)
class Group:
    """`expr` = sum of `terms`."""

    expr: Expr
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Scope:
    """What the names in a body mean: reduced axes, state variables, facts about loads."""

    axes: frozenset[str]
    state: frozenset[str]
    known: Known
    ignore_rounding: bool = False
    few: bool = False

    def varies(self, e: Expr) -> bool:
        """Whether `e` depends on the reduced axes."""
        return bool(dims_used(e) & self.axes)

    def depends(self, e: Expr) -> bool:
        """Whether `e` depends on earlier results."""
        return not tensors_read(e).isdisjoint(self.state)

    def nonneg(self, e: Expr) -> bool:
        return range_of(e, self.known).nonneg

    def pure_d(self, t: Term) -> bool:
        """Whether nothing in the term varies along the axes."""
        return not any(self.varies(a) for a, _ in t.x.items())


def transparent(e: Expr, scope: Scope) -> Expr:
    """Precision casts (and, if asked for, quantising float casts) around D-dependent values dropped."""

    def clean(n: Expr) -> Expr:
        if not scope.depends(n):
            return n
        match n:
            case Cast(arg, dtype) if dtype.is_float and dtype.nbytes < 8:
                if not dtype.rounds or scope.ignore_rounding:
                    return clean(arg)
            case Call(op, args) if op in ("round", "trunc", "floor", "ceil") and scope.ignore_rounding:
                return clean(args[0]) if scope.varies(n) else n
        match n:
            case Call(op, args):
                return Call(op, tuple(clean(a) for a in args))
            case Cast(arg, dtype):
                return Cast(clean(arg), dtype)
        return n

    return clean(e)


def factor(e: Expr, scope: Scope) -> tuple[Fraction, Mono]:
    """e = coefficient * product of atoms^powers, for an expression that needs no separation."""
    v = sm.const_value(e)
    if v is not None and isfinite(v):
        return Fraction(v), NONE
    match e:
        case Call("neg", (a,)):
            c, m = factor(a, scope)
            return -c, m
        case Call("mul", (a, b)):
            ca, ma = factor(a, scope)
            cb, mb = factor(b, scope)
            return ca * cb, ma * mb
        case Call("div", (a, b)):
            ca, ma = factor(a, scope)
            cb, mb = factor(b, scope)
            return (ca / cb, ma / mb) if cb else (Fraction(1), Mono({e: Fraction(1)}))
        case Call("pow", (a, Const() as c)) if isfinite(float(c.value)):
            return _root(a, Fraction(float(c.value)), scope)
        case Call("sqrt", (a,)):
            return _root(a, Fraction(1, 2), scope)
        case Call("rsqrt", (a,)):
            return _root(a, Fraction(-1, 2), scope)
        case Call("abs", (a,)) if scope.nonneg(a):
            return factor(a, scope)
    return Fraction(1), Mono({e: Fraction(1)})


def _root(a: Expr, p: Fraction, scope: Scope) -> tuple[Fraction, Mono]:
    """a^p, distributed over the factors of a where that is sound."""
    c, m = factor(a, scope)
    if p.denominator == 1 and (c or p > 0):
        return c**p.numerator, m**p
    if c == 1 and m and all(scope.nonneg(atom) for atom, _ in m.items()):
        return Fraction(1), m**p
    return Fraction(1), Mono({a: p})


def collect(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Equal products added up; zero terms dropped."""
    table: dict[tuple[Mono, Mono], Fraction] = {}
    for t in terms:
        table[t.x, t.d] = table.get((t.x, t.d), Fraction(0)) + t.coef
    return tuple(Term(c, x, d) for (x, d), c in table.items() if c)


def scale(terms: tuple[Term, ...]) -> Mono:
    """The factors over D that all terms share with the same power; none where there are no terms."""
    if not terms:
        return NONE
    first, *rest = (t.d for t in terms)
    return first.only(a for a, p in first.items() if all(d.power(a) == p for d in rest))
