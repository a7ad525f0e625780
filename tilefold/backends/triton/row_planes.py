"""What a tile reads for each row and streamed index (a bias), brought by copies where groups own rows (`row_groups`).

Such a tile of a tensor is in the ring beside what lifts read, one for each group: it comes with that, is read from
shared memory as the lifts' result lies, and is free when the elementwise part is done. By pointers each thread would
have pairs of elements a load, and wait for them after the lifts. What no tensor map describes (integers, columns that
do not lie side by side) comes by pointers, followed before the lifts are waited for where registers have room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Load, dims_used, loads
from tilefold.backends.triton.parts import ROWS, Part, Reading
from tilefold.tile import ir
from tilefold.tile.uses import expressions

#: Types of elements that copies bring.
COPIED = (DType.F16, DType.BF16, DType.F32)
#: Bytes that a row of a copy has at most: with 512 (128 of float32) CUDA 12.8's assembler crossed uniform registers.
MOST_BYTES = 256


@dataclass(frozen=True, slots=True)
class Plane:
    """A load of each row and streamed index, and what one copy brings of it: 64 rows, all columns of a tile."""

    load: Load
    part: Part
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Of a group's tile."""
        return ROWS * self.part.lanes * self.dtype.nbytes


def copied(tile: int, nbytes: int) -> bool:
    """Whether one copy brings a plane's tile of so many streamed indices, elements of `nbytes`."""
    return tile * nbytes <= MOST_BYTES


def planes_of(of: Reading, stmts: Sequence[ir.Stmt], row: str) -> tuple[Plane, ...]:
    """What these statements of a tile read for each row and streamed index, as far as copies may bring it."""
    stream, tile = of.loop.dim, of.loop.tile
    found = []
    for x in dict.fromkeys(x for e in expressions(stmts) for x in loads(e) if {row, stream} <= dims_used(x)):
        t, p = of.tensors.get(x.tensor), of.part(x, row, stream)
        if t is not None and p is not None and t.dtype in COPIED and copied(tile, t.dtype.nbytes):
            found.append(Plane(x, replace(p, width=tile), t.dtype))
    return tuple(found)
