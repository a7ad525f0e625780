"""Reductions over long axes in tiles: where a block does not hold what it reduces.

Law: a reduction over d is the fold of the reductions over tiles of d. It applies to a statement
that reduces loads of tensors (a buffer that has the dim would have to be held anyway). What is computed for it alone,
of tensors too, is computed tile by tile beside it: which keys are a row's, for all columns of a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import identity_of
from tilefold.algebra.expr import Const, dims_used, loads, tensors_read
from tilefold.tile import ir
from tilefold.tile.uses import every, expressions, written

#: Statements that write a value or read it, of one that is computed once for one.
MADE_AND_READ = 2


def stream(kernel: ir.Kernel, tiles: Mapping[str, int]) -> ir.Kernel:
    """`kernel` with reductions over the dims of `tiles` that no loop runs over put into loops of their own."""
    looped = {t.dim for t in kernel.grid}
    simple = [s for s in every(kernel.body) if not isinstance(s, ir.For)]
    uses = Counter(t for s in simple for t in {*(t for e in expressions([s]) for t in tensors_read(e)), *written([s])})
    return replace(kernel, body=_body(kernel.body, tiles, looped, {}, uses))


def _body(
    stmts: Sequence[ir.Stmt],
    tiles: Mapping[str, int],
    looped: set[str],
    buffers: dict[str, ir.Buffer],
    uses: Mapping[str, int],
) -> tuple[ir.Stmt, ...]:
    out: list[ir.Stmt] = []
    for s in stmts:
        match s:
            case ir.Alloc(b):
                buffers[b.name] = b
                out.append(s)
            case ir.For():
                out.append(replace(s, body=_body(s.body, tiles, looped | {s.dim}, buffers, uses)))
            case ir.Reduce(rdims=rdims) | ir.Gemm(rdims=rdims):
                d = next((d for d in rdims if d in tiles and d not in looped), None)
                beside = None if d is None else _beside(s, d, out, buffers, uses)
                if d is None or beside is None:
                    out.append(s)
                else:
                    out = [x for x in out if x not in beside]
                    out += _looped(s, d, tiles[d], buffers, beside)
            case _:
                out.append(s)
    return tuple(out)


def _beside(
    s: ir.Reduce | ir.Gemm,
    d: str,
    before: Sequence[ir.Stmt],
    buffers: Mapping[str, ir.Buffer],
    uses: Mapping[str, int],
) -> list[ir.Stmt] | None:
    """Statements before a reduction over d that compute buffers with d of tensors, for it alone; None where it reads
    others that have d."""
    read = {ld.tensor for e in expressions([s]) for ld in loads(e) if ld.tensor in buffers and d in dims_used(ld)}
    own = [x for x in before if isinstance(x, ir.Map) and x.buf in read and uses[x.buf] == MADE_AND_READ]
    if {x.buf for x in own} != read or any(buffers.keys() & tensors_read(x.expr) for x in own):
        return None
    return [x for x in before if x in own or (isinstance(x, ir.Alloc) and x.buffer.name in read)]


def _looped(
    s: ir.Reduce | ir.Gemm, d: str, tile: int, buffers: Mapping[str, ir.Buffer], beside: Sequence[ir.Stmt]
) -> list[ir.Stmt]:
    """The loop of a reduction, with what is computed beside it."""
    kind = buffers[s.buf].dtype
    op = s.op if isinstance(s, ir.Reduce) else "sum"
    loop = ir.For(d, tile, (*beside, replace(s, accumulate=True)))
    if s.accumulate:
        return [loop]
    none = identity_of(op, kind.compute.torch_dtype)
    held = DType.BOOL if kind is DType.BOOL else kind.compute
    return [ir.Fill(s.buf, Const(none, held)), loop]
