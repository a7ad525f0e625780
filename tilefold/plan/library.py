"""Which contractions are left to the machine's matrix library.

A plain matrix product gains nothing from generated code that the library does not have;
fused into a neighbour it saves the traffic of its result but runs at the generated code's
rate. Both sides are charged with the rates of `plan.hardware`.
"""

from __future__ import annotations

from tilefold.algebra.expr import Call, Index, Load
from tilefold.plan.hardware import Machine
from tilefold.tensor.analysis import Graph, out_dims
from tilefold.tensor.ir import Compute, Program


def is_library_product(c: Compute) -> bool:
    """sum of the product of two plain loads, each axis a different dim: a (batched) matmul."""
    if c.reducer != "sum" or not isinstance(c.body, Call) or c.body.op != "mul" or not c.dtype.is_float:
        return False
    a, b = c.body.args
    if not (isinstance(a, Load) and isinstance(b, Load)):
        return False
    dims = [tuple(ix.dim if isinstance(ix, Index) else None for ix in ld.index) for ld in (a, b)]
    if any(None in d or len(set(d)) != len(d) for d in dims):
        return False
    da, db = (set(d) for d in dims)
    return set(c.rdims) <= da & db and da | db == set(c.dims) | set(c.rdims)


def library_products(p: Program, machine: Machine) -> frozenset[str]:
    """Products that are faster as library calls than inside any fused kernel."""
    g = Graph.of(p)
    return frozenset(c.name for c in p.body if is_library_product(c) and _library_wins(g, c, machine))


def _library_wins(g: Graph, c: Compute, machine: Machine) -> bool:
    loads = [ld for ld in getattr(c.body, "args", ()) if isinstance(ld, Load)]
    if len({frozenset(ld.index) for ld in loads}) == 1:
        return False  # dot products of rows: nothing is used twice, so memory is all that counts
    operands = [ld.tensor for ld in loads]
    dtype = g.program.dtype_of(operands[0])
    flops = 2 * g.points((*out_dims(c), *c.rdims))
    # in memory only for the library's sake: the result, and operands that nothing else reads
    moved = g.points(c.dims) * c.dtype.nbytes
    for r in g.producers[c.name]:
        p = g.by_name[r]
        if g.consumers[r] == (c.name,) and not g.escapes(r, (r, c.name)):
            moved += g.points(p.dims) * p.dtype.nbytes
    library = flops / machine.gemm_rate(dtype, library=True) + 2 * moved / machine.bandwidth + machine.launch
    return library < flops / machine.gemm_rate(dtype, library=False)
