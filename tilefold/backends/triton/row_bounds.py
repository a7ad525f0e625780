"""Whether every block of rows meets a tile of the stream, by the bounds of the stream's loop (`row_roles`)."""

from __future__ import annotations

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Size
from tilefold.tile import ir


def never_empty(kernel: ir.Kernel, loop: ir.For, row: str) -> bool:
    """Whether a loop has a tile for each block of rows, for certain."""
    sizes = [e.value for d in (row, loop.dim) if isinstance(e := kernel.sizes[d], Const)]
    if len(sizes) != 2 or not all(int(n) > 0 for n in sizes):
        return False
    if loop.start is not None:  # from the rows on: there is a streamed index at each
        return loop.stop is None and int(sizes[0]) <= int(sizes[1]) and _no_more(loop.start, row)
    return loop.stop is None or _at_least_one(loop.stop, row, loop.dim)


def _no_more(e: Expr, row: str) -> bool:
    """Whether a bound of the stream is the start of the rows, or less than that or than 1."""
    match e:
        case Call("maximum", (a, b)):
            return _no_more(a, row) and _no_more(b, row)
        case Call("add", (a, Const(c, DType.I64))):
            return int(c) <= 0 and _no_more(a, row)
        case Call("sub", (a, Const(c, DType.I64))):
            return int(c) >= 0 and _no_more(a, row)
        case Call("tile_start", (Index(d),)):
            return d == row
        case Const(c, DType.I64):
            return int(c) <= 0
    return False


def _at_least_one(e: Expr, row: str, stream: str) -> bool:
    """Whether a bound of the stream is at least 1: minimum(size(stream), tile_stop(row) + c), c not negative."""
    match e:
        case Call("minimum", (a, b)):
            return _at_least_one(a, row, stream) and _at_least_one(b, row, stream)
        case Call("add", (a, Const(c, DType.I64))):
            return int(c) >= 0 and _at_least_one(a, row, stream)
        case Call("tile_stop", (Index(d),)):
            return d == row
        case Size(d):
            return d == stream
    return False
