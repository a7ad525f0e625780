"""Kernels whose products multiply what they gather where it lies: keys in pages, read through a table.

For those who look at what is read, not to be run: products of the IR take no indirect loads.

    b[m, n] = k[table[m // P], m % P, n];  s[i, m] = gemm over n: q[i, n] * b[m, n]
    ->  s[i, m] = gemm over n: q[i, n] * k[table[m // P], m % P, n]

The buffer holds elements of a tensor as they are, and nothing but products reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilefold.algebra.expr import Expr, Index, Load, substitute, tensors_read
from tilefold.tile.ir import Alloc, For, Gemm, Kernel, Map, Stmt
from tilefold.tile.uses import count_writes, every, expressions


def gathered_in_products(kernel: Kernel) -> Kernel:
    """The same kernel without buffers of gathered elements that products alone read."""
    given = {t.name for t in kernel.tensors if t.role == "in"}
    writes, found = count_writes(kernel.body), dict[str, tuple[tuple[str, ...], Load]]()
    dims = {s.buffer.name: s.buffer.dims for s in every(kernel.body) if isinstance(s, Alloc)}
    for s in every(kernel.body):
        if isinstance(s, Map) and isinstance(s.expr, Load) and s.expr.tensor in given and writes[s.buf] == 1:
            found[s.buf] = (dims[s.buf], s.expr)
    for s in every(kernel.body):
        operands = (s.a, s.b) if isinstance(s, Gemm) else ()
        others = {t for e in expressions((s,)) if not isinstance(s, For) for t in tensors_read(e) if e not in operands}
        found = {n: x for n, x in found.items() if n not in others and writes[n] == 1}
        for x in operands:
            if x.tensor in found and not all(isinstance(e, Index) for e in x.index):
                del found[x.tensor]

    def read(x: Load) -> Load:
        if x.tensor not in found:
            return x
        own, of = found[x.tensor]
        table: dict[Expr, Expr] = {Index(d): e for d, e in zip(own, x.index, strict=True)}
        made = substitute(of, table)
        assert isinstance(made, Load)
        return made

    def body(stmts: Sequence[Stmt]) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in stmts:
            match s:
                case Alloc(buffer) if buffer.name in found:
                    pass
                case Map(buf) if buf in found:
                    pass
                case Gemm(a=a, b=b):
                    out.append(replace(s, a=read(a), b=read(b)))
                case For(body=inner):
                    out.append(replace(s, body=body(inner)))
                case _:
                    out.append(s)
        return tuple(out)

    return replace(kernel, body=body(kernel.body)) if found else kernel
