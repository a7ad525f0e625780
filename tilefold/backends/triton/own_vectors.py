"""Rows that threads have of their own, read in vectors: x[i, 8], x[i, 9], .. of which each is read by itself.

Law: where neighbours are read at one row each, elements c to c + w - 1 of all rows are one access of w elements a
thread, split in registers. An access of a warp costs a look-up for each line of the cache that its rows are in, however
much it takes of it: 24 places of rows of 96 bytes are 576 look-ups for 24 lines' worth of bytes, in vectors 144.

Only where each thread has one row: more would be laid out in one way for the vectors, and in another for what is stored
of neighbouring rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load, call, dims_used, loads
from tilefold.backends.triton.config import TritonConfig
from tilefold.tile import ir
from tilefold.tile.pieces import power_of_two, product_dims
from tilefold.tile.uses import expressions

#: Bytes of the widest access of a thread. Threads of a warp.
VECTOR, WARP = 16, 32


@dataclass(frozen=True, slots=True)
class OwnVector:
    """Element `place` of the `width` elements from `first` on, along an axis of neighbours."""

    first: int
    width: int
    place: int

    def index(self, index: tuple[Expr, ...], unit_axis: int) -> tuple[Expr, ...]:
        """The positions of the whole vector."""
        at = call("add", Index(f"own {self.width}"), self.first)
        return tuple(at if n == unit_axis else e for n, e in enumerate(index))

    def split(self, lanes: int) -> tuple[tuple[str, int], ...]:
        """How it is split off, halves at a time: code about what is split, {}, and the half that is gone on with."""
        steps, width, place = [], self.width, self.place
        while width > 1:
            width //= 2
            shape = f"{lanes}, 2" if width == 1 else f"{lanes}, {width}, 2"
            steps.append((f"tl.split(tl.reshape({{}}, [{shape}]))", place % 2))
            place //= 2
        return tuple(steps)


#: Dims that stand for the elements of vectors, and how many there are (`OwnVector.index`).
ELEMENTS = {f"own {n}": n for n in (2, 4, 8)}

#: A tensor and the position that is read.
Place = tuple[str, tuple[Expr, ...]]


def own_vectors(kernel: ir.Kernel, config: TritonConfig) -> Mapping[Place, OwnVector]:
    """Which loads of a kernel are parts of vectors."""
    tiled = {t.dim: power_of_two(max(t.tile, config.lanes.get(t.dim, 1))) for t in kernel.grid}
    rows = {d for d, n in tiled.items() if n > 1}
    if product_dims(kernel) or [tiled[d] for d in rows] != [WARP * config.warps]:
        return {}
    inputs = {t.name: t for t in kernel.tensors if t.role == "in"}
    found: dict[tuple[str, tuple[Expr, ...], int], dict[int, Place]] = {}
    for x in dict.fromkeys(x for e in expressions(kernel.body) for x in loads(e)):
        t = inputs.get(x.tensor)
        width = 1 if t is None else _width(t)
        if t is None or t.unit_axis is None or width == 1 or {*_dims(x), *tiled} != {*tiled} or not rows <= _dims(x):
            continue
        match x.index[t.unit_axis]:
            case Const(int(place)) if place >= 0:
                others = tuple(e for n, e in enumerate(x.index) if n != t.unit_axis)
                found.setdefault((x.tensor, others, place // width), {})[place] = (x.tensor, x.index)
    vectors: dict[Place, OwnVector] = {}
    for (name, _, group), places in found.items():
        _cut(places, group * _width(inputs[name]), _width(inputs[name]), vectors)
    return vectors


def _dims(x: Load) -> frozenset[str]:
    return frozenset(d for e in x.index for d in dims_used(e))


def _width(t: ir.TensorParam) -> int:
    return 1 if t.unit_axis is None else widest(t.shape[t.unit_axis], t.dtype)


def widest(extent: Expr, dtype: DType) -> int:
    """Elements of the widest vectors that whole rows of this extent are made of."""
    width = VECTOR // dtype.nbytes
    if not isinstance(extent, Const) or dtype is DType.BOOL or dtype.nbytes == 1:
        return 1
    while width > 1 and int(extent.value) % width:
        width //= 2
    return width


def _cut(places: Mapping[int, Place], first: int, width: int, vectors: dict[Place, OwnVector]) -> None:
    """Vectors of which more than half is read."""
    here = {n: x for n, x in places.items() if first <= n < first + width}
    if width == 1 or not here:
        return
    if 2 * len(here) > width:
        vectors |= {x: OwnVector(first, width, n - first) for n, x in here.items()}
        return
    for half in (first, first + width // 2):
        _cut(here, half, width // 2, vectors)
