"""Maps of which no more than the first places along an axis are read, and a few by their number.

Law: m[i, p] = f(i, p) for p < N, read at p < n and at numbers c, is m[i, l] = f(i, l) for l < n, and f(i, c) where it
is read there.

The gradient of a softmax over a row and a number behind it (attention sinks) reads the probabilities of the row, and
that of the number. A map that is longer than what reads it shares no dim with it, and so no kernel.

Side conditions: no result of the program; static extents. Rounding: none; what is read by its number is computed there
again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, Index, Load, loads, substitute
from tilefold.names import fresh
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.narrow import narrow
from tilefold.tensor.rewrite import rename_loads, substitute_map


def short_maps(p: Program) -> Program:
    """The program in which maps are as long as what reads them."""
    found, read = p, _read(p)
    for c in reversed(p.body):
        for axis in range(len(c.dims)) if c.reducer is None and c.name not in p.outputs else ():
            n = _length(found, c, axis, read[c.name])
            if n is not None:
                found = _shortened(found, next(x for x in found.body if x.name == c.name), axis, n)
                read = _read(found)
    return found if found is p else narrow(found)


def _read(p: Program) -> defaultdict[str, set[Load]]:
    """How each tensor is read."""
    found = defaultdict[str, set[Load]](set)
    for x in p.body:
        for ld in loads(x.body):
            found[ld.tensor].add(ld)
    return found


def _length(p: Program, c: Compute, axis: int, read: Collection[Load]) -> int | None:
    """The first so many places of a map's axis that are read, as it is; None where that is all of them, or is not
    known."""
    size, most = p.sizes[c.dims[axis]], 0
    for ld in read:
        match ld.index[axis]:
            case Index(e) if isinstance(n := p.sizes[e], Const):
                most = max(most, int(n.value))
            case Const():
                pass
            case _:
                return None
    return most if isinstance(size, Const) and 0 < most < int(size.value) else None


def _shortened(p: Program, c: Compute, axis: int, n: int) -> Program:
    """The program in which map c has n places along an axis, and is computed where one behind them is read."""
    d = fresh(c.dims[axis], {*p.names, *p.sizes, *p.syms, *(i.name for i in p.inputs)})
    dims = tuple(d if k == axis else x for k, x in enumerate(c.dims))

    def one(ld: Load) -> Expr | None:
        at = ld.index[axis] if ld.tensor == c.name else None
        if not isinstance(at, Const) or int(at.value) < n:
            return None
        e = substitute_map(c, ld)
        return e if c.dtype is c.dtype.compute else Cast(e, c.dtype)

    short = replace(c, dims=dims, body=substitute(c.body, {Index(c.dims[axis]): Index(d)}))
    body = (short if x.name == c.name else replace(x, body=rename_loads(x.body, one)) for x in p.body)
    return replace(p, body=tuple(body), sizes={**p.sizes, d: Const(n, DType.I64)})
