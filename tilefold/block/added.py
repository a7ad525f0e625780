"""The kernel that adds elements to the rows that their keys say (`tensor.keyed`), in any order, to zeros.

forall k, j:  y[key(k), j] += v(k, j),    or y[key(k), j] = maximum(y[key(k), j], v(k, j))
"""

from __future__ import annotations

from tilefold.algebra.expr import Expr, Index, tensors_read
from tilefold.block.build import in_parallel
from tilefold.block.fuse import polished
from tilefold.block.ir import Block, Result, Store
from tilefold.errors import PlanError
from tilefold.tensor.ir import Compute, Input, Program
from tilefold.tensor.keyed import keyed


def added_block(p: Program, c: Compute) -> Block:
    """The block program of a keyed sum. PlanError: it is none."""
    found = keyed(c, p.sizes)
    if found is None:
        raise PlanError(f"{c.name} is no sum by keys")
    index: tuple[Expr, ...] = tuple(found.keys.get(d, Index(d)) for d in c.dims)
    read = frozenset().union(*map(tensors_read, (found.value, *found.keys.values())))
    inputs = [i for i in p.inputs if i.name in read]
    inputs += [Input(r, p.dtype_of(r), p.shape_of(r)) for x in p.body for r in x.results if r in read]
    nest = in_parallel((Store(c.name, index, found.dims, found.value, added=c.reducer or ""),), found.dims)
    return polished(Block(c.name, p.syms, p.sizes, tuple(inputs), (Result(c.name, c.dims, c.dtype),), (c.name,), nest))
