"""The form that the laws work on: products of stored tensors, and maps only where something must be stored.

    sum of f(i, k) g(k, j)        ->   a[i, k] = f, b[k, j] = g, sum of a b     (factors sorted by their kept dims)
    a map that no product reads   ->   part of each reader that has all of its dims

A map stays a statement where it is an output, an operand of a product, smaller than what reads it
(a factor of each row), or made of several tensors for several readers (a residual sum): those are
what an epilogue or a small kernel stores.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, dims_used, loads, walk
from tilefold.names import fresh
from tilefold.tensor.inline import converted, too_long
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.laws.terms import factors, gemm, gemms, plain, product, transparent
from tilefold.tensor.narrow import narrow
from tilefold.tensor.repeated import drop_repeated
from tilefold.tensor.rewrite import dims_of, drop_dead, rename_loads, substitute_map
from tilefold.tensor.unify import unify


def normal(p: Program) -> Program:
    """The program in normal form; the meaning is the same."""
    p = drop_dead(drop_repeated(_isolate(_counted(narrow(p)))))
    p = drop_dead(drop_repeated(_absorb(_bare_operands(p))))
    return unify(p)


def _counted(p: Program) -> Program:
    """Sums of a constant over static dims as the constant that they are."""
    body = []
    for c in p.body:
        extents = [p.sizes[d] for d in c.rdims]
        if c.reducer == "sum" and isinstance(c.body, Const) and all(isinstance(e, Const) for e in extents):
            value = float(c.body.value) * prod(int(e.value) for e in extents if isinstance(e, Const))
            c = replace(c, reducer=None, rdims=(), body=Const(value, c.body.dtype))
        body.append(c)
    return replace(p, body=tuple(body))


def _isolate(p: Program) -> Program:
    """Composite operands of sums of products as maps of their own."""
    taken = {i.name for i in p.inputs} | {r for c in p.body for r in c.results} | set(p.sizes) | set(p.syms)
    body: list[Compute] = []
    known = p
    for c in p.body:
        for new in _operands(known, c, taken):
            body.append(new)
        known = replace(p, body=(*body, *p.body))
    return replace(p, body=tuple(body))


def _operands(p: Program, c: Compute, taken: set[str]) -> list[Compute]:
    """The statement, with maps for its operands in front where it is a product of composite ones."""
    if c.reducer != "sum" or not c.dtype.is_float or gemm(c) is not None:
        return [c]
    sides = _sides(p, c)
    if sides is None:
        return [c]
    made: list[Compute] = []
    operands: list[Expr] = []
    for n, side in enumerate(sides):
        e = product(side)
        if not isinstance(e, Load):
            dims = tuple(d for d in (*c.dims, *c.rdims) if d in dims_used(e))
            dtype = _narrowest(p, side, c)
            name = fresh(f"{c.name}_{'ab'[n]}", taken)
            made.append(Compute(name, dims, dtype, e, loc=c.loc, origin=c.origin))
            e = Load(name, plain(dims))
        operands.append(e)
    whole = replace(c, body=Call("mul", (operands[0], operands[1])))
    return [*made, whole] if gemm(whole) is not None else [c]


def _narrowest(p: Program, side: list[Expr], c: Compute) -> DType:
    """The dtype an operand is stored in: that of the other tensors of the product."""
    found = [p.dtype_of(ld.tensor) for ld in loads(c.body) if p.dtype_of(ld.tensor).is_float]
    return min(found, key=lambda d: d.nbytes)


def _sides(p: Program, c: Compute) -> tuple[list[Expr], list[Expr]] | None:
    """Factors that keep the first dims and those that keep the others; None where one keeps both."""
    parts = factors(c.body, p.dtype_of)
    kept, over = set(c.dims), set(c.rdims)
    heavy = [f for f in parts if dims_used(f) & over]
    if len(heavy) < 2:
        return None
    common = kept.intersection(*(dims_used(f) for f in heavy))
    own = [dims_used(f) & kept - common for f in parts]
    first = next((o for f, o in zip(parts, own, strict=True) if o and f in heavy), None)
    if first is None:
        return None
    left = set(first)
    for o in own:  # factors that share a kept dim are on one side
        if o & left:
            left |= o
    a = [f for f, o in zip(parts, own, strict=True) if o & left]
    b = [f for f, o in zip(parts, own, strict=True) if not o & left]
    return (a, b) if a and b else None


def _bare_operands(p: Program) -> Program:
    """Products read through maps that only rename or narrow a tensor."""
    renamed: dict[str, Compute] = {}
    body: list[Compute] = []
    for c in p.body:
        if renamed and gemm(c) is not None:
            c = replace(c, body=rename_loads(c.body, lambda ld: _through(renamed, ld)))
        e = transparent(c.body, p.dtype_of)
        if c.reducer is None and isinstance(e, Load) and not c.dtype.rounds and p.dtype_of(e.tensor).is_float:
            renamed[c.name] = replace(c, body=e)
        body.append(c)
    return replace(p, body=tuple(body))


def _through(renamed: dict[str, Compute], ld: Load) -> Expr | None:
    m = renamed.get(ld.tensor)
    return substitute_map(m, ld) if m is not None else None


def _absorb(p: Program) -> Program:
    """Maps substituted into the readers that have all of their dims."""
    dtypes = {i.name: i.dtype for i in p.inputs}
    for c in p.body:
        dtypes.update({r: p.dtype_of(r) for r in c.results})
    operands = {ld.tensor for g in gemms(p).values() for ld in g.operands}
    kept = operands | _read_by_larger(p) | _shared_sums(p)
    maps: dict[str, Compute] = {}
    body: list[Compute] = []
    for c in p.body:
        if gemm(c) is None:
            c = _absorbed(c, maps, dtypes)
        body.append(c)
        if c.reducer is not None or c.name in p.outputs:
            continue
        if _copies(c.body) or not loads(c.body) or c.name not in kept:
            maps[c.name] = c
    return replace(p, body=tuple(body))


def _read_by_larger(p: Program) -> set[str]:
    """Tensors that some statement reads without having an index for each of its own dims in them."""
    return {ld.tensor for c in p.body for ld in loads(c.body) if _domain(c) - _follows(ld)}


def _shared_sums(p: Program) -> set[str]:
    """Maps of several tensors of their own size with several readers: one tensor is read then, not all of them."""
    readers = Counter(t for c in p.body for t in {ld.tensor for ld in loads(c.body)})
    return {
        c.name
        for c in p.body
        if c.reducer is None
        and readers[c.name] > 1
        and len({ld.tensor for ld in loads(c.body) if _follows(ld) >= set(c.dims)}) > 1
    }


def _domain(c: Compute) -> set[str]:
    """Dims over which a statement evaluates its body."""
    return set(dims_of(c)) if c.reducer != "topk" else set(c.dims[:-1]) | set(c.rdims)


def _copies(e: Expr) -> bool:
    while isinstance(e, Cast):
        e = e.arg
    return isinstance(e, Load)


def _absorbed(c: Compute, maps: dict[str, Compute], dtypes: dict[str, DType]) -> Compute:
    def one(ld: Load) -> Expr | None:
        m = maps.get(ld.tensor)
        if m is None or (_domain(c) - _follows(ld) and not _copies(m.body) and loads(m.body)):
            return None
        return converted(substitute_map(m, ld), m.dtype, dtypes)

    e = rename_loads(c.body, one)
    return c if too_long(e) else replace(c, body=e)


def _follows(ld: Load) -> set[str]:
    """Dims that change which element is read (a gathered axis counts those of its index)."""
    return {n.dim for i in ld.index for n in walk(i) if isinstance(n, Index)}
