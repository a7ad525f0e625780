"""Products that contract little, with what follows them in one kernel: coordinates or a few features as rows, layers of
32 to 64 columns.

Their time is that of their result's way through memory, whoever multiplies. A call of the library writes it, a kernel
behind that reads it and writes what it makes of it; in one kernel it is written once.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilefold.algebra.expr import Call, Index, loads, walk
from tilefold.plan.hardware import Gpu
from tilefold.plan.library import bias_of
from tilefold.tensor.analysis import Graph, is_map, is_static
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import FEW, LONG, product_of

#: Functions whose large arguments are another branch.
BRANCHING = frozenset({"sin", "cos"})
#: How many times as long as memory takes a product may take in a kernel of ours.
DOUBT = 1.25


def of_short_rows(g: Graph, c: Compute, machine: Gpu) -> bool:
    """Whether c is a product of matrices that memory bounds even at the rate of a kernel of ours, and maps that follow
    it save its result's way to memory and back, or one of the two where something else needs it there."""
    p = product_of(c)
    if p is None or p.batch or p.shared or not p.whole or len(p.rdims) != 1:
        return False
    if not all(is_static(g.program.sizes[d]) for d in (*c.dims, *c.rdims)) or not g.points(c.dims):
        return False
    after = [m for m in g.reached(c.name, g.consumers, is_map) if is_map(m) and set(c.dims) <= set(m.dims)]
    if not after or not all(is_map(g.by_name[u]) for u in g.consumers[c.name]):
        return False
    if len(after) == 1 and bias_of(g.program, c, after[0].body) is not None:
        return False  # the library's call adds it
    operands = {ld.tensor for ld in loads(c.body)}
    memory = machine.reached * machine.bandwidth
    read, made = g.nbytes(operands), g.nbytes([c.name])
    flops = 2.0 * g.points({*c.dims, *c.rdims})
    narrowest = min((g.program.dtype_of(t) for t in sorted(operands)), key=lambda dtype: dtype.nbytes)
    multiplied = flops / machine.folded_rate(narrowest, g.points(p.rows), g.points(p.cols))
    bound = (read + made) / memory
    saved = made / memory * (1 if c.name in g.program.outputs else 2) - branching(g, after, machine)
    return multiplied <= bound and saved > max(machine.second_kernel, (DOUBT - 1) * bound)


def branching(g: Graph, maps: Iterable[Compute], machine: Gpu) -> float:
    """Seconds that functions which branch take in a kernel with products; in one of their own memory hides them."""
    found = (g.points(x.dims) * sum(isinstance(e, Call) and e.op in BRANCHING for e in walk(x.body)) for x in maps)
    return sum(found) / machine.branching_rate


def of_few_channels(g: Graph, c: Compute) -> bool:
    """Whether c multiplies by a matrix of a few channels (colours, coordinates), and other rows are many. What is
    summed is written out in a kernel of ours, where what is in front of it may be too; the library has no tiles so
    small: 3 x 3 times 3 x 1,048,576 of float32, channels last, took 107 us on an H100, whose memory takes 8."""
    p = product_of(c)
    if p is None or p.batch or p.shared or not p.whole or len(p.rdims) != 1:
        return False
    if not all(is_static(g.program.sizes[d]) for d in (*c.dims, *c.rdims)):
        return False
    many = max(g.points(p.rows), g.points(p.cols))
    return p.is_small(lambda d: g.points((d,))) and many > FEW


def of_few_sums(g: Graph, c: Compute) -> bool:
    """Whether c multiplies long rows by long rows, a few by a few of each batch (correlations of two speakers). In a
    kernel of ours each element is a sum over two rows, as it would be of one; the library runs along them with one
    tile, all but empty: on an H100 64 times 2 x 32,000 by 2 x 32,000 of float32 took some 115 us, which memory takes 11
    for. It stays by itself: what follows (a residual of the one row after a multiple of the other) is no sum of
    products whose differences all but cancel."""
    p = product_of(c)
    if p is None or p.left == p.right or p.shared or not p.whole or len(p.rdims) != 1 or p.loads is None:
        return False
    if not all(is_static(g.program.sizes[d]) for d in (*c.dims, *c.rdims)):
        return False
    few = 1 < max(g.points(p.rows), g.points(p.cols)) <= FEW and g.points(p.rdims) >= LONG
    return few and all(ld.index[-1] == Index(p.rdims[0]) for ld in p.loads)
