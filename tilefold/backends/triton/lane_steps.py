"""How far apart in memory the elements of neighbouring lanes are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, children, dims_used, loads, transform
from tilefold.tensor.index_simplify import Poly, poly, to_expr
from tilefold.tile.affine import slope


def lane_step(
    unit_axis: int,
    shape: Sequence[Expr],
    index: Sequence[Expr],
    axes: Sequence[str],
    sizes: Mapping[str, Expr],
    goes_on: Callable[[str, int], bool],
) -> float | None:
    """Elements from one index of the last axis to the next (`steps_along`), also where it chooses rows of a few
    elements that lie one after the other, all at one place of them: x[i, 3] of seven a row."""
    step = steps_along(poly(index[unit_axis], sizes), axes, goes_on)
    if step is not None or unit_axis != len(index) - 1 or dims_used(index[unit_axis]) & set(axes):
        return step
    chosen = [n for n, e in enumerate(index) if axes[-1] in dims_used(e)]
    row = [n.value if isinstance(n, Const) else 0 for n in shape[chosen[0] + 1 :]] if len(chosen) == 1 else [0]
    each = math.prod(row)
    rows = steps_along(poly(index[chosen[0]], sizes), axes, goes_on) if each > 1 else None
    return None if rows is None else rows * each


def looked_up(unit_axis: int, index: Sequence[Expr], axes: Sequence[str]) -> bool:
    """Whether data say where in a line of memory each element along the last of several axes is (an image that is read
    at places of a flow's, for each channel): whatever they say, elements along the others are lines apart. Not where
    data alone say where each element is (a table)."""
    at = index[unit_axis]
    if len(axes) < 2 or dims_used(at).isdisjoint(axes[-1:]) or not loads(at):
        return False
    others = {d for n, e in enumerate(index) if n != unit_axis for d in dims_used(e)}
    return not others.isdisjoint(axes[:-1]) or not _beside_loads(at).isdisjoint(axes[:-1])


def _beside_loads(e: Expr) -> frozenset[str]:
    """Dims that a position varies with otherwise than by what it reads."""
    if isinstance(e, Load):
        return frozenset()
    return dims_used(e) if not loads(e) else frozenset().union(*map(_beside_loads, children(e)))


def steps_along(at: Poly, axes: Sequence[str], goes_on: Callable[[str, int], bool]) -> float | None:
    """Elements from one index of the last axis to the next, at most and on average, of a position that no other axis
    has a part in; None of others, and of what data say. Exactly 1 of neighbours. goes_on: whether what is left of a dim
    by a number goes on with it, through a tile."""
    used = {d for mono in at for e in mono for d in dims_used(e)}
    if axes[-1] not in used or used & set(axes[:-1]):
        return None
    along = {mono: k for mono, k in at.items() if any(axes[-1] in dims_used(e) for e in mono)}
    if any(loads(e) for mono in along for e in mono):
        return None
    own = to_expr(along)
    own = transform(own, lambda e: _dim_left(e, goes_on))
    step = slope(own, axes[-1])
    return step if step is None or step != 1 or own == Index(axes[-1]) else 1.5


def _dim_left(e: Expr, goes_on: Callable[[str, int], bool]) -> Expr | None:
    """The dim of which e is what a number leaves, if that goes on with it."""
    match e:
        case Call("mod", (Index(d) as i, Const(n, DType.I64))) if goes_on(d, int(n)):
            return i
    return None
