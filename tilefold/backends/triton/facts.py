"""Which part of a loop needs no mask: tiles on which every condition is certain.

Dual of `block.bounds`: a bound there keeps tiles on which a condition *may* hold, here tiles on
which it *must*. A comparison that is linear in the indices holds on all of a tile of the loop's
dim between two bounds that the tiles of the other dims determine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, dims_used, walk
from tilefold.block.bounds import NEGATED, bound


@dataclass(frozen=True, slots=True)
class Certain:
    """Indices [start, stop) of the loop's dim (None: no bound) where `conditions` have the values given."""

    conditions: tuple[tuple[Expr, bool], ...]
    starts: tuple[Expr, ...]
    stops: tuple[Expr, ...]


def certain(exprs: Iterable[Expr], dim: str, outer: frozenset[str], data: frozenset[str] = frozenset()) -> Certain:
    """The stretch of `dim` on which as many conditions of `where`s as possible are settled.

    A condition counts with the value that keeps the second operand, unless that is the masked one. data: arguments
    whose elements may bound it (`block.bounds.integers`).
    """
    conditions: list[tuple[Expr, bool]] = []
    starts: list[Expr] = []
    stops: list[Expr] = []
    for c, value in _conditions(exprs, dim):
        found = _bounds(c, value, dim, outer, data)
        if found is None:
            continue
        conditions.append((c, value))
        starts += [e for side, e in found if side == "start"]
        stops += [e for side, e in found if side == "stop"]
    return Certain(tuple(conditions), tuple(dict.fromkeys(starts)), tuple(dict.fromkeys(stops)))


def _conditions(exprs: Iterable[Expr], dim: str) -> Iterator[tuple[Expr, bool]]:
    seen: set[Expr] = set()
    for e in exprs:
        for x in walk(e):
            if isinstance(x, Call) and x.op == "where" and x.args[0] not in seen and dim in dims_used(x.args[0]):
                seen.add(x.args[0])
                yield x.args[0], not isinstance(x.args[1], Const)


def _bounds(
    e: Expr, truth: bool, dim: str, outer: frozenset[str], data: frozenset[str]
) -> list[tuple[str, Expr]] | None:
    """Bounds of dim that make `e` have that value on whole tiles; None where that cannot be told."""
    match e:
        case Call("not", (a,)):
            return _bounds(a, not truth, dim, outer, data)
        case Call("and", (a, b)) if truth:
            return _both(_bounds(a, True, dim, outer, data), _bounds(b, True, dim, outer, data))
        case Call("or", (a, b)) if not truth:
            return _both(_bounds(a, False, dim, outer, data), _bounds(b, False, dim, outer, data))
        case Cast(a, DType.BOOL):
            return _bounds(a, truth, dim, outer, data)
        case Call(("ne" | "eq") as op, (Call("where", (c, Const(x, _), Const(y, _))), Const(z, _))):
            on, off = (x == z) == (op == "eq"), (y == z) == (op == "eq")
            return _bounds(c, truth == on, dim, outer, data) if on != off else None
        case Call(("lt" | "le" | "gt" | "ge") as op, (a, b)):
            found = bound(Call(op if truth else NEGATED[op], (a, b)), dim, outer, everywhere=True, data=data)
            return None if found is None else [found]
    return None


def _both(a: list[tuple[str, Expr]] | None, b: list[tuple[str, Expr]] | None) -> list[tuple[str, Expr]] | None:
    return None if a is None or b is None else a + b
