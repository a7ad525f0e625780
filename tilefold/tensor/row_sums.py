"""Sums of scores over everything, by rows first.

Law: sum over i, k, l of f  is  sum over i, k of (sum over l of f);
     sum over k, l of (sum over i of f) h  is  sum over i, k, l of f h, where h has no i

The gradient of a slope that a head has (`s + slope * (j - i)`) is a sum over a batch, queries and keys of scores'
gradients. Those are products of two matrices, which no kernel holds whole: as one sum they were written to memory and
read again, by a kernel of their own. The sum over the dim that another product contracts them along (keys, of the
queries' gradient) is one more number a row of that product's kernel; what is left is small.

Side conditions: float32 sums; f reads a map of a product over both dims, at plain indices, and a product contracts a
map of the same along one of them alone; the sum has no dims but those of that map. Rounding: sums of sums, whose error
is smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Index, Load, loads
from tilefold.names import fresh
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.nested_sums import as_one
from tilefold.tensor.product import product_of


def sums_by_rows(p: Program) -> Program:
    """The program in which such sums are of rows first."""
    taken = set(p.names)
    for c in p.body:
        if c.reducer != "sum" or c.dtype is not DType.F32:
            continue
        whole, gone = as_one(p, c)
        found = _contracted(p, whole)
        if found is None or len(whole.rdims) == 1:
            continue
        along, order = found
        rest = tuple(d for d in whole.rdims if d != along)
        if not {*whole.dims, *rest} <= {*order}:
            continue  # what is multiplied has dims of its own: a projection, say, of what a fold makes
        dims = tuple(sorted((*whole.dims, *rest), key=lambda d: order.index(d) if d in order else -1))
        rows = replace(whole, name=fresh(f"{c.name}_rows", taken), dims=dims, rdims=(along,))
        total = replace(c, body=Load(rows.name, tuple(map(Index, dims))), rdims=rest)
        body = [x for x in p.body if x.name != gone]
        at = next(n for n, x in enumerate(body) if x.name == c.name)
        p = replace(p, body=(*body[:at], rows, total, *body[at + 1 :]))
    return p


def _contracted(p: Program, c: Compute) -> tuple[str, tuple[str, ...]] | None:
    """The dim of a sum along which fewest products contract what it sums, if any does, and all dims of that in order;
    None: it is no such sum."""
    by_name = {x.name: x for x in p.body}
    for ld in loads(c.body):
        y = by_name.get(ld.tensor)
        if y is None or y.reducer is not None or ld.index != tuple(map(Index, y.dims)):
            continue
        above = _maps(y, by_name)
        scores = [b for x in above for b in _read(x, by_name) if b.reducer == "sum" and product_of(b) is not None]
        crossed = [d for d in c.rdims if any(d in b.dims and {*b.dims} & {*c.rdims} - {d} for b in scores)]
        if not crossed:
            continue
        own = _made_of(y, p)
        family = {x.name for x in above} | own
        count = {
            d: sum(b.rdims == (d,) and any(r.tensor in family for r in loads(b.body)) for b in p.body)
            for d in crossed
            if any(b.rdims == (d,) and product_of(b) and any(r.tensor in own for r in loads(b.body)) for b in p.body)
        }
        if count:
            return min(count, key=lambda d: (count[d], -y.dims.index(d))), y.dims
    return None


def _maps(y: Compute, by_name: Mapping[str, Compute]) -> list[Compute]:
    """A map, and the maps that it reads, directly or by others."""
    found, todo = [y], [y]
    while todo:
        for x in _read(todo.pop(), by_name):
            if x.reducer is None and x not in found:
                found.append(x)
                todo.append(x)
    return found


def _made_of(y: Compute, p: Program) -> set[str]:
    """A map, and the maps that read it, directly or by others."""
    found = {y.name}
    for x in p.body:  # in order: what reads is behind what it reads
        if x.reducer is None and any(ld.tensor in found for ld in loads(x.body)):
            found.add(x.name)
    return found


def _read(x: Compute, by_name: Mapping[str, Compute]) -> Iterable[Compute]:
    return (by_name[ld.tensor] for ld in loads(x.body) if ld.tensor in by_name)
