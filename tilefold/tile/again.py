"""Compute again what is cheap rather than keep it: exp(x - m) for a sum, and once more for the quotient.

Law: in a kernel without loops, a buffer that is written once, from tensors that are only read and from buffers that are
not written afterwards, may be replaced by its expression wherever it is read. A thread block that holds a long row in
narrow elements then keeps these alone, half of what their float32 values take.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from tilefold.algebra.expr import Call, Expr, Index, Load, transform, walk
from tilefold.tile import ir
from tilefold.tile.uses import expressions, written

#: Operations that take a fraction of what the functions take.
CHEAP = frozenset(
    {"add", "sub", "mul", "neg", "abs", "maximum", "minimum", "where", "lt", "le", "gt", "ge", "eq", "ne"}
)
#: Of others, at most so many are computed again for each element.
MOST_FUNCTIONS = 1


def recomputed(kernel: ir.Kernel, dims: Collection[str]) -> ir.Kernel:
    """`kernel` without the buffers over one of `dims` that are cheap to compute again; as it is where it has loops."""
    if any(isinstance(s, ir.For | ir.Gemm) for s in kernel.body):
        return kernel
    last = {b: n for n, s in enumerate(kernel.body) for b in written((s,))}
    buffers = {s.buffer.name: s.buffer for s in kernel.body if isinstance(s, ir.Alloc)}
    once = {b for b in buffers if sum(b in written((s,)) for s in kernel.body) == 1}
    reads = [x for e in expressions(kernel.body) for x in walk(e) if isinstance(x, Load) and x.tensor in buffers]
    aside = {x.tensor for x in reads if x.index != tuple(Index(d) for d in buffers[x.tensor].dims)}
    known: dict[str, Expr] = {}

    def put_in(e: Expr) -> Expr:
        return transform(e, lambda x: known.get(x.tensor) if isinstance(x, Load) else None)

    body: list[ir.Stmt] = []
    for n, s in enumerate(kernel.body):
        match s:
            case ir.Map(buf, e):
                new = ir.Map(buf, put_in(e))
                whole = buf in once and buf not in aside and not set(buffers[buf].dims).isdisjoint(dims)
                if whole and _cheap(new.expr, kernel, last, n):
                    known[buf] = new.expr
                else:
                    body.append(new)
            case ir.Reduce() | ir.Store():
                body.append(replace(s, expr=put_in(s.expr)))
            case ir.Select():
                body.append(replace(s, expr=put_in(s.expr), payload=put_in(s.payload)))
            case _:
                body.append(s)
    return replace(kernel, body=tuple(s for s in body if not (isinstance(s, ir.Alloc) and s.buffer.name in known)))


def _cheap(e: Expr, kernel: ir.Kernel, last: Mapping[str, int], at: int) -> bool:
    """Whether e has few functions, and nothing that it reads is written after statement `at`."""
    read_only = {t.name for t in kernel.tensors if t.role == "in"}
    loaded = {x.tensor for x in walk(e) if isinstance(x, Load)}
    settled = all(t in read_only or last.get(t, at) < at for t in loaded)
    return settled and sum(isinstance(x, Call) and x.op not in CHEAP for x in walk(e)) <= MOST_FUNCTIONS
