"""What several reductions of a kernel read, read in front of the first of them.

A reduction whose lanes are several warps' has barriers, and no compiler moves a load over one: a kernel that combines
the parts of three sums, each of which needs the one before it, waits for memory three times, and so does one of sums
that need nothing of each other. With their loads in front of the first it waits once.

So does a recurrence that is written out, each state of which is summed: what the maps between its sums read is read in
front as well.

Only kernels without loops, whose reductions have all they run over, and only float32: what parts are. The loads stay
in registers until they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load, Size, dims_used, loads, transform
from tilefold.block.build import plain
from tilefold.names import fresh
from tilefold.tile.ir import Alloc, Buffer, Fill, For, Gemm, Kernel, Map, Reduce, Select, Stmt, Store
from tilefold.tile.uses import allocated


def reads_first(kernel: Kernel, lanes: Callable[[str], int], room: int) -> Kernel:
    """The kernel with such loads in front, the first ones until they take `room` elements. lanes: that a thread block
    holds of a dim."""
    body = kernel.body
    if any(isinstance(s, For | Gemm | Select) for s in body):
        return kernel
    at = [n for n, s in enumerate(body) if isinstance(s, Reduce)]
    reductions = [s for s in body if isinstance(s, Reduce)]
    if len(at) < 2:
        return kernel
    extents = {d: e for s in body if isinstance(s, Alloc) for d, e in zip(s.buffer.dims, s.buffer.extents, strict=True)}
    extents |= {d: Size(d) for s in reductions for d in s.rdims if d not in extents}
    given = {t.name for t in kernel.tensors if t.role == "in" and t.dtype is DType.F32}
    before = {ld for s in body[: at[0] + 1] for e in _exprs(s) for ld in loads(e)}
    taken = {*kernel.syms, *kernel.sizes, *(t.name for t in kernel.tensors), *allocated(body)}
    held: dict[Load, Buffer] = {}
    for s in (s for s in body[at[0] + 1 : at[-1] + 1] if isinstance(s, Map | Reduce)):
        for ld in loads(s.expr):
            dims = tuple(d for d in extents if d in dims_used(ld))
            size = 1
            for d in dims:
                size *= lanes(d)
            new = ld.tensor in given and ld not in before and ld not in held
            alone = set(dims) == set(dims_used(ld)) and not any(loads(ix) for ix in ld.index)
            reduced = isinstance(s, Reduce) and bool(set(dims) & set(s.rdims))
            stepped = isinstance(s, Map) and bool(dims) and all(isinstance(ix, Index | Const) for ix in ld.index)
            if new and alone and (reduced or stepped) and size <= room:
                room -= size
                name = fresh(f"{ld.tensor}_read", taken)
                held[ld] = Buffer(name, dims, tuple(extents[d] for d in dims), DType.F32)
    first: list[Stmt] = []
    for ld, b in held.items():
        first += [Alloc(b), Map(b.name, ld)]
    rest = tuple(_instead(s, held) for s in body[at[0] :])
    return replace(kernel, body=(*body[: at[0]], *first, *rest)) if held else kernel


def _exprs(s: Stmt) -> tuple[Expr, ...]:
    return (s.expr,) if isinstance(s, Map | Reduce | Store) else ()


def _instead(s: Stmt, held: Mapping[Load, Buffer]) -> Stmt:
    """The statement with what is held in place of the loads."""

    def one(e: Expr) -> Expr | None:
        return Load(held[e].name, plain(held[e].dims)) if isinstance(e, Load) and e in held else None

    match s:
        case Map() | Reduce() | Store():
            return replace(s, expr=transform(s.expr, one))
        case Alloc() | Fill():
            return s
    raise AssertionError(s)
