"""Reads that lie across: contiguous along another dim than the one that becomes vectors."""

from __future__ import annotations

from dataclasses import dataclass

from tilefold.algebra.expr import Expr, Load, dims_used
from tilefold.backends.cpp.affine import in_range, split
from tilefold.backends.cpp.scope import Facts

#: Bytes of a cache line: what is laid down at a time has as many rows as elements of a line.
LINE_BYTES = 64
#: Elements of a row that is laid down: a tile of them stays in the first two caches.
LONGEST = 1024
#: Elements below which a dim is not worth turning.
FEWEST = 8


@dataclass(frozen=True, slots=True)
class Across:
    """A read with one axis along each of two dims, `contiguous` and `strip`, by unit steps.

    `offsets`: what is added to the dims on these axes.
    """

    load: Load
    contiguous: int
    strip: int
    offsets: tuple[Expr, Expr]


def across(x: Load, dim: str, strip: str, facts: Facts) -> Across | None:
    """`x` as a read that is contiguous along `dim` and moves with `strip` elsewhere.

    None where it is none, may be outside of its tensor, or where either dim is too short or a row too long.
    """
    param = facts.tensor(x.tensor) if x.tensor not in facts.tiles else None
    if param is None or param.role != "in" or param.unit_axis is None or dim == strip:
        return None
    rows, columns = facts.static.get(dim), facts.static.get(strip)
    if rows is None or columns is None or min(rows, columns) < FEWEST or columns > LONGEST:
        return None
    axes = [[n for n, e in enumerate(x.index) if d in dims_used(e)] for d in (dim, strip)]
    if axes[0] != [param.unit_axis] or len(axes[1]) != 1 or axes[0] == axes[1]:
        return None
    sizes, (a, b) = facts.kernel.sizes, (axes[0][0], axes[1][0])
    parts = split(x.index[a], dim, sizes), split(x.index[b], strip, sizes)
    if parts[0] is None or parts[1] is None or parts[0][0] != 1 or parts[1][0] != 1:
        return None
    if not all(in_range(x.index[n], param.shape[n], sizes) for n in (a, b)):
        return None
    return Across(x, a, b, (parts[0][1], parts[1][1]))


def rows_at_once(reads: tuple[Across, ...], facts: Facts) -> int:
    """Rows of the tiles of `reads`: elements of a line of the widest of them."""
    return LINE_BYTES // max(facts.dtype(t.load.tensor).nbytes for t in reads)


def pitch(columns: int) -> int:
    """Elements from row to row of a turned tile: whole blocks of 8, and rows that do not share places of the cache."""
    blocks = -(-columns // 8)
    return 8 * (blocks + 2 if blocks % 16 == 0 else blocks)
