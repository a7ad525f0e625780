"""What a matrix library takes as it lies in memory.

A batch of matrices has one stride for the batch, one for rows and one for columns, and one of the last two is 1. Dims
of a tensor become these where they lie side by side:

    x[i, j, m] of batch i, rows j, columns m        x[j, i, m] too: any stride will do for one dim
    x[i, h, m] of rows i and h, columns m           x[i, m, h] not: no stride tells i and h, so it is copied
    x[j, m, i] of batch i, rows j, columns m        not: nothing but the batch has stride 1

The same holds of results. Which dims of a batch (rows, columns, what is summed) are in front of which is free, and is
chosen so that least is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as every
from math import prod

from tilefold.algebra.expr import Const, Expr, Index, Load
from tilefold.tensor.index_simplify import same
from tilefold.tensor.product import ALIGNED, SIDE, Product
from tilefold.tensor.sizes import estimate

#: Between axes that no one stride tells: one place of an axis, a part of one.
GAP = ""


@dataclass(frozen=True, slots=True)
class Orders:
    """The dims of the matrices of a product in the order in which each group is flattened."""

    batch: tuple[str, ...]
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    depth: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """Elements that the library has to copy: of the operands, and of the result."""

    a: int
    b: int
    out: int

    @property
    def all(self) -> int:
        return self.a + self.b + self.out


def axes_of(ld: Load, sizes: Mapping[str, Expr], shape: Sequence[Expr] | None = None) -> tuple[str, ...]:
    """The dims of more than one index that a load has, as memory has them, with gaps. shape: of the tensor, where it is
    known (else it is taken to be read whole)."""
    found: list[str] = []
    for n, ix in enumerate(ld.index):
        whole = shape is None or not isinstance(ix, Index) or same(sizes[ix.dim], shape[n])
        one = _is_one(sizes[ix.dim]) if isinstance(ix, Index) else shape is None or _is_one(shape[n])
        if one and whole:
            continue
        found += [ix.dim] if isinstance(ix, Index) and whole else [GAP, ix.dim] if isinstance(ix, Index) else [GAP]
    return tuple(found)


def taken(axes: Sequence[str], groups: Sequence[Sequence[str]], matrix: Collection[str]) -> bool:
    """Whether memory with these axes is a batch of matrices without a copy. groups: dims that are flattened, in order;
    matrix: those of rows and columns."""
    if not axes or axes[-1] not in matrix:
        return not axes
    for group in groups:
        mine = [d for d in group if d in axes]
        at = axes.index(mine[0]) if mine else 0
        if list(axes[at : at + len(mine)]) != mine:
            return False
    return True


def copied(
    p: Product, sizes: Mapping[str, Expr], o: Orders, shapes: tuple[Sequence[Expr], Sequence[Expr]] | None = None
) -> Copied:
    """What is copied of a product of loads. shapes: of the tensors that are loaded."""
    return _of_axes(_axes(p, sizes, shapes), sizes, o)


#: Axes of both operands and of the result of a product, as memory has them.
_Axes = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def _axes(p: Product, sizes: Mapping[str, Expr], shapes: tuple[Sequence[Expr], Sequence[Expr]] | None = None) -> _Axes:
    assert p.loads is not None
    a, b = (axes_of(ld, sizes, shape) for ld, shape in zip(p.loads, shapes or (None, None), strict=True))
    return a, b, tuple(d for d in p.dims if not _is_one(sizes[d]))


def _of_axes(axes: _Axes, sizes: Mapping[str, Expr], o: Orders) -> Copied:
    every_sides = (o.rows, o.depth), (o.depth, o.cols), (o.rows, o.cols)
    return Copied(*(_elements(x, o.batch, sides, sizes) for x, sides in zip(axes, every_sides, strict=True)))


def best_orders(p: Product, sizes: Mapping[str, Expr], usual: Orders) -> Orders:
    """The orders in which least is copied; the usual ones, where others are no better.

    A dim of rows (of columns) may be a batch, over which the other operand is the same, where the result then lies as
    the library writes it and the matrices have rows and columns for its tiles."""
    if p.loads is None or p.shared or max(map(len, (usual.batch, usual.rows, usual.cols, usual.depth))) < 2:
        return usual
    orders = [Orders(*found) for found in every(*(_ways(p, g) for g in _groups(usual)))]
    orders += [] if usual.batch else _spread(p, sizes, usual)
    axes = _axes(p, sizes)
    return min(orders, key=lambda o: _of_axes(axes, sizes, o).all)


def _spread(p: Product, sizes: Mapping[str, Expr], o: Orders) -> list[Orders]:
    found = []
    for d in (*o.rows, *o.cols):
        rows, cols = (tuple(x for x in side if x != d) for side in (o.rows, o.cols))
        mine, other = (rows, cols) if d in o.rows else (cols, rows)
        few = [prod(_known(sizes[x]) for x in side) for side in (mine, other)]
        packed = p.dims in ((d, *rows, *cols), (d, *cols, *rows))
        if mine and packed and min(few) >= SIDE and few[0] % ALIGNED == 0:
            found.append(Orders((d,), rows, cols, o.depth))
    return found


def _known(e: Expr) -> int:
    return int(e.value) if isinstance(e, Const) else 0


def _groups(o: Orders) -> tuple[tuple[str, ...], ...]:
    return o.batch, o.rows, o.cols, o.depth


def _ways(p: Product, group: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """A group as it is, and as operands and the result have it."""
    found = [group]
    axes = [p.dims, *([ix.dim for ix in ld.index if isinstance(ix, Index)] for ld in p.loads or ())]
    found += [tuple(d for d in have if d in group) for have in axes if set(group) <= set(have)]
    return iter(dict.fromkeys(found))


def _elements(
    axes: Sequence[str], batch: Sequence[str], sides: tuple[Sequence[str], Sequence[str]], sizes: Mapping[str, Expr]
) -> int:
    matrix = {*sides[0], *sides[1]}
    if taken(axes, (batch, *sides), matrix):
        return 0
    return prod(estimate(sizes[d]) for d in axes if d != GAP)


def _is_one(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 1
