"""Kernels in which one dim comes first in every buffer, and without loops that are none.

The dims of a buffer have the order in which a program named them: the backward of attention has dS over (queries, keys)
and dK over (features, keys), though keys are the rows of its thread blocks. With rows first, a product of what was
computed takes it as its left operand, as it lies in registers, and adds to a state as that lies there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilefold.algebra.expr import Const, Expr, Index, Load, transform
from tilefold.tile.ir import Alloc, Buffer, Fill, For, Gemm, Kernel, Map, Reduce, Select, Stmt, Store
from tilefold.tile.uses import allocated

#: Buffer name -> for each of its axes now, the axis that it was.
Orders = Mapping[str, tuple[int, ...]]


def rows_first(kernel: Kernel) -> Kernel:
    """The same kernel with the dim of its only tiled grid dim before others in buffers, stores and products; unchanged
    where there are several such dims, or selections, whose last axis has a meaning."""
    tiled = [t.dim for t in kernel.grid if t.tile > 1]
    if len(tiled) != 1 or _selects(kernel.body):
        return kernel
    singles = frozenset(t.dim for t in kernel.grid if t.tile == 1)
    orders = {b.name: _order(b.dims, tiled[0], singles) for b in _buffers(kernel.body)}
    return replace(kernel, body=_body(kernel.body, tiled[0], singles, orders))


def without_single_loops(kernel: Kernel) -> Kernel:
    """The same kernel without loops of one tile, whose statements stand in their place; the last loop stays."""
    loops = [s for s in kernel.body if isinstance(s, For)]
    body: list[Stmt] = []
    for s in kernel.body:
        known = allocated(tuple(body)) | allocated(tuple(x for x in kernel.body if x is not s))
        if isinstance(s, For) and s is not loops[-1] and _single(kernel, s) and not known & allocated(s.body):
            body += s.body
        else:
            body.append(s)
    return replace(kernel, body=tuple(body))


def _single(kernel: Kernel, s: For) -> bool:
    size = kernel.sizes[s.dim]
    return s.start is None and s.stop is None and isinstance(size, Const) and 0 < int(size.value) <= s.tile


def _selects(stmts: Sequence[Stmt]) -> bool:
    return any(isinstance(s, Select) or (isinstance(s, For) and _selects(s.body)) for s in stmts)


def _buffers(stmts: Sequence[Stmt]) -> list[Buffer]:
    found: list[Buffer] = []
    for s in stmts:
        if isinstance(s, Alloc):
            found.append(s.buffer)
        elif isinstance(s, For):
            found += _buffers(s.body)
    return found


def _order(dims: Sequence[str], row: str, singles: frozenset[str]) -> tuple[int, ...]:
    """Positions of dims: single indices, the row, the rest."""
    kinds = [0 if d in singles else 1 if d == row else 2 for d in dims]
    return tuple(sorted(range(len(dims)), key=lambda n: (kinds[n], n)))


def _body(stmts: Sequence[Stmt], row: str, singles: frozenset[str], orders: Orders) -> tuple[Stmt, ...]:
    return tuple(_stmt(s, row, singles, orders) for s in stmts)


def _stmt(s: Stmt, row: str, singles: frozenset[str], orders: Orders) -> Stmt:
    def turned(e: Expr) -> Expr:
        return transform(e, lambda x: _load(x, orders) if isinstance(x, Load) else None)

    match s:
        case Alloc(b):
            order = orders[b.name]
            dims, extents = tuple(b.dims[n] for n in order), tuple(b.extents[n] for n in order)
            return Alloc(replace(b, dims=dims, extents=extents))
        case For(body=body):
            return replace(s, body=_body(body, row, singles, orders))
        case Map(_, e) | Reduce(expr=e):
            return replace(s, expr=turned(e))
        case Gemm(a=a, b=b):
            a, b = _load(a, orders), _load(b, orders)
            if Index(row) in b.index and Index(row) not in a.index:
                a, b = b, a
            return replace(s, a=a, b=b)
        case Store(dims=dims, expr=e):
            return replace(s, dims=tuple(dims[n] for n in _order(dims, row, singles)), expr=turned(e))
        case Fill() | Select():
            return s


def _load(x: Load, orders: Orders) -> Load:
    order = orders.get(x.tensor)
    return x if order is None else Load(x.tensor, tuple(x.index[n] for n in order))
