"""Maps whose threads read rows of their own, one place after the other.

What the first place brings to the first-level cache is there for the others if all rows that a multiprocessor is at
work on fit it: the more elements each thread has, the fewer do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilefold.algebra.expr import Const, Load, dims_used, loads
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.own_vectors import widest
from tilefold.backends.triton.touched import CYCLES, LINE
from tilefold.backends.triton.traffic import WARP
from tilefold.block.ir import Accumulate, Block, Let, Store, Update, exprs_of, walk
from tilefold.plan.hardware import H100
from tilefold.tensor.index_simplify import poly
from tilefold.tensor.ir import Input
from tilefold.tile.layout import UnitAxes

if TYPE_CHECKING:
    from tilefold.backends.triton.tiles import Shape

#: Share of the threads of a multiprocessor that it has of kernels with many values a thread.
RESIDENT = 1 / 2


def for_rows(c: TritonConfig, s: Shape, b: Block, local: Mapping[str, int], unit: UnitAxes) -> TritonConfig:
    """Fewer elements for each thread, down to one, where its rows would not fit the first-level cache; and one where
    their places are so many that looking them up would take longer than their bytes, for then they are read in vectors
    (`own_vectors`).

    Two rows of 24 numbers for each of 500,000 paths, eight paths a thread: 333 us on an H100, where their bytes are 40;
    Inductor, one a thread, 72.
    """
    if s.reduces or s.streamed or s.products:
        return c
    places = _places(b, unit)
    rows = _rows_of(places)
    tiles = dict(c.tiles)
    threads = WARP * c.warps

    def kept() -> float:
        lanes = {**local, **tiles}
        of_block = sum(n * math.prod(lanes.get(d, 1) for d in dims) for dims, n in rows.items())
        return RESIDENT * H100.threads / threads * of_block

    along = [d for d in s.parallel if any(d in dims for dims in rows)]
    crowded = _crowded(places, unit)
    while (crowded or kept() > H100.first_cache) and s.area({**local, **tiles}) >= 2 * threads:
        d = max(along, key=lambda d: tiles.get(d, 1))
        if tiles.get(d, 1) == 1:
            break
        tiles[d] //= 2
    return c if tiles == c.tiles else replace(c, tiles=tiles)


#: Dims that choose rows of an input, the input, and the different places of such a row that are read.
_Places = tuple[frozenset[str], Input, list[int]]


def _rows_of(found: Sequence[_Places]) -> dict[frozenset[str], int]:
    """Bytes of the sectors that are read more than once of an element's rows, by the dims that choose the rows."""
    rows: dict[frozenset[str], int] = {}
    for dims, i, places in found:
        sectors = {n * i.dtype.nbytes // H100.sector for n in places}
        if len(sectors) < len(places):
            rows[dims] = rows.get(dims, 0) + H100.sector * len(sectors)
    return rows


def _crowded(found: Sequence[_Places], unit: UnitAxes) -> bool:
    """Whether vectors are there for places of rows, which would be looked up for longer than memory brings them."""
    for _, i, places in found:
        extent = i.shape[unit.get(i.name, len(i.shape) - 1) or 0]
        sectors = H100.sector * len({n * i.dtype.nbytes // H100.sector for n in places})
        lines = len(places) * min(sectors, LINE) / LINE
        if widest(extent, i.dtype) > 1 and lines / CYCLES > sectors * H100.cores / (H100.reached * H100.bandwidth):
            return True
    return False


def _places(b: Block, unit: UnitAxes) -> list[_Places]:
    """Of the rows of all inputs."""
    kinds = {i.name: i for i in b.inputs}
    places: dict[tuple[str, object, frozenset[str]], list[int]] = {}
    for x in dict.fromkeys(x for n in walk(b.body) if isinstance(n, _COMPUTE) for e in exprs_of(n) for x in loads(e)):
        if x.tensor in kinds and (found := _place(x, kinds[x.tensor], unit, b)) is not None:
            row, place = found
            dims = frozenset(d for e in x.index for d in dims_used(e))
            places.setdefault((x.tensor, row, dims), []).append(place)
    return [(dims, kinds[name], at) for (name, _, dims), at in places.items()]


_COMPUTE = (Let, Accumulate, Update, Store)


def _place(x: Load, i: Input, unit: UnitAxes, b: Block) -> tuple[object, int] | None:
    """The row, and where in it, if neighbours of the map have rows that share no sector."""
    axis = unit.get(x.tensor, len(i.shape) - 1)
    if axis is None or axis not in range(len(x.index)) or len(x.index) == 1:
        return None
    along = poly(x.index[axis], b.sizes)
    place = along.pop((), 0)
    match i.shape[axis]:
        case Const(int() as n) if n * i.dtype.nbytes <= H100.sector:
            return None
    if along:
        return None
    return tuple(e for k, e in enumerate(x.index) if k != axis), place
