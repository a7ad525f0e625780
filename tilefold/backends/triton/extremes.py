"""Extremes of data over a tile, which bound loops (`block.bounds`): `tile_max(length[b])`.

Data of one place is a number. Data that rows of a tile have in common (`first[i // 64]` on tiles of a multiple of 64)
are a few numbers, so that every form of kernel can read them; any other is a vector, of which the extreme is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Const,
    Expr,
    Index,
    call,
    dims_used,
    lit,
    loads,
    ops_used,
    places,
    transform,
)
from tilefold.algebra.ops import TILE_EXTREMES
from tilefold.backends.triton.values import Value
from tilefold.errors import BackendError

if TYPE_CHECKING:
    from tilefold.backends.triton.context import Context

#: Numbers that are read one by one, most of them.
FEW = 4
#: What stands for data beyond it in bounds, which are 32 bits wide.
MOST = 1 << 30


def extreme(c: Context, op: str, e: Expr) -> Value:
    """Code of the extreme; BackendError: a vector where code has none (Gluon)."""
    e = c.settled(e)
    places = _places(c, e)
    if places is not None:
        join = "minimum" if op == "tile_min" else "maximum"
        out = places[0]
        for p in places[1:]:
            out = call(join, out, p)
        return c.expressions.value(out, ())
    axes = tuple(sorted(d for d in dims_used(e) if c.hold(d).vector))
    v = c.expressions.value(e, axes)
    if c.gluon:
        raise BackendError(f"{c.kernel.name}: a loop is bounded by data that every row has for itself")
    code, masked = v.code, c.masks(v.axes, v.axes)
    if masked is not None:
        code = f"tl.where({masked}, {code}, {MOST if op == 'tile_min' else -MOST})"
    for _ in v.axes:
        code = f"tl.{op.removeprefix('tile_')}({code}, 0)"
    return Value(code, (), DType.I64, max([v.level, *(c.hold(d).level for d in v.axes)]))


def _places(c: Context, e: Expr) -> list[Expr] | None:
    """`e` at every place where its value may differ on the tile, as numbers; None where these are more than a few."""
    found = [e]
    for d in sorted(dims_used(e)):
        dim = c.hold(d)
        if not dim.vector:
            continue
        step = _common(e, d, dim.tile)
        if step is None or dim.tile // step > FEW:
            return None
        found = [_at(x, d, k) for x in found for k in range(0, dim.tile, step)]
    return found


def _common(e: Expr, d: str, tile: int) -> int | None:
    """Indices of d from a multiple of which on as many have the same value; None: one."""
    within = [n for n in places(e) if isinstance(n, Call) and n.op == "floordiv" and n.args[0] == Index(d)]
    by = [int(n.args[1].value) for n in within if isinstance(n.args[1], Const)]
    if len(by) != sum(n == Index(d) for n in places(e)) or any(n < 1 for n in by):
        return None
    step = math.gcd(tile, *by)
    return step if step > 1 else None


def few(e: Expr, d: str, tile: int) -> bool:
    """Whether `e` has so few values on a tile of d that they are numbers."""
    if d not in dims_used(e):
        return True
    step = _common(e, d, tile)
    return step is not None and tile // step <= FEW


def numbers(exprs: Iterable[Expr], data: Iterable[str], d: str, tile: int) -> frozenset[str]:
    """Of arguments, those of which all that is read on a tile of d is a few numbers."""
    apart = {ld.tensor for e in exprs for ld in loads(e) if not few(ld, d, tile)}
    return frozenset(data) - apart


def _at(e: Expr, d: str, k: int) -> Expr:
    """`e` at the k-th index of the tile, or at the last one where the tile ends before."""

    def one(n: Expr) -> Expr | None:
        if n != Index(d):
            return None
        start = call("tile_start", n)
        return start if k == 0 else call("minimum", call("add", start, lit(k)), call("sub", call("tile_stop", n), 1))

    return transform(e, one)


def in_bound(e: Expr) -> bool:
    """Whether data is part of a bound."""
    return not ops_used(e).isdisjoint(TILE_EXTREMES)


__all__ = ["MOST", "extreme", "few", "in_bound", "numbers"]
