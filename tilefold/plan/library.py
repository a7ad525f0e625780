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
    dtype = max((p.dtype for p in g.program.inputs), key=lambda d: d.is_float and d.nbytes)
    operands = [g.program.dtype_of(ld.tensor) for ld in c.body.args if isinstance(ld, Load)]  # type: ignore[union-attr]
    dtype = operands[0] if operands else dtype
    flops = 2 * g.points((*out_dims(c), *c.rdims))
    fused = flops / machine.gemm_rate(dtype, library=False)
    written_and_read = 2 * g.points(c.dims) * c.dtype.nbytes
    library = flops / machine.gemm_rate(dtype, library=True) + written_and_read / machine.bandwidth + machine.launch
    return library < fused
