"""Powers of two leave the operands of matrix products.

Law: sum over k of (2^n a[i, k]) b[k, j]  =  2^n sum over k of a[i, k] b[k, j]

Rounding: none, but for what overflows or is lost below the least numbers. An operand that is scaled in float32 is a
tensor of its own, of float32, which no matrix unit takes as it is; what it is made of may have 16 bits, whose products
are exact there (squared distances, n[i] + n[j] - (2 x) y: 4096 x 4096 x 128 in 4.9 ms on an H100, in sums of float32,
where the library takes 0.1). The scale meets a sum where something else is computed of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, call, loads, substitute
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import drop_dead, rename_loads, substitute_map

#: Greatest exponents that leave an operand: a sum of what is not scaled is still far from the ends of float32.
MOST = 16


def powers_apart(p: Program) -> Program:
    """The program in which products read what was scaled by powers of two, and what reads their results has the scales.
    Not where a result of the program, or another product's operand, would be scaled in a kernel of its own; nor where
    the scaled tensor is needed otherwise."""
    readers: dict[str, list[Compute]] = {c.name: [] for c in p.body}
    for c in p.body:
        for t in {ld.tensor for ld in loads(c.body)} & readers.keys():
            readers[t].append(c)
    open_to = {
        c.name
        for c in p.body
        if _matrix(c) and c.name not in p.outputs and not any(map(_matrix, readers[c.name])) and readers[c.name]
    }
    scaled = {
        c.name: found
        for c in p.body
        if c.name not in p.outputs and all(x.name in open_to for x in readers[c.name])
        if (found := _scaled(c)) is not None and p.dtype_of(found[0].tensor).is_float
    }
    by_name, moved = {c.name: c for c in p.body}, dict[str, float]()
    body: list[Compute] = []
    for c in p.body:
        if c.name in open_to and (within := [ld for ld in loads(c.body) if ld.tensor in scaled]):
            moved[c.name] = math.prod(scaled[ld.tensor][1] for ld in within)
            plain: dict[Expr, Expr] = {ld: _unscaled(by_name[ld.tensor], ld, scaled) for ld in within}
            body.append(replace(c, body=substitute(c.body, plain)))
        elif any(ld.tensor in moved for ld in loads(c.body)):
            body.append(replace(c, body=rename_loads(c.body, lambda ld: _with_scale(ld, moved))))
        else:
            body.append(c)
    return drop_dead(replace(p, body=tuple(body))) if moved else p


def _matrix(c: Compute) -> bool:
    """Whether a statement is a product of two matrices as they are."""
    x = product_of(c)
    return x is not None and x.loads is not None and x.is_matrix()


def _scaled(c: Compute) -> tuple[Load, float] | None:
    """What a map of float32 scales by a power of two, which is not 1."""
    if c.reducer is not None or c.dtype is not DType.F32:
        return None
    match c.body:
        case Call("mul", (Load() as ld, Const(value=by))) | Call("mul", (Const(value=by), Load() as ld)):
            fraction, exponent = math.frexp(by)
            plain = all(isinstance(ix, Index) for ix in ld.index)
            return (ld, float(by)) if plain and abs(fraction) == 0.5 and 0 < abs(exponent - 1) <= MOST else None
    return None


def _unscaled(c: Compute, at: Load, scaled: Mapping[str, tuple[Load, float]]) -> Expr:
    return substitute_map(replace(c, body=scaled[c.name][0]), at)


def _with_scale(ld: Load, moved: Mapping[str, float]) -> Expr | None:
    return call("mul", ld, Const(moved[ld.tensor], DType.F32)) if ld.tensor in moved else None
