"""Elements that data pick out of rows which are reduced anyway, picked by the same pass.

Law: x[i, t[i]] = sum over j of (x[i, j] where j = t[i], else 0), for indices t that exist.

A loss reads its label's logit after the log-sum-exp of all logits is known. Read by itself, that one element keeps all
of x alive until then; as a sum it belongs to the kernel that has the row, after which nothing reads x: what is as large
(the gradient of the logits) is written over it (`runtime.reuse`). A comparison and an addition an element, beside their
load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilefold.algebra.expr import Expr, Index, Load, call, dims_used, lit, loads, substitute, transform
from tilefold.names import fresh
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute, Program


def picked_with_rows(p: Program) -> Program:
    """The program with picks as sums, of tensors that it makes, reduces along the picked axis, and writes something of
    the same shape and type from."""
    g = Graph.of(p)
    taken = set(p.names)
    body: list[Compute] = []
    for c in p.body:
        for ld, axis in _picks(g, c):
            made = _sum(g, c, ld, axis)
            if made is not None:
                made = replace(made, name=fresh(f"{ld.tensor}_picked", taken))
                body.append(made)
                rest = tuple(ix for k, ix in enumerate(ld.index) if k != axis)
                c = replace(c, body=_instead(c.body, ld, Load(made.name, rest)))
        body.append(c)
    return replace(p, body=tuple(body))


def _instead(e: Expr, old: Load, new: Load) -> Expr:
    return transform(e, lambda x: new if x == old else None)


def _picks(g: Graph, c: Compute) -> Iterator[tuple[Load, int]]:
    """Loads of c of a float tensor that the program makes, at plain indices but for one axis; which."""
    for ld in dict.fromkeys(loads(c.body)):
        x = g.by_name.get(ld.tensor)
        if x is None or ld.tensor in g.program.outputs or not x.dtype.is_float:
            continue
        chosen = [k for k, ix in enumerate(ld.index) if not isinstance(ix, Index)]
        rows = {d for k, ix in enumerate(ld.index) if k not in chosen for d in dims_used(ix)}
        if len(chosen) == 1 and len(rows) == len(ld.index) - 1:
            at = ld.index[chosen[0]]
            if any(loads(at)) and dims_used(at) <= rows:
                yield ld, chosen[0]


def _sum(g: Graph, c: Compute, ld: Load, axis: int) -> Compute | None:
    """The pick as a sum over the row; None where the row is not reduced, is read at another computed position, or
    nothing could be written over it."""
    x = g.by_name[ld.tensor]
    folded: tuple[str, ...] = ()
    for u in (g.by_name[n] for n in g.consumers[x.name]):
        for other in (o for o in loads(u.body) if o.tensor == ld.tensor and o != ld):
            dims = tuple(ix.dim for ix in other.index if isinstance(ix, Index))
            if len(set(dims)) != len(other.index):
                return None
            folded = dims if u.reducer is not None and u.rdims == (dims[axis],) else folded
    maps = [m for m in g.reached(x.name, g.consumers, lambda m: m.reducer is None) if m.reducer is None]
    if not folded or not any(m.dtype is x.dtype and g.points(m.dims) == g.points(x.dims) for m in maps):
        return None
    own = {ix: Index(d) for k, (ix, d) in enumerate(zip(ld.index, folded, strict=True)) if k != axis}
    row = Load(ld.tensor, tuple(map(Index, folded)))
    hit = call("eq", Index(folded[axis]), substitute(ld.index[axis], own))
    dims = tuple(d for k, d in enumerate(folded) if k != axis)
    return Compute(x.name, dims, x.dtype.compute, call("where", hit, row, lit(0.0)), "sum", (folded[axis],), loc=c.loc)
