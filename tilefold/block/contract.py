"""Recognise sums of products as contractions and give them plain operands.

Law: sum over r of A(m, r) * B(r, n) is a matrix product whenever no factor mentions both a
dim that only A keeps and a dim that only B keeps; factors that mention neither may go to
either side. An operand that is not a plain load becomes a block value first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Load, dims_used, type_of, walk


@dataclass(frozen=True, slots=True)
class Contraction:
    """sum over rdims of a * b."""

    a: Expr
    b: Expr


def factors(e: Expr, keep: Callable[[Cast], bool] = lambda e: False) -> list[Expr]:
    """Multiplicative factors; precision casts are transparent, but those to `keep`."""
    match e:
        case Call("mul", (a, b)):
            return factors(a, keep) + factors(b, keep)
        case Call("div", (a, b)):
            return [*factors(a, keep), Call("div", (Const(1.0, DType.F32), b))]
        case Call("neg", (a,)):
            return [Const(-1.0, DType.F32), *factors(a, keep)]
        case Cast(arg, dtype) if not dtype.rounds and isinstance(arg, Call | Load) and not keep(e):
            return factors(arg, keep)
        case _:
            return [e]


def product(items: list[Expr]) -> Expr:
    out = items[0]
    for f in items[1:]:
        # restore a / b where a factor is a reciprocal
        match f:
            case Call("div", (Const(1.0, _), d)):
                out = Call("div", (out, d))
            case _:
                out = Call("mul", (out, f))
    return out


def as_contraction(
    e: Expr, dims: tuple[str, ...], rdims: tuple[str, ...], dtype_of: Callable[[str], DType] | None = None
) -> Contraction | None:
    """The two sides of a sum of products over `rdims` kept over `dims`, None if it is no contraction.

    Where the tensors' types are known, integers keep the type of 16 bits that the program multiplies them in: a matrix
    unit takes no integers and floats together.
    """

    def of_integers(x: Cast) -> bool:
        return dtype_of is not None and x.dtype.nbytes == 2 and not type_of(x.arg, dtype_of).is_float

    parts = factors(e, of_integers)
    used = [dims_used(f) for f in parts]
    heavy = [n for n, d in enumerate(used) if d & set(rdims)]
    if len(heavy) < 2:
        return None
    # a dim is exclusive to a side if some, but not all, reduced factors mention it
    common = set(dims)
    for n in heavy:
        common &= used[n]
    kept = [frozenset(u & set(dims)) - common for u in used]
    side_a: set[str] = set()
    side_b: set[str] = set()
    for n in heavy:
        side = side_a if not (kept[n] & side_b) and (not side_a or kept[n] & side_a) else side_b
        side |= kept[n]
    if not side_a or not side_b or side_a & side_b:
        return None
    a_items: list[Expr] = []
    b_items: list[Expr] = []
    loose: list[Expr] = []
    for n, f in enumerate(parts):
        if kept[n] & side_a and kept[n] & side_b:
            return None
        (a_items if kept[n] & side_a else b_items if kept[n] & side_b else loose).append(f)
    # factors on neither side ride with an operand that has to be computed anyway
    (b_items if len(b_items) > 1 and len(a_items) == 1 else a_items).extend(loose)
    a, b = product(_numerators_first(a_items)), product(_numerators_first(b_items))
    if not (dims_used(a) & set(rdims) and dims_used(b) & set(rdims)):
        return None
    return Contraction(a, b)


def _numerators_first(items: list[Expr]) -> list[Expr]:
    def reciprocal(f: Expr) -> bool:
        return isinstance(f, Call) and f.op == "div" and f.args[0] == Const(1.0, DType.F32)

    return sorted(items, key=reciprocal)


def is_plain(e: Expr) -> bool:
    """A load that a back end can hand to its matrix product: affine indices, no indirection."""
    return isinstance(e, Load) and not any(isinstance(n, Load) for ix in e.index for n in walk(ix))
