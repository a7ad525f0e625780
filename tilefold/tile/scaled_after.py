"""Constant factors of what a loop adds up, applied once after the loop.

    sum[j] (k x_ij) y_je  =  k sum[j] x_ij y_je

The gradient of attention's scores is scaled for every query and key, the gradient of queries once a feature. Of
products in bf16, whose range is that of float32, both sides round alike; float16 keeps its factors, for x may be out
of its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, tensors_read
from tilefold.tile import ir
from tilefold.tile.uses import count_writes, expressions


def scaled_after(kernel: ir.Kernel) -> ir.Kernel:
    """`kernel` with factors of operands, of products that a loop of the body sums over, behind that loop."""
    body: list[ir.Stmt] = []
    for n, s in enumerate(kernel.body):
        found = _factors(kernel, s, kernel.body[:n]) if isinstance(s, ir.For) else {}
        if not isinstance(s, ir.For) or not found:
            body.append(s)
            continue
        body.append(replace(s, body=tuple(_without(x, found) for x in s.body)))
        for x in s.body:
            if isinstance(x, ir.Gemm) and (made := _made(x, found)) is not None:
                body.append(ir.Map(x.buf, Call("mul", (_whole(kernel, x.buf), Const(found[made], DType.F32)))))
    return replace(kernel, body=tuple(body))


def _factors(kernel: ir.Kernel, loop: ir.For, before: Sequence[ir.Stmt]) -> dict[str, float]:
    """Buffers of the loop that are a constant times something, and that products with bf16 alone read, into states that
    begin at 0 and to which nothing else is done."""
    narrow = {t.name for t in kernel.tensors if t.dtype is DType.BF16 and t.role == "in"}
    writes, everything = count_writes(kernel.body), count_writes(loop.body)
    zero = {s.buf for s in before if isinstance(s, ir.Fill) and s.value == Const(0.0, DType.F32)}
    found: dict[str, float] = {}
    for s in loop.body:
        k = _factor(s.expr) if isinstance(s, ir.Map) else None
        if k is None or not isinstance(s, ir.Map) or writes[s.buf] != 1:
            continue
        readers = [x for x in loop.body if any(s.buf in tensors_read(e) for e in expressions((x,)))]
        outside = any(s.buf in tensors_read(e) for e in expressions([x for x in kernel.body if x is not loop]))
        sums = [x for x in readers if isinstance(x, ir.Gemm) and _sums(x, loop, s.buf, narrow)]
        alone = all(everything[x.buf] == 1 and writes[x.buf] == 2 and x.buf in zero for x in sums)
        read = {t for e in expressions(loop.body) for t in tensors_read(e)}
        if sums and len(sums) == len(readers) and alone and not outside and not {x.buf for x in sums} & read:
            found[s.buf] = k
    return found


def _factor(e: Expr) -> float | None:
    match e:
        case Call("mul", (_, Const(k, DType.F32))) if 0.0 < abs(float(k)) < 1.0:
            return float(k)
    return None


def _sums(s: ir.Gemm, loop: ir.For, made: str, narrow: set[str]) -> bool:
    other = s.b if s.a.tensor == made else s.a
    return s.accumulate and s.rdims == (loop.dim,) and s.kept is None and other.tensor in narrow


def _made(s: ir.Gemm, found: dict[str, float]) -> str | None:
    return next((x.tensor for x in (s.a, s.b) if x.tensor in found), None)


def _without(s: ir.Stmt, found: dict[str, float]) -> ir.Stmt:
    if isinstance(s, ir.Map) and s.buf in found and isinstance(s.expr, Call):
        return ir.Map(s.buf, s.expr.args[0])
    return s


def _whole(kernel: ir.Kernel, name: str) -> Load:
    b = next(s.buffer for s in kernel.body if isinstance(s, ir.Alloc) and s.buffer.name == name)
    return Load(name, tuple(Index(d) for d in b.dims))
