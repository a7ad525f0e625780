"""Statements on the states of a group of warps that owns rows (`row_groups`), in the layout of their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilefold.algebra.expr import Index, Load, loads, tensors_read, transform
from tilefold.backends.triton.context import Context
from tilefold.backends.triton.dependent import ALONE
from tilefold.backends.triton.gluon_text import WARPS, matrix_layout
from tilefold.backends.triton.names import identifier
from tilefold.backends.triton.parts import ROWS
from tilefold.backends.triton.product import Products
from tilefold.backends.triton.reductions import Reductions
from tilefold.backends.triton.render import Renderer
from tilefold.backends.triton.row_walk import Shared, scalar
from tilefold.backends.triton.scalar import narrowed
from tilefold.errors import BackendError
from tilefold.tile import ir
from tilefold.tile.uses import allocated, expressions

#: Elements that a thread loads at once of 16 bits, threads of a warp.
AT_ONCE, THREADS = 8, 32


class States(Renderer):
    """Statements on states of the same columns, at a point of `folds`."""

    def __init__(self, of: Shared, outer: Context, columns: str, number: int, stmts: Sequence[ir.Stmt]):
        r, c = of.r, of.context((of.r.row, columns))
        super().__init__(c, tf32=False, interleave=1, place=ALONE)
        self.of, self.outer, self.stmts, self.number = of, outer, stmts, number
        # quotients are many here, and their divisors are a value a row
        c.expressions.leaves = replace(c.expressions.leaves, inverses=True)
        c.layout = f"mma_{number}"
        c.scopes.stack = [outer.scopes.stack[-1].nested()]
        c.scopes.used = outer.scopes.used
        c.dims = {d: replace(x, level=0) for d, x in outer.dims.items() if d != r.loop.dim}

    def render_all(self) -> None:
        """All of the statements; what they read of values a row crosses over."""
        r, outer = self.of.r, self.outer
        inside = allocated(self.stmts)
        read = {t for e in expressions(self.stmts) for t in tensors_read(e)}
        for name in (*r.taken, *r.wide):
            if name in inside or name not in outer.buffers or (name in r.taken and name not in read):
                continue
            self.stmt(ir.Alloc(self.of.buffer(name)))
            self.c.buffer_names[name] = outer.buffer_names[name]
            if name in r.taken:
                here = self.c.scopes.fresh(f"by_row_{identifier(name)}")
                of = f"gl.SliceLayout(1, mma_{self.number})"
                self.c.scopes.emit(f"{here} = gl.convert_layout({outer.buffer_names[name]}, {of})")
                self.c.buffer_names[name] = here
        self.body(self.stmts)
        for name in sorted(inside & r.wide):
            outer.buffers[name] = self.c.buffers[name]
            outer.buffer_names[name] = self.c.buffer_names[name]

    def store(self, s: ir.Store) -> None:
        """By tensor map where one describes the result: rows and columns beyond the tensor are not written."""
        of = self.of
        found = next((n for n, o in enumerate(of.r.stored) if o.store == s), None)
        if found is None:
            self.c.lanes_here = True  # as many addresses as elements, which registers would hold through the loop
            super().store(s)
            return
        o = of.r.stored[found]
        code = self.value_to_store(s, tuple(self.c.matrix))
        row = self.c.hold(of.r.row).base
        first = {Index(of.r.row): row, Index(o.column): str(o.part.start)}
        at = [first[e] if e in first else scalar(self.c, e) for e in o.part.index]
        at.append(row if o.turned else str(o.part.start))
        tile = f"{of.outs[found]}.index(GROUP)"
        self.c.scopes.emit("tma.store_wait(0)")
        to = f"{tile}.reshape({list(o.shape)})"
        self.c.scopes.emit(f"{to}{'.permute((1, 0))' if o.turned else ''}.store({code})")
        self.c.scopes.emit("fence_async_shared()")
        self.c.scopes.emit(f"tma.async_copy_shared_to_global({of.map_out(o)}, [{', '.join(at)}], {tile})")


def prepare(of: Shared, outer: Context, number: int, made: ir.Map) -> None:
    """What is computed of a group's rows once they are there, in place: each thread rewrites what it has read."""
    r, p = of.r, of.r.rows[number]
    (read,) = set(loads(made.expr))
    columns = of.buffer(made.buf).dims[-1]
    c = of.context((r.row, columns))
    c.scopes.stack = [outer.scopes.stack[-1].nested()]
    c.scopes.used = outer.scopes.used
    c.dims = {d: replace(x, level=0) for d, x in outer.dims.items() if d != r.loop.dim}
    c.layout = c.scopes.fresh("mma_rows")
    here, there = c.scopes.fresh("raw"), f"{of.rows[number]}.index(GROUP).reshape([{ROWS}, {p.lanes}])"
    b = of.buffer(made.buf)
    c.buffers[here] = replace(b, name=here, dtype=r.dtype)
    c.held[here] = tuple(c.hold(d).lanes for d in b.dims)
    c.buffer_names[here] = here
    c.scopes.emit(f"{c.layout}: tl.constexpr = {matrix_layout(p.lanes)}")
    c.scopes.emit(f"{here} = {there}.load({c.layout})")
    own = Load(here, tuple(Index(d) for d in b.dims))
    v = c.expressions.value(c.settled(transform(made.expr, lambda x: own if x == read else None)), c.matrix)
    if v.axes != c.matrix:
        raise BackendError(f"{c.kernel.name}: {made.buf} does not vary over rows and columns")
    c.scopes.emit(f"{there}.store({v.code if v.kind is r.dtype else narrowed(v.code, v.kind, r.dtype)})")
    c.scopes.emit("fence_async_shared()")


def sum_beside(of: Shared, outer: Context, s: ir.Reduce) -> str:
    """Code of a sum, before the loop, over columns that are no stream: a value a row, where rows lie in registers."""
    (columns,) = s.rdims
    c = of.context((of.r.row, columns))
    c.scopes.stack = [outer.scopes.stack[-1].nested()]
    c.scopes.used = outer.scopes.used
    c.dims = {d: replace(x, level=0) for d, x in outer.dims.items() if d != of.r.loop.dim}
    c.layout = c.scopes.fresh("beside")
    lanes = c.hold(columns).lanes
    across = min(lanes // AT_ONCE, THREADS)
    layout = f"[1, {AT_ONCE}], [{THREADS // across}, {across}], [{WARPS}, 1], [1, 0]"
    c.scopes.emit(f"{c.layout}: tl.constexpr = gl.BlockedLayout({layout})")
    c.buffers[s.buf], c.held[s.buf] = of.buffer(s.buf), (c.hold(of.r.row).lanes,)
    v = Reductions(c, Products(c, tf32=False)).masked(s).value
    if v.axes != c.matrix:
        raise BackendError(f"{c.kernel.name}: {s.buf} sums what does not vary over rows and columns")
    return f"gl.convert_layout(gl.sum({v.code}, 1), gl.SliceLayout(1, {outer.layout}))"
