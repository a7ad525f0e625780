"""Which part of a loop needs no mask: tiles on which every condition is certain.

Dual of `block.bounds`: a bound there keeps tiles on which a condition *may* hold, here tiles on
which it *must*. A comparison that is linear in the indices holds on all of a tile of the loop's
dim between two bounds that the tiles of the other dims determine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, call, dims_used, walk
from tilefold.block.bounds import NEGATED, bound
from tilefold.tensor.index_simplify import minus, nonnegative, poly, within


@dataclass(frozen=True, slots=True)
class Certain:
    """Indices [start, stop) of the loop's dim (None: no bound) where `conditions` have the values given."""

    conditions: tuple[tuple[Expr, bool], ...]
    starts: tuple[Expr, ...]
    stops: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Turns:
    """A loop over the whole tiles of [start, stop): turn t has the places start + tile t + r, 0 <= r < tile."""

    start: Expr
    stop: Expr
    tile: int

    @staticmethod
    def of(stop: Expr | None) -> Turns | None:
        """Of a loop from 0 to (stop - start) // tile, as folds that lanes keep have (`tile.lanes`)."""
        match stop:
            case Call("floordiv", (Call("sub", (end, start)), Const(tile))):
                return Turns(start, end, int(tile))
        return None

    def inside(self, turn: str, at: Expr, extent: Expr, sizes: Mapping[str, Expr]) -> bool:
        """Whether a place is one of a turn's, and all of these are in front of an extent: needs no mask for that."""
        rest = poly(call("sub", call("sub", at, self.start), call("mul", Index(turn), self.tile)), sizes)
        ends = self.stop.args if isinstance(self.stop, Call) and self.stop.op == "minimum" else (self.stop,)
        ahead = any(nonnegative(minus(poly(extent, sizes), poly(e, sizes), 0)) for e in ends)
        return ahead and within(rest, {(): self.tile}, sizes)


def certain(exprs: Iterable[Expr], dim: str, outer: frozenset[str], data: frozenset[str] = frozenset()) -> Certain:
    """The stretch of `dim` on which as many conditions of `where`s as possible are settled.

    A condition counts with the value that keeps the second operand, unless that is the masked one. data: arguments
    whose elements may bound it (`block.bounds.integers`).
    """
    conditions: list[tuple[Expr, bool]] = []
    starts: list[Expr] = []
    stops: list[Expr] = []
    for c, value in _conditions(exprs, dim):
        for part, truth in _parts(c, value):
            found = _bounds(part, truth, dim, outer, data)
            if found is None:
                continue
            conditions.append((part, truth))
            starts += [e for side, e in found if side == "start"]
            stops += [e for side, e in found if side == "stop"]
    return Certain(tuple(dict.fromkeys(conditions)), tuple(dict.fromkeys(starts)), tuple(dict.fromkeys(stops)))


def _conditions(exprs: Iterable[Expr], dim: str) -> Iterator[tuple[Expr, bool]]:
    seen: set[Expr] = set()
    for e in exprs:
        for x in walk(e):
            if isinstance(x, Call) and x.op == "where" and x.args[0] not in seen and dim in dims_used(x.args[0]):
                seen.add(x.args[0])
                yield x.args[0], not isinstance(x.args[1], Const)


def _parts(e: Expr, truth: bool) -> list[tuple[Expr, bool]]:
    """What all has to hold for `e` to have that value: a part may be certain where the whole is not."""
    match e:
        case Call(("and" | "or") as op, (a, b)) if (op == "and") == truth:
            return _parts(a, truth) + _parts(b, truth)
    return [(e, truth)]


def _bounds(
    e: Expr, truth: bool, dim: str, outer: frozenset[str], data: frozenset[str]
) -> list[tuple[str, Expr]] | None:
    """Bounds of dim that make `e` have that value on whole tiles; None where that cannot be told."""
    match e:
        case Call("not", (a,)):
            return _bounds(a, not truth, dim, outer, data)
        case Call(("and" | "or") as op, (a, b)):
            one, other = _bounds(a, truth, dim, outer, data), _bounds(b, truth, dim, outer, data)
            return _both(one, other) if (op == "and") == truth else _either(one, other)
        case Cast(a, DType.BOOL):
            return _bounds(a, truth, dim, outer, data)
        case Call(("ne" | "eq") as op, (Call("where", (c, Const(x, _), Const(y, _))), Const(z, _))):
            on, off = (x == z) == (op == "eq"), (y == z) == (op == "eq")
            return _bounds(c, truth == on, dim, outer, data) if on != off else None
        case Call(("lt" | "le" | "gt" | "ge") as op, (a, b)):
            found = bound(Call(op if truth else NEGATED[op], (a, b)), dim, outer, everywhere=True, data=data)
            return None if found is None else [found]
    return None


def _either(a: list[tuple[str, Expr]] | None, b: list[tuple[str, Expr]] | None) -> list[tuple[str, Expr]] | None:
    """Where one of two is certain: both end, or both begin, at one place; else where the first is."""
    if a is None or b is None:
        return b if a is None else a
    ((one, x), *more), ((other, y), *rest) = a, b
    if more or rest or one != other:
        return a
    return [(one, call("minimum" if one == "start" else "maximum", x, y))]


def _both(a: list[tuple[str, Expr]] | None, b: list[tuple[str, Expr]] | None) -> list[tuple[str, Expr]] | None:
    return None if a is None or b is None else a + b
