"""Operands of products stored as the products read them.

`bf16(s) * v`, where nothing reads s but rounded to bf16: s is stored in bf16, and the product reads plain tensors,
which is what a matrix library takes. A matrix unit rounds its operands so anyway. So are integers (`one_hot(t) @ w`):
a conversion rounds once, wherever it is done.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Expr, Load, transform, walk
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of

_SHORT = (DType.F16, DType.BF16)


def plain_operands(p: Program) -> Program:
    """The program in which results of float32 and maps of integers that products read, and that all their readers round
    to one type of 16 bits, have that type."""
    reads = Counter(n.tensor for c in p.body for n in walk(c.body) if isinstance(n, Load))
    operands = {x.tensor for c in p.body for x in _operands(c)}
    rounded: dict[str, Counter[DType]] = {}
    for c in p.body:
        for x in walk(c.body):
            match x:
                case Cast(Load(tensor, _), dtype) if tensor in operands and dtype in _SHORT:
                    rounded.setdefault(tensor, Counter())[dtype] += 1
    stored: dict[str, DType] = {}
    for c in p.body:
        types = rounded.get(c.name, Counter[DType]())
        wider = c.dtype is DType.F32 or (c.dtype is DType.I64 and c.reducer is None)
        if c.name not in p.outputs and c.index_name is None and wider and len(types) == 1:
            ((dtype, n),) = types.items()
            if n == reads[c.name]:
                stored[c.name] = dtype

    def plain(x: Expr) -> Expr | None:
        match x:
            case Cast(Load(tensor, _) as ld, dtype) if stored.get(tensor) is dtype:
                return ld
        return None

    def rounded_once(c: Compute) -> Expr:
        e = transform(c.body, plain)
        return Cast(e, stored[c.name]) if c.name in stored and c.dtype is DType.I64 else e

    body = [replace(c, dtype=stored.get(c.name, c.dtype), body=rounded_once(c)) for c in p.body]
    return replace(p, body=tuple(body)) if stored else p


def _operands(c: Compute) -> list[Load]:
    """What a product reads rounded, also through a guard (the padding of a convolution)."""
    p = product_of(c)
    found = [] if p is None else [x for side in (p.a, p.b) for x in walk(side)]
    return [x.arg for x in found if isinstance(x, Cast) and isinstance(x.arg, Load)]
