"""Maps that a result of the program has the values of, with more done to each, are computed for that result alone.

Law: with r[i] = f(m[i]) a result, what reads m[j] as f(m[j]) alone reads r[j].

A convolution's bias is added by whoever reads its result (`tensor.inline`): by the kernel that stores the sum for a
backward pass, and by one that sums what an activation makes of it. Written out (`tensor.windows`) the first would
store the convolution for both, and read it again.

Side condition: f rounds to the type of r, as storing it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tilefold.algebra.expr import Cast, Expr, Index, Load, loads, substitute, tensors_read
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.rewrite import drop_dead, in_order, rename_loads, substitute_map


def read_as_stored(p: Program, names: Iterable[str]) -> Program:
    """The program with those of these maps put into the result that has them, from which others read."""
    for name in names:
        p = _as_stored(p, name)
    return p


def _as_stored(p: Program, name: str) -> Program:
    m = next(c for c in p.body if c.name == name)
    readers = [c for c in p.body if name in tensors_read(c.body)]
    if name in p.outputs or m.reducer is not None or len(readers) < 2:
        return p
    for r in readers:
        at = _places(m, r) if r.name in p.outputs and r.reducer is None else None
        if at is None:
            continue
        others = {c.name: c for x in readers if x is not r and (c := _reading(x, m, r, at)) is not None}
        if len(others) < len(readers) - 1:
            continue
        whole = replace(r, body=rename_loads(r.body, lambda ld: substitute_map(m, ld) if ld.tensor == name else None))
        body = [whole if c is r else others.get(c.name, c) for c in p.body]
        return drop_dead(in_order(replace(p, body=tuple(body))))
    return p


def _places(m: Compute, r: Compute) -> list[int] | None:
    """The axes of m by the dims of r, where each element of r is made of one of m, at its own place, and of m's type or
    rounded; None where that is not so."""
    read = {ld for ld in loads(r.body) if ld.tensor == m.name}
    rounded = isinstance(r.body, Cast) and r.body.dtype is r.dtype
    if len(read) != 1 or not rounded:
        return None
    index = read.pop().index
    if sorted(map(repr, index)) != sorted(repr(Index(d)) for d in r.dims):
        return None
    return [index.index(Index(d)) for d in r.dims]


def _reading(x: Compute, m: Compute, r: Compute, at: list[int]) -> Compute | None:
    """A statement that reads m as one that reads r; None where it reads m otherwise."""
    stored: dict[Expr, Expr] = {}
    for ld in (ld for ld in loads(x.body) if ld.tensor == m.name):
        index = tuple(ld.index[n] for n in at)
        there = substitute(r.body, {Index(d): i for d, i in zip(r.dims, index, strict=True)})
        stored[there] = Load(r.name, index)
    made = replace(x, body=substitute(x.body, stored))
    return None if m.name in tensors_read(made.body) else made
