"""Scores that are read twice, computed once, where groups of warps own rows (`row_roles`).

A maximum and an exponential of the same short expression may each have it. Where that reads an element of rows and
stream (a bias), the element and the product would both be in registers from the one to the other; the sum is one.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, Index, Load, dims_used, loads, transform, walk
from tilefold.backends.triton.parts import about
from tilefold.tile import ir
from tilefold.tile.uses import allocated, expressions


def scored_once(kernel: ir.Kernel) -> ir.Kernel:
    """The kernel with buffers for what its loop reduces and reads again, of a tensor's rows and stream."""
    found = [s for s in kernel.body if isinstance(s, ir.For)]
    rows = [t.dim for t in kernel.grid if t.tile > 1]
    if len(found) != 1 or len(rows) != 1:
        return kernel
    (loop,) = found
    body = _once(kernel, loop, {rows[0], loop.dim})
    if body == loop.body:
        return kernel
    return replace(kernel, body=tuple(replace(s, body=body) if s is loop else s for s in kernel.body))


def _once(kernel: ir.Kernel, loop: ir.For, dims: set[str]) -> tuple[ir.Stmt, ...]:
    body, tensors = loop.body, {t.name for t in kernel.tensors}
    names = allocated((*kernel.body, *body)) | tensors
    products = {s.buf for s in body if isinstance(s, ir.Gemm)}
    like = [s.buffer for s in body if isinstance(s, ir.Alloc) and s.buffer.name in products]
    like = [b for b in like if dims <= set(b.dims) and b.dtype is DType.F32]
    for s in body:
        if not isinstance(s, ir.Reduce) or isinstance(s.expr, Load) or not like or not _reads(s.expr, dims, tensors):
            continue
        times = sum(x == s.expr for e in expressions(body) for x in walk(e))
        if times < 2 or any(x.tensor == about(s) for x in loads(s.expr)):
            continue
        name = next(n for k in range(len(names) + 1) if (n := f"score_{k}") not in names)
        names |= {name}
        made = replace(like[0], name=name)
        own, at = Load(name, tuple(Index(d) for d in made.dims)), body.index(s)
        rest = tuple(_reading(x, s.expr, own) for x in body)
        body = (*rest[:at], ir.Alloc(made), ir.Map(name, s.expr), *rest[at:])
    return body


def _reads(e: Expr, dims: set[str], tensors: set[str]) -> bool:
    return any(x.tensor in tensors and dims <= dims_used(x) for x in loads(e))


def _reading(s: ir.Stmt, e: Expr, own: Load) -> ir.Stmt:
    """A statement with a buffer in place of what it holds."""
    if not isinstance(s, ir.Map | ir.Reduce):
        return s
    return replace(s, expr=transform(s.expr, lambda x: own if x == e else None))
