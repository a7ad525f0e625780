"""Maps of which a few numbers are read by their places alone: a map for each.

Law: m[i, j] = f(i, j), read at j = 0, 1, .. only, is m_0[i] = f(i, 0), m_1[i] = f(i, 1), ..

Corners of boxes that are put together of centres and sizes, and then taken apart, are maps of a box: they share its
kernel with what is made of them, where a map of corners is read at other places than it was computed for, by another
kernel. Conditions that say which part a place is of are settled.

A reduction over such an axis of few numbers reads them by their places, too, once it is written out
(`tensor.windows`): the squares of a box's sides are added beside the product of them.

Side conditions: no other reader, no result of the program; no more places than `MOST`, or `SHORT` of a reduction.
Rounding: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load, dims_used, loads, substitute
from tilefold.algebra.ops import VALUE_REDUCERS
from tilefold.names import fresh
from tilefold.tensor.analysis import expr_flops
from tilefold.tensor.convolution import is_windowed
from tilefold.tensor.index_simplify import poly
from tilefold.tensor.inline import NEIGHBOURS
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.narrow import narrow
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import prune_dims, rename_loads
from tilefold.tensor.windows import written_out

#: Indices of the longest axis that is taken apart.
MOST = 8
#: Elements that the longest reduction has which is written out, for others read what it reads by its places.
SHORT = 4


def constant_parts(p: Program) -> Program:
    """The program in which such maps are taken apart; and what these read, where that is then of such places alone."""
    while (apart := _apart(_without_short_reductions(p))) is not p:
        p = narrow(apart)
    return p


def _without_short_reductions(p: Program) -> Program:
    """The program with reductions written out that run over axes of which other statements read places."""
    read = {
        (ld.tensor, n)
        for c in p.body
        for ld in loads(c.body)
        for n, e in enumerate(ld.index)
        if _place(p, e) is not None
    }
    short = [c for c in p.body if _is_short(p, c) and any(x in read for x in _axes(c))]
    if not short:
        return p
    taken = set(p.names)
    body = tuple(x for c in p.body for x in (written_out(p, c, taken) if c in short else [c]))
    return narrow(prune_dims(replace(p, body=body)))


def _is_short(p: Program, c: Compute) -> bool:
    """Whether a statement reduces few floats to one, and multiplies no matrices."""
    sizes = [p.sizes[d] for d in c.rdims]
    if c.reducer not in VALUE_REDUCERS or not c.dtype.is_float or is_windowed(c):
        return False
    product = product_of(c)
    elements = prod(int(e.value) if isinstance(e, Const) else SHORT + 1 for e in sizes)
    return 0 < elements <= SHORT and (product is None or not product.is_matrix())


def _axes(c: Compute) -> Iterator[tuple[str, int]]:
    """Tensors and axes that a reduction runs over."""
    for ld in loads(c.body):
        yield from ((ld.tensor, n) for n, e in enumerate(ld.index) if dims_used(e) & {*c.rdims})


def operands(p: Program) -> set[str]:
    """Tensors that windows and products of matrices read: they stay in memory as they are."""
    return {ld.tensor for c in p.body if is_windowed(c) or product_of(c) is not None for ld in loads(c.body)}


def _apart(p: Program) -> Program:
    read: dict[str, set[Load]] = {}
    stored, whole = operands(p), set(p.outputs)
    for c in p.body:
        found = loads(c.body)
        for ld in found:
            read.setdefault(ld.tensor, set()).add(ld)
    taken = set(p.names)
    axes: dict[str, int] = {}
    for c in p.body:
        at = _axis(p, c, read.get(c.name, set())) if c.reducer is None and c.name not in stored else None
        if at is None:
            continue
        if any(_place(p, ld.index[at]) is None for ld in read[c.name]):
            whole.add(c.name)
        if c.name not in whole or expr_flops(c.body) <= NEIGHBOURS:
            axes[c.name] = at
    if not axes:
        return p
    names: dict[tuple[str, int], str] = {}

    def one(ld: Load) -> Expr | None:
        n = axes.get(ld.tensor)
        place = None if n is None else _place(p, ld.index[n])
        if n is None or place is None:
            return None
        return Load(names[ld.tensor, place], (*ld.index[:n], *ld.index[n + 1 :]))

    body: list[Compute] = []
    for c in p.body:
        c = replace(c, body=rename_loads(c.body, one))
        if c.name in whole or c.name not in axes:
            body.append(c)
        if c.name not in axes:
            continue
        n = axes[c.name]
        for place in sorted({x for ld in read[c.name] if (x := _place(p, ld.index[n])) is not None}):
            names[c.name, place] = fresh(f"{c.name}_{place}", taken)
            part = substitute(c.body, {Index(c.dims[n]): Const(place, DType.I64)})
            body.append(replace(c, name=names[c.name, place], dims=(*c.dims[:n], *c.dims[n + 1 :]), body=part))
    return replace(p, body=tuple(body))


def _axis(p: Program, c: Compute, read: set[Load]) -> int | None:
    """The axis of a map that readers name places of: all of them, if there is one of that kind."""
    found: list[tuple[int, int]] = []
    for n, d in enumerate(c.dims if len(c.dims) > 1 and read else ()):
        size = p.sizes[d]
        places = [x for ld in read if (x := _place(p, ld.index[n])) is not None]
        extent = int(size.value) if isinstance(size, Const) else 0
        if 1 < extent <= MOST and places and all(0 <= x < extent for x in places):
            found.append((-len(places), n))
    return min(found)[1] if found else None


def _place(p: Program, e: Expr) -> int | None:
    """The number that an index is."""
    terms = poly(e, p.sizes)
    return int(terms.get((), 0)) if not terms.keys() - {()} else None
