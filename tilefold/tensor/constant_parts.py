"""Maps of which a few numbers are read by their places alone: a map for each.

Law: m[i, j] = f(i, j), read at j = 0, 1, .. only, is m_0[i] = f(i, 0), m_1[i] = f(i, 1), ..

Corners of boxes that are put together of centres and sizes, and then taken apart, are maps of a box: they share its
kernel with what is made of them, where a map of corners is read at other places than it was computed for, by another
kernel. Conditions that say which part a place is of are settled.

Side conditions: no other reader, no result of the program; no more places than `MOST`. Rounding: none.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load, loads, substitute
from tilefold.names import fresh
from tilefold.tensor.convolution import is_windowed
from tilefold.tensor.index_simplify import poly
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.narrow import narrow
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import rename_loads

#: Indices of the longest axis that is taken apart.
MOST = 8


def constant_parts(p: Program) -> Program:
    """The program in which such maps are taken apart; and what these read, where that is then of such places alone."""
    while (apart := _apart(p)) is not p:
        p = narrow(apart)
    return p


def _apart(p: Program) -> Program:
    read: dict[str, set[Load]] = {}
    whole = set(p.outputs)
    for c in p.body:
        found = loads(c.body)
        for ld in found:
            read.setdefault(ld.tensor, set()).add(ld)
        if is_windowed(c) or product_of(c) is not None:
            whole |= {ld.tensor for ld in found}
    taken = set(p.names)
    axes = {
        c.name: at
        for c in p.body
        if c.reducer is None and c.name not in whole and (at := _axis(p, c, read.get(c.name, set()))) is not None
    }
    if not axes:
        return p
    names: dict[tuple[str, int], str] = {}

    def one(ld: Load) -> Expr | None:
        if ld.tensor not in axes:
            return None
        n = axes[ld.tensor]
        return Load(names[ld.tensor, _place(p, ld.index[n]) or 0], (*ld.index[:n], *ld.index[n + 1 :]))

    body: list[Compute] = []
    for c in p.body:
        c = replace(c, body=rename_loads(c.body, one))
        if c.name not in axes:
            body.append(c)
            continue
        n = axes[c.name]
        for place in sorted({_place(p, ld.index[n]) or 0 for ld in read[c.name]}):
            names[c.name, place] = fresh(f"{c.name}_{place}", taken)
            part = substitute(c.body, {Index(c.dims[n]): Const(place, DType.I64)})
            body.append(replace(c, name=names[c.name, place], dims=(*c.dims[:n], *c.dims[n + 1 :]), body=part))
    return replace(p, body=tuple(body))


def _axis(p: Program, c: Compute, read: set[Load]) -> int | None:
    """The axis of a map that all its readers name places of."""
    for n, d in enumerate(c.dims if len(c.dims) > 1 and read else ()):
        size = p.sizes[d]
        places = [_place(p, ld.index[n]) for ld in read]
        extent = int(size.value) if isinstance(size, Const) else 0
        if 1 < extent <= MOST and all(x is not None and 0 <= x < extent for x in places):
            return n
    return None


def _place(p: Program, e: Expr) -> int | None:
    """The number that an index is."""
    terms = poly(e, p.sizes)
    return int(terms.get((), 0)) if not terms.keys() - {()} else None
