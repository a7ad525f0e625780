"""Operands of products stored as the products read them.

`bf16(s) * v`, where nothing else reads s: s is stored in bf16, and the product reads plain tensors, which is what a
matrix library takes. A matrix unit rounds its operands so anyway.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Expr, Load, walk
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of

_SHORT = (DType.F16, DType.BF16)


def plain_operands(p: Program) -> Program:
    """The program in which float32 results that only products read, rounded to one type of 16 bits, have that type."""
    reads = Counter(n.tensor for c in p.body for n in walk(c.body) if isinstance(n, Load))
    rounded: dict[str, Counter[DType]] = {}
    for c in p.body:
        for x in _operands(c):
            match x:
                case Cast(Load(tensor, _), dtype) if dtype in _SHORT:
                    rounded.setdefault(tensor, Counter())[dtype] += 1
    stored: dict[str, DType] = {}
    for c in p.body:
        types = rounded.get(c.name, Counter[DType]())
        if c.name not in p.outputs and c.index_name is None and c.dtype is DType.F32 and len(types) == 1:
            ((dtype, n),) = types.items()
            if n == reads[c.name]:
                stored[c.name] = dtype

    def plain(x: Expr) -> Expr:
        match x:
            case Cast(Load(tensor, _) as ld, dtype) if stored.get(tensor) is dtype:
                return ld
        return x

    body = []
    for c in p.body:
        if c.name in stored:
            c = replace(c, dtype=stored[c.name])
        if _operands(c) and isinstance(c.body, Call):
            c = replace(c, body=replace(c.body, args=tuple(map(plain, c.body.args))))
        body.append(c)
    return replace(p, body=tuple(body)) if stored else p


def _operands(c: Compute) -> tuple[Expr, ...]:
    p = product_of(c)
    return () if p is None else (p.a, p.b)
