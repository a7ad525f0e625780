"""Products and sums of products: the normal forms that the laws look at.

`factors(e)` is a product as a tuple, `terms(e)` a sum of products; precision casts
(not `DType.rounds`) are transparent in both, quantising casts are not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, dims_used, type_of, walk
from tilefold.names import free
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import substitute_map

#: Most products a sum is expanded into.
MOST_TERMS = 12

Typed = Callable[[str], DType]
Factors = tuple[Expr, ...]
ONE = Const(1.0, DType.F32)
MINUS_ONE = Const(-1.0, DType.F32)


def transparent(e: Expr, dtype_of: Typed) -> Expr:
    """`e` without precision casts around floating values."""
    while isinstance(e, Cast) and not e.dtype.rounds and type_of(e.arg, dtype_of).is_float:
        e = e.arg
    return e


def factors(e: Expr, dtype_of: Typed) -> Factors:
    """Multiplicative factors; a divisor d becomes the factor 1 / d, a sign the factor -1."""
    e = transparent(e, dtype_of)
    match e:
        case Call("mul", (a, b)):
            return factors(a, dtype_of) + factors(b, dtype_of)
        case Call("div", (a, b)):
            above = () if a == ONE else factors(a, dtype_of)
            below = factors(b, dtype_of)
            return (*above, *(Call("div", (ONE, d)) for d in below))
        case Call("neg", (a,)):
            return (MINUS_ONE, *factors(a, dtype_of))
        case _:
            return (e,)


def product(items: Iterable[Expr]) -> Expr:
    """The product in a canonical order: by the number of dims, then by text; divisors last."""
    ordered = sorted(items, key=_order)
    numbers = [f for f in ordered if isinstance(f, Const) and f.dtype.is_float]
    scale = 1.0
    for n in numbers:
        scale *= float(n.value)
    rest = [f for f in ordered if f not in numbers]
    kind = DType.F64 if any(n.dtype is DType.F64 for n in numbers) else DType.F32
    if scale not in (1.0, -1.0) or not rest:
        rest.insert(0, Const(scale, kind))
    out = rest[0]
    for f in rest[1:]:
        out = Call("div", (out, f.args[1])) if _is_reciprocal(f) else Call("mul", (out, f))  # type: ignore[attr-defined]
    return Call("neg", (out,)) if scale == -1.0 and len(rest) and not (len(rest) == 1 and rest[0] == ONE) else out


def _order(e: Expr) -> tuple[bool, int, str]:
    return _is_reciprocal(e), -len(dims_used(e)), repr(e)


def _is_reciprocal(e: Expr) -> bool:
    return isinstance(e, Call) and e.op == "div" and e.args[0] == ONE


def terms(e: Expr, dtype_of: Typed) -> tuple[Factors, ...] | None:
    """A sum of products, products distributed over sums; None where it has more than MOST_TERMS."""
    e = transparent(e, dtype_of)
    match e:
        case Call("add" | "sub", (a, b)):
            left, right = terms(a, dtype_of), terms(b, dtype_of)
            if left is None or right is None:
                return None
            if e.op == "sub":
                right = tuple((MINUS_ONE, *t) for t in right)
            return _limited(left + right)
        case Call("neg", (a,)):
            inner = terms(a, dtype_of)
            return None if inner is None else tuple((MINUS_ONE, *t) for t in inner)
        case Call("mul", (a, b)):
            left, right = terms(a, dtype_of), terms(b, dtype_of)
            if left is None or right is None:
                return None
            return _limited(tuple(x + y for x in left for y in right))
        case Call("div", (a, b)):
            above = terms(a, dtype_of)
            if above is None:
                return None
            below = tuple(Call("div", (ONE, d)) for d in factors(b, dtype_of))
            return tuple((*t, *below) for t in above)
        case _:
            return ((e,),)


def summands(e: Expr, dtype_of: Typed) -> tuple[Factors, ...]:
    """A sum as its terms, each as its factors; sums inside products stay whole."""
    e = transparent(e, dtype_of)
    match e:
        case Call("add", (a, b)):
            return summands(a, dtype_of) + summands(b, dtype_of)
        case Call("sub", (a, b)):
            return summands(a, dtype_of) + tuple((MINUS_ONE, *t) for t in summands(b, dtype_of))
    return (factors(e, dtype_of),)


def _limited(t: tuple[Factors, ...]) -> tuple[Factors, ...] | None:
    return t if len(t) <= MOST_TERMS else None


def total(items: Iterable[Factors]) -> Expr:
    """The sum of products; negative ones are subtracted."""
    out: Expr | None = None
    for t in items:
        e = product(t)
        match e:
            case Call("neg", (inner,)) if out is not None:
                out = Call("sub", (out, inner))
            case _:
                out = e if out is None else Call("add", (out, e))
    return Const(0.0, DType.F32) if out is None else out


# -- matrix products --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gemm:
    """`compute` = sum over its rdims of a * b, both plain loads, each with a kept dim of its own."""

    compute: Compute
    a: Load
    b: Load

    @property
    def operands(self) -> tuple[Load, Load]:
        return self.a, self.b

    def other(self, operand: Load) -> Load:
        return self.b if operand == self.a else self.a


def gemm(c: Compute) -> Gemm | None:
    """The product that a statement computes, None if it is something else."""
    p = product_of(c)
    if p is None or p.loads is None or not p.whole or not p.is_matrix() or not c.dtype.is_float or c.dtype.rounds:
        return None
    return Gemm(c, *p.loads)


def gemms(p: Program) -> dict[str, Gemm]:
    """The matrix products of a program by the name of their result."""
    return {c.name: g for c in p.body if (g := gemm(c)) is not None}


def map_of(p: Program, tensor: str) -> Compute | None:
    """The map that computes a tensor, None if a reduction or the caller does."""
    return next((c for c in p.body if c.name == tensor and c.reducer is None), None)


def plain(dims: tuple[str, ...]) -> tuple[Expr, ...]:
    return tuple(Index(d) for d in dims)


def dims_of_load(ld: Load) -> tuple[str, ...]:
    """Dims that an access varies with, in the order of the tensor's axes."""
    return tuple(dict.fromkeys(n.dim for i in ld.index for n in walk(i) if isinstance(n, Index)))


def fresh(p: Program, wanted: str) -> str:
    """A name that no tensor, dim or symbol of the program bears."""
    return free(wanted, p.names)


def expand(p: Program, e: Expr) -> Factors:
    """Factors with those that load a map replaced by the map's own, all the way down."""
    out: list[Expr] = []
    for f in factors(e, p.dtype_of):
        m = map_of(p, f.tensor) if isinstance(f, Load) else None
        if m is None or m.dtype.rounds or not isinstance(f, Load):
            out.append(f)
        else:
            from_map = substitute_map(m, f)
            inner = factors(from_map, p.dtype_of)
            out += expand(p, from_map) if len(inner) > 1 or isinstance(inner[0], Load) else [f]
    return tuple(out)
