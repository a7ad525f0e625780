"""Reductions that were split for the sake of others (law split, `tensor.reduction_laws`) and share their kernel with
none of them: one again.

    y[j] = sum(i) y_in[j, i];  y_in[j, i] = sum(k) x[i, k, j]    to    y[j] = sum(i, k) x[i, k, j]
    y[j] = sum(i) y_in[j, i] c    to    y[j] = c sum(i, k) x[i, k, j],    c a number (means of rows, added up)

A kernel of both sums holds what the inner one reads for all of the outer axes: of 64 images of 4,096 places, whose sums
a channel are the gradient of a bias, a thread block has all that a channel has. One sum streams, and is cut into
segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilefold.algebra.expr import Call, Const, Expr, Index, Load, Size, substitute
from tilefold.algebra.ops import VALUE_REDUCERS
from tilefold.block.group import Group, Limits
from tilefold.block.legal import one_kernel
from tilefold.block.stages import inline_maps
from tilefold.names import fresh
from tilefold.tensor.analysis import Graph, is_static
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.reduction_laws import as_memory_lies


def whole_sums(p: Program, groups: Sequence[Group], limits: Limits) -> tuple[Program, list[Group]]:
    """The program, and its groups, with such pairs joined; both as they are where there is none."""
    g, made = Graph.of(p), list(groups)
    for n, x in enumerate(groups):
        pair = _pair(g, x)
        if pair is None:
            continue
        inner, outer, between = pair
        rdims = (*outer.rdims, *inner.rdims)
        if isinstance(outer.body, Load):
            instead, renamed = [replace(outer, rdims=rdims, body=inner.body)], dict[str, str]()
        else:
            total = replace(
                inner, name=fresh(f"{outer.name}_whole", set(g.program.names)), dims=outer.dims, rdims=rdims
            )
            of: dict[Expr, Expr] = {
                Load(inner.name, tuple(map(Index, inner.dims))): Load(total.name, tuple(map(Index, outer.dims)))
            }
            scaled = replace(outer, reducer=None, rdims=(), body=substitute(outer.body, of))
            instead, renamed = [total, scaled], {inner.name: total.name}
        gone = {inner.name, *between}
        body = tuple(
            s for c in g.program.body if c.name not in gone for s in (instead if c.name == outer.name else [c])
        )
        joined = Graph.of(as_memory_lies(replace(g.program, body=body)))
        members = (renamed.get(m, m) for m in x.members if m not in gone or m in renamed)
        group = one_kernel(joined, tuple(members), limits)
        if isinstance(group, Group):
            g, made[n] = joined, group
    return g.program, made


def _pair(g: Graph, x: Group) -> tuple[Compute, Compute, tuple[str, ...]] | None:
    """The inner and the outer reduction of a group that has no others, of which the outer has what the inner makes, in
    no other form, and alone; and a map between them, which the outer has in itself."""
    sums = [g.by_name[m] for m in x.members if g.by_name[m].reducer is not None]
    if len(sums) != 2:
        return None
    inner, outer = sums
    between = tuple(m for m in g.consumers[inner.name] if m != outer.name)
    if any(g.by_name[m].reducer or m not in x.members or g.escapes(m, (m, outer.name)) for m in between):
        return None
    outer = replace(outer, body=inline_maps(g, outer.body, lambda m: m in between))
    same = _scaled(g, outer, Load(inner.name, tuple(map(Index, inner.dims)))) and inner.reducer == outer.reducer
    alone = not g.escapes(inner.name, (inner.name, *between, outer.name))
    split = set(inner.dims) == {*outer.dims, *outer.rdims} and inner.dtype is outer.dtype.compute
    return (inner, outer, between) if same and alone and split and outer.reducer in VALUE_REDUCERS else None


def _scaled(g: Graph, outer: Compute, inner: Load) -> bool:
    """Whether a reduction is of just these elements, or a sum of them times a number; of axes that have any index."""
    match outer.body:
        case Call("mul", (a, Const() as c)) | Call("mul", (Const() as c, a)) | Call("div", (a, Const() as c)):
            finite = math.isfinite(c.value) and c.value != 0
        case Call("div", (a, Size(d))):
            finite = is_static(g.program.sizes[d]) and g.extent(d) > 0
        case _:
            return outer.body == inner
    return a == inner and outer.reducer == "sum" and finite and outer.dtype.is_float
