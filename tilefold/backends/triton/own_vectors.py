"""Rows that threads have of their own, read and stored in vectors: x[i, 8], x[i, 9], .. of which each is by itself.

Law: where neighbours are read at one row each, elements c to c + w - 1 of all rows are one access of w elements a
thread, split in registers; where they are stored one after the other, one that is joined of them. An access of a warp
costs a look-up for each line of the cache that its rows are in, however much it takes of it: 24 places of rows of 96
bytes are 576 look-ups for 24 lines' worth of bytes, in vectors 144.

Only where each thread has one row: more would be laid out in one way for the vectors, and in another for what is stored
of neighbouring rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, call, dims_used, loads
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.traffic import VECTOR, WARP
from tilefold.tile import ir
from tilefold.tile.pieces import power_of_two, product_dims
from tilefold.tile.uses import every, expressions


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

    def joined(self, values: Sequence[str], lanes: int) -> str:
        """Code of vectors of the values of its elements."""
        return f"tl.reshape({_join(values)}, [{lanes}, {self.width}])"

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


def _join(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"tl.join({_join(values[::2])}, {_join(values[1::2])})"


#: A tensor and a position.
Place = tuple[str, tuple[Expr, ...]]


def own_vectors(kernel: ir.Kernel, config: TritonConfig) -> Mapping[Place, OwnVector]:
    """Which loads and stores of a kernel are parts of vectors."""
    tiled = {t.dim: power_of_two(max(t.tile, config.lanes.get(t.dim, 1))) for t in kernel.grid}
    rows = {d for d, n in tiled.items() if n > 1}
    if product_dims(kernel) or [tiled[d] for d in rows] != [WARP * config.warps]:
        return {}
    tensors, body = {t.name: t for t in kernel.tensors}, list(every(kernel.body))
    read = dict.fromkeys((x.tensor, x.index) for e in expressions(kernel.body) for x in loads(e))
    stored = [(s.tensor, s.index) for s in body if isinstance(s, ir.Store) and not s.added]
    places: dict[tuple[str, tuple[Expr, ...], int], dict[int, Place]] = {}
    for name, index in (*read, *stored):
        t = tensors.get(name)
        dims = frozenset(d for e in index for d in dims_used(e))
        if t is None or t.unit_axis is None or not rows <= dims <= tiled.keys():
            continue
        match index[t.unit_axis]:
            case Const(int(place)) if place >= 0:
                others = tuple(e for n, e in enumerate(index) if n != t.unit_axis)
                group = place // widest(t.shape[t.unit_axis], t.dtype)
                places.setdefault((name, others, group), {})[place] = (name, index)
    vectors: dict[Place, OwnVector] = {}
    written = {name for name, _ in stored}
    for (name, _, group), found in places.items():
        t = tensors[name]
        assert t.unit_axis is not None
        width = widest(t.shape[t.unit_axis], t.dtype)
        if name not in written:
            _cut(found, group * width, width, vectors)
        elif not any(name == x for x, _ in read) and _together(found, width, stored):
            vectors |= {x: OwnVector(group * width, width, n - group * width) for n, x in found.items()}
    return vectors


def _together(found: Mapping[int, Place], width: int, stored: list[Place]) -> bool:
    """Whether a whole vector is stored, its elements one after the other."""
    at = [stored.index(found[n]) for n in sorted(found)]
    return width > 1 and len(found) == width and at == list(range(at[0], at[0] + width))


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
