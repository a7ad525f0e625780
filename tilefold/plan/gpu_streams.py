"""Which products stream (`tensor.streams`): what they make is never in memory, and each kernel makes its own copy.

Both ways are estimated: what products and maps take longer in kernels that stream them than in calls of the library, or
once more in each, and the passes through memory that they save.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import dims_used, loads
from tilefold.plan.dataflow import GPU_UNITS, element_units
from tilefold.plan.folded import call_rate, flops
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph, is_map, out_dims
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import matrices, product_of
from tilefold.tensor.streams import LONG, of_few

#: Times that scores pass memory between products: written, read, written as weights, read.
PASSED = 4


def multiplies(g: Graph, c: Compute) -> bool:
    """Whether c is a product of matrices, heads that share operands (k // 4) included.

    In one of rows with rows, or of a matrix with a vector, each element of an operand is used once: memory is all that
    counts, and a kernel that also does what follows reads it once.
    """
    p = matrices(c, g.extent)
    return p is not None and bool(loads(p.a) and loads(p.b))


def of_one_side(c: Compute) -> frozenset[str]:
    """Rows and columns of a product."""
    p = product_of(c)
    return frozenset() if p is None else p.of_one_side


def streams_pay(g: Graph, c: Compute, machine: Gpu) -> bool:
    """Whether what a product makes should never be in memory: it, and the longest product that it ends in, take less
    longer in one kernel than passing scores and weights through memory does; or there is too much of it.

    Scores of float32, which no matrix unit takes unrounded, of heads of 64 columns take 28 ps each in kernels of ours,
    12 in the library's; of heads of 16 7, and 8. Of 16 bits they pay. What a layer of three outputs hands back
    to 256 features is little to multiply, but not the weight's gradient and the layer in front that it ends in: the
    sums that a kernel of ours made of it took most of 4.6 ms on an H100. Ends of axes of both of its sides have tiles
    of one of them (`_read_torn`). What is many times its operands, of 16 bits, would take memory by the square of a
    length (`_is_long`). Of products that the same maps read, what does not stream is read, and those maps of
    it computed, in every kernel (`_beside`).
    """
    if g.nbytes([c.name]) > machine.passed * machine.tiers[-1].capacity or of_few(g, c) or _is_long(g, c):
        return True
    saved = _saved(g, c, machine)
    return saved > 0 and saved > _beside(g, c, machine)


def _is_long(g: Graph, c: Compute) -> bool:
    """Whether a matrix unit makes what is `LONG` times its operands: scores of 2,048 keys of 64 columns."""
    operands = {ld.tensor for ld in loads(c.body)}
    elements = sum(g.nbytes([n]) // g.program.dtype_of(n).nbytes for n in operands)
    return _narrowest(g, c).nbytes <= 2 and g.points(c.dims) >= LONG * elements


def _ends(g: Graph, c: Compute) -> list[Compute]:
    """The products that a stream ends in."""
    return [x for x in g.reached(c.name, g.consumers, is_map) if x.reducer and multiplies(g, x)]


def _saved(g: Graph, c: Compute, machine: Gpu) -> float:
    """Seconds that a product saves which streams, of those that its elements pass memory."""
    ends, longer = _ends(g, c), _longer(g, c, machine)
    longer += max((_longer(g, x, machine) for x in ends), default=longer)
    keys = {frozenset(out_dims(x)) & frozenset(out_dims(c)): x for x in ends}  # a kernel each
    longer += sum(_arithmetic(g, c, x, machine) + _read_torn(g, c, x, key, machine) for key, x in keys.items())
    return PASSED * g.nbytes([c.name]) / (machine.reached * machine.bandwidth) - longer


def _beside(g: Graph, c: Compute, machine: Gpu) -> float:
    """Seconds of kernels beyond the first that a product streams into, for others as large whose elements the same maps
    read, and which do not stream.

    Scores with a soft cap, whose maps are too much arithmetic to be computed for three gradients, beside the gradients
    of their weights: two kernels in which these alone streamed took 222 us on an H100, where Inductor's calls and the
    pass between them take 75.
    """
    sides, seconds = of_one_side(c), 0.0
    keys = {frozenset(out_dims(x)) & frozenset(out_dims(c)): x for x in _ends(g, c)}
    for end in list(keys.values())[1:]:
        for x in g.reached(end.name, g.producers, is_map):
            large = x.reducer and x.name != c.name and sides <= {*out_dims(x)} and multiplies(g, x)
            if large and _saved(g, x, machine) <= 0:
                seconds += g.nbytes([x.name]) / (machine.reached * machine.bandwidth)
                seconds += _units(g, x, end) / machine.vector
    return seconds


def _read_torn(g: Graph, c: Compute, end: Compute, key: Collection[str], machine: Gpu) -> float:
    """Seconds of the caches for what a kernel reads that streams product c into another, which keeps the axes of `key`,
    where these are of both of c's sides: a thread block has a tile of the longest and one index of each other, and
    reads the operands of both products for it. Two gradients of a mean of outer products, 192 x 192 pairs of 32 x 32,
    of 128 summed rows, took 193 us each on an H100; the library makes what they stream in 37, and each of them in 33.
    """
    p = product_of(c)
    assert p is not None, c
    if min(g.points(set(key) & {*side}) for side in (p.rows, p.cols)) <= machine.packed:
        return 0.0  # of heads that share keys
    longest, read, made = max(sorted(key), key=g.extent), 0.0, {c.name} | g.below(c.name)
    for ld in dict.fromkeys(ld for x in (c, end) for ld in loads(x.body) if ld.tensor not in made):
        lacks = set(key) - dims_used(ld)
        tile = machine.rows if longest in lacks else 1
        read += g.nbytes([ld.tensor]) * math.ceil(g.points(lacks) / tile)
    return read / (machine.cache_reached * machine.last_cache.bandwidth)


def _arithmetic(g: Graph, c: Compute, end: Compute, machine: Gpu) -> float:
    """Seconds that the arithmetic of maps between a stream and a product that it ends in takes longer than both
    products, behind which it is hidden as long as it takes less. Elsewhere memory hides it. Logits of an additive
    margin, 1,024 x 17,982 of 192 numbers, whose gradient is some sixty operations of each, streamed into two products:
    374 and 256 us on an H100, where Inductor's three calls and the pass between them take 180."""
    multiplied = sum(flops(g, x.name) / machine.fused_rate(_narrowest(g, x)) for x in (c, end))
    return max(0.0, _units(g, c, end) / machine.vector - multiplied)


def _units(g: Graph, c: Compute, end: Compute) -> float:
    """Arithmetic of the maps between two products."""
    above = {x.name for x in g.reached(end.name, g.producers, is_map)}
    maps = {x.name: x for x in g.reached(c.name, g.consumers, is_map) if is_map(x) and x.name in above}
    return sum(g.points(x.dims) * element_units(x.body, GPU_UNITS) for x in maps.values())


def _narrowest(g: Graph, c: Compute) -> DType:
    """The narrowest type that a statement reads."""
    return min((g.program.dtype_of(ld.tensor) for ld in loads(c.body)), key=lambda dtype: dtype.nbytes)


def _longer(g: Graph, c: Compute, machine: Gpu) -> float:
    """Seconds that a product takes longer in a kernel that streams it than in a call of the library."""
    narrowest = _narrowest(g, c)
    return flops(g, c.name) * (1 / machine.fused_rate(narrowest) - 1 / call_rate(g, c, narrowest, machine))
