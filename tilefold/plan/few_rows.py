"""Products of a few rows of float32 with a matrix: the last layers of an image network, of a batch of eight.

The library has no matrix unit for them and does not cut what they contract, unless it is long: few thread blocks then
read all of the matrix. Kernels of ours read it in segments (`gpu_forms.segments`), at the memory's rate.
"""

from __future__ import annotations

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Index, loads
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph, is_static
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import Product, product_of
from tilefold.tile.pieces import MATRIX_UNIT

#: Times as many elements as it keeps from which a sum is long, so that the library cuts it, but not of a batch: a
#: gradient of 3 x 128 weights over 262,144 rows 119 us on an H100; beside its bias's in a kernel of ours 2.1 ms.
LONG = 64


def of_few_rows(g: Graph, c: Compute, machine: Gpu) -> bool:
    """Whether c multiplies few rows of float32 with a matrix, in less time in segments than in the library's tiles."""
    p = product_of(c)
    if p is None or {g.program.dtype_of(ld.tensor) for ld in loads(c.body)} != {DType.F32}:
        return False
    if p.shared or not p.whole or not all(is_static(g.program.sizes[d]) for d in (*c.dims, *c.rdims)):
        return False
    if len(p.rdims) > 1 and not _one_axis(p):
        return False
    few, many = sorted((g.points(p.rows), g.points(p.cols)))
    batch, depth = g.points(p.batch), g.points(p.depth)
    if few > MATRIX_UNIT or few == many == 1 or depth < 2 * machine.least_step:
        return False
    if batch == 1 and depth > LONG * few * many:
        return False
    nbytes = g.nbytes({ld.tensor for ld in loads(c.body)}) + g.nbytes([c.name])
    memory = nbytes / (machine.reached * machine.bandwidth)
    library = max(memory, nbytes / (batch * -(-many // machine.few_tile) * machine.block_rate))
    blocks = min(machine.cores, batch * -(-many // machine.columns) * (depth // machine.least_step))
    padded = 2.0 * batch * MATRIX_UNIT * many * depth * machine.cores / blocks
    own = max(memory, nbytes / (blocks * machine.block_rate), padded / machine.gemm_rate(DType.F32, library=False))
    return own + machine.second_kernel < library


def _one_axis(p: Product) -> bool:
    """Whether both factors have what is summed side by side, in one order: launches make one axis of it."""
    orders = set()
    for ld in (*loads(p.a), *loads(p.b)):
        at = [n for n, ix in enumerate(ld.index) if isinstance(ix, Index) and ix.dim in p.rdims]
        if len(at) != len(p.rdims) or at[-1] - at[0] + 1 != len(at):
            return False
        orders.add(tuple(ld.index[n] for n in at))
    return len(orders) == 1


def feeding_products(g: Graph, machine: Gpu) -> frozenset[str]:
    """Those of them that another product sums over: in one kernel, its columns would be all of its blocks."""
    found = (c for c in g.program.body if of_few_rows(g, c, machine))
    return frozenset(
        c.name
        for c in found
        if any(product_of(x) is not None for x in g.reached(c.name, g.consumers, lambda m: m.reducer is None))
    )
