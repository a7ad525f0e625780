"""Which contractions are left to the machine's matrix library.

A plain matrix product gains nothing from generated code that the library does not have;
fused into a neighbour it saves the traffic of its result but runs at the generated code's
rate. Both sides are charged with the rates of `plan.hardware`.
"""

from __future__ import annotations

from tilefold.algebra.expr import loads
from tilefold.plan.hardware import Machine
from tilefold.tensor.analysis import Graph, out_dims
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import library_product, product_of


def library_products(p: Program, machine: Machine) -> frozenset[str]:
    """Products that are faster as library calls than inside any fused kernel."""
    g = Graph.of(p)
    return frozenset(c.name for c in p.body if library_product(c) is not None and _library_wins(g, c, machine))


def _library_wins(g: Graph, c: Compute, machine: Machine) -> bool:
    p = product_of(c)
    if p is None or p.left == p.right:
        return False  # dot products of rows: nothing is used twice, so memory is all that counts
    dtype = g.program.dtype_of(loads(p.a)[0].tensor)
    flops = 2 * g.points((*out_dims(c), *c.rdims))
    # in memory only for the library's sake: the result, and operands that nothing else reads
    moved = g.points(c.dims) * c.dtype.nbytes
    for r in g.producers[c.name]:
        before = g.by_name[r]
        if g.consumers[r] == (c.name,) and not g.escapes(r, (r, c.name)):
            moved += g.points(before.dims) * before.dtype.nbytes
    library = flops / machine.gemm_rate(dtype, library=True) + 2 * moved / machine.bandwidth + machine.launch
    return library < flops / machine.gemm_rate(dtype, library=False)
