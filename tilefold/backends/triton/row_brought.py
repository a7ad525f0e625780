"""What a tile reads beside what its products multiply: planes out of the ring, the rest by pointers (`row_folds`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilefold.algebra.expr import Load, dims_used, loads
from tilefold.backends.triton.context import Context
from tilefold.backends.triton.parts import ROWS
from tilefold.backends.triton.row_planes import Plane
from tilefold.backends.triton.row_roles import RowRoles, registers
from tilefold.backends.triton.row_room import REGISTERS, THREADS
from tilefold.backends.triton.values import Value
from tilefold.tile import ir
from tilefold.tile.uses import expressions


def asked_ahead(c: Context, r: RowRoles, stmts: Sequence[ir.Stmt]) -> None:
    """Follow pointers of what statements of a tile read along the stream, before anything is waited for: an expression
    then finds what has been loaded. Of rows and streamed indices only where registers have it meanwhile."""
    frame, there = (r.row, r.loop.dim), {p.load for p in r.planes}
    room = REGISTERS[r.groups] - registers(r)
    for x in _along(c, stmts, r.loop.dim):
        takes = ROWS * r.loop.tile // THREADS if r.row in dims_used(x) else 0
        if x not in there and takes <= room:
            c.raw_load(x, frame)
            room -= takes


def _along(c: Context, stmts: Sequence[ir.Stmt], stream: str) -> Iterator[Load]:
    """Floats of tensors that vary along the stream, at positions that are none of data."""
    read = dict.fromkeys(x for e in expressions(stmts) for x in loads(c.settled(e)))
    for x in read:
        t = c.tensors.get(x.tensor)
        if t is not None and t.dtype.is_float and stream in dims_used(x) and not any(any(loads(e)) for e in x.index):
            yield x


def brought(c: Context, plane: Plane, buffer: str, frame: tuple[str, str]) -> None:
    """Have expressions find the plane's elements in registers: read from its tile in shared memory."""
    name = c.scopes.fresh(f"x_{c.names[plane.part.tensor][2:]}")
    tile = f"{buffer}.reshape({[ROWS, plane.part.lanes]})"
    c.scopes.emit(f"{name} = {tile}.load({c.layout})")
    c.there[plane.load] = Value(name, frame, plane.dtype, c.scopes.here)
