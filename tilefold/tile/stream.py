"""Reductions over long axes in tiles: where a block does not hold what it reduces.

Law: a reduction over d is the fold of the reductions over tiles of d. It applies to a statement
that reduces loads of tensors (a buffer that has the dim would have to be held anyway).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import identity_of
from tilefold.algebra.expr import Const, dims_used, loads
from tilefold.tile import ir


def stream(kernel: ir.Kernel, tiles: Mapping[str, int]) -> ir.Kernel:
    """`kernel` with reductions over the dims of `tiles` that no loop runs over put into loops of their own."""
    looped = {t.dim for t in kernel.grid}
    return replace(kernel, body=_body(kernel.body, tiles, looped, {}))


def _body(
    stmts: Sequence[ir.Stmt], tiles: Mapping[str, int], looped: set[str], buffers: dict[str, ir.Buffer]
) -> tuple[ir.Stmt, ...]:
    out: list[ir.Stmt] = []
    for s in stmts:
        match s:
            case ir.Alloc(b):
                buffers[b.name] = b
                out.append(s)
            case ir.For():
                out.append(replace(s, body=_body(s.body, tiles, looped | {s.dim}, buffers)))
            case ir.Reduce(rdims=rdims) | ir.Gemm(rdims=rdims):
                d = next((d for d in rdims if d in tiles and d not in looped), None)
                out += [s] if d is None or not _streams(s, d, buffers) else _looped(s, d, tiles[d], buffers)
            case _:
                out.append(s)
    return tuple(out)


def _streams(s: ir.Reduce | ir.Gemm, d: str, buffers: Mapping[str, ir.Buffer]) -> bool:
    exprs = (s.expr,) if isinstance(s, ir.Reduce) else (s.a, s.b)
    read = [ld for e in exprs for ld in loads(e)]
    return not any(ld.tensor in buffers and d in dims_used(ld) for ld in read)


def _looped(s: ir.Reduce | ir.Gemm, d: str, tile: int, buffers: Mapping[str, ir.Buffer]) -> list[ir.Stmt]:
    kind = buffers[s.buf].dtype
    op = s.op if isinstance(s, ir.Reduce) else "sum"
    loop = ir.For(d, tile, (replace(s, accumulate=True),))
    if s.accumulate:
        return [loop]
    none = identity_of(op, kind.compute.torch_dtype)
    held = DType.BOOL if kind is DType.BOOL else kind.compute
    return [ir.Fill(s.buf, Const(none, held)), loop]
