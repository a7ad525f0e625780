"""Reductions that were split for the sake of others (law split, `tensor.reduction_laws`) and share their kernel with
none of them: one again.

    y[j] = sum(i) y_in[j, i];  y_in[j, i] = sum(k) x[i, k, j]    to    y[j] = sum(i, k) x[i, k, j]

A kernel of both sums holds what the inner one reads for all of the outer axes: of 64 images of 4,096 places, whose sums
a channel are the gradient of a bias, a thread block has all that a channel has. One sum streams, and is cut into
segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilefold.algebra.expr import Index, Load
from tilefold.algebra.ops import VALUE_REDUCERS
from tilefold.block.group import Group, Limits
from tilefold.block.legal import one_kernel
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.reduction_laws import as_memory_lies


def whole_sums(p: Program, groups: Sequence[Group], limits: Limits) -> tuple[Program, list[Group]]:
    """The program, and its groups, with such pairs joined; both as they are where there is none."""
    g, made = Graph.of(p), list(groups)
    for n, x in enumerate(groups):
        pair = _pair(g, x)
        if pair is None:
            continue
        inner, outer = pair
        whole = replace(outer, rdims=(*outer.rdims, *inner.rdims), body=inner.body)
        body = tuple(whole if c is outer else c for c in g.program.body if c is not inner)
        joined = Graph.of(as_memory_lies(replace(g.program, body=body)))
        group = one_kernel(joined, tuple(m for m in x.members if m != inner.name), limits)
        if isinstance(group, Group):
            g, made[n] = joined, group
    return g.program, made


def _pair(g: Graph, x: Group) -> tuple[Compute, Compute] | None:
    """The inner and the outer reduction of a group that has no others, of which the outer has what the inner makes, in
    no other form, and alone."""
    sums = [g.by_name[m] for m in x.members if g.by_name[m].reducer is not None]
    if len(sums) != 2:
        return None
    inner, outer = sums
    plain = outer.body == Load(inner.name, tuple(map(Index, inner.dims))) and inner.reducer == outer.reducer
    alone = g.consumers[inner.name] == (outer.name,) and inner.name not in g.program.outputs
    split = set(inner.dims) == {*outer.dims, *outer.rdims} and inner.dtype is outer.dtype.compute
    return (inner, outer) if plain and alone and split and outer.reducer in VALUE_REDUCERS else None
