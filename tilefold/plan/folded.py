"""Whether products are folded into one kernel of ours, with a reduction or with each other, or are the library's calls.

Both ways are estimated, with rates measured on an H100 and an H200 (`hardware.Gpu`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import dims_used, loads
from tilefold.plan.aligned import slowed
from tilefold.plan.beside import NOTHING, Beside
from tilefold.plan.hardware import Gpu
from tilefold.plan.library_rates import Sizes
from tilefold.tensor.analysis import Graph, out_dims
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import product_of


def folded_faster(
    g: Graph,
    products: Sequence[Compute],
    along: Collection[str],
    passed: float,
    machine: Gpu,
    beside: Beside = NOTHING,
    *,
    wide: bool = False,
) -> bool:
    """Whether products in one kernel that folds `along` dims, with a reduction or with each other, are estimated faster
    than the library's.

    That is a call more for each, and passes so many bytes more through memory than its own operands and results. A
    kernel of few thread blocks has no more than these read and multiply: the sum over columns of sigmoid(x w), x of 128
    rows and 24,576 columns, would be 32 that contract all of them. So has what it reads `beside`. wide: thread blocks
    hold so much that they run alone.
    """
    memory = machine.reached * machine.bandwidth
    pieces = _pieces(g, products[0], along, machine)
    busy, near = min(1.0, pieces / machine.cores), min(memory, pieces * machine.block_rate)
    folded, apart = beside.nbytes / near + beside.seconds, (passed + beside.nbytes) / memory
    rows = set.intersection(*(set(out_dims(c)) for c in products)) - set(along)
    columns = max(g.points(set(out_dims(c)) - rows - set(along)) for c in products)
    tile = machine.rows if machine.owned < columns < machine.wide else 2 * machine.rows  # warps share a wide state
    folded += machine.wide_start if wide else 0.0
    for c in products:
        operands = {ld.tensor for ld in loads(c.body)}
        read, made = g.nbytes(operands), g.nbytes([c.name])
        narrowest = min((g.program.dtype_of(t) for t in sorted(operands)), key=lambda dtype: dtype.nbytes)
        sides = (g.points(p.rows), g.points(p.cols)) if (p := product_of(c)) is not None else (1.0, 1.0)
        # probabilities are rounded to the type of values
        rate = min(machine.folded_rate(narrowest, *sides), machine.wide_rate if wide else math.inf)
        folded += max(flops(g, c.name) / (busy * rate), read / near, _read_again(g, c, rows, tile, machine))
        apart += max(flops(g, c.name) / call_rate(g, c, narrowest, machine), (read + made) / memory) + machine.call
    return folded < apart


def holds_much(g: Graph, first: Compute, second: Compute, machine: Gpu) -> bool:
    """Whether a row of what the first of two products reads, and of what the second makes, is a wide state: 832 columns
    from 416 into 256, 9 GFLOP in one kernel, took 126 us on an H100. Rows are what both have, the longer side."""
    p = product_of(second)
    both = {*out_dims(first)} & {*out_dims(second)} - ({*p.batch} if p is not None else set())
    held = {*out_dims(second)} - {*out_dims(first)}
    return g.points(both) > g.points(held) and g.points(held) + g.points(first.rdims) > machine.wide


def _read_again(g: Graph, c: Compute, rows: set[str], tile: int, machine: Gpu) -> float:
    """Seconds of the caches for the operand of a product that every tile of the kernel's rows reads whole: weights of
    832 x 416 and back, of 8,192 rows in tiles of 64, are 180 MB (a multilayer perceptron's two products in one kernel:
    125 us on an H100, 35 in two calls). A result of many columns leaves room for tiles of few rows."""
    read = 0.0
    for ld in loads(c.body):
        mine = {d for e in ld.index for d in dims_used(e)}
        read += g.nbytes([ld.tensor]) * (-(-g.points(rows - mine) // tile) if rows - mine else 0)
    return read / (machine.cache_reached * machine.last_cache.bandwidth)


def _pieces(g: Graph, c: Compute, along: Collection[str], machine: Gpu) -> int:
    """Thread blocks of a kernel that computes a product and folds along some of its dims: tiles of the others, and
    segments of these, or of what it contracts where these are short."""
    p = product_of(c)
    assert p is not None, c
    rows, cols = (p.cols, p.rows) if set(p.rows) & set(along) else (p.rows, p.cols)
    tiles = int(g.points(p.batch)) * -(-int(g.points(rows)) // machine.rows)
    if set(cols) & set(along):  # what is left of this side is held in no block
        tiles *= int(g.points(set(cols) - set(along)))
    cut = int(g.points(along)) // machine.least_segment or int(g.points(p.rdims)) // machine.least_step
    return tiles * max(1, min(cut, machine.most_segments))


def call_rate(g: Graph, c: Compute, dtype: DType, machine: Gpu) -> float:
    """FLOP/s of the library for a product."""
    p = product_of(c)
    assert p is not None, c
    batch, rows, cols, depth = (int(g.points(dims)) for dims in (p.batch, p.rows, p.cols, p.rdims))
    rate = machine.call_rate("bmm" if p.batch else "mm", dtype, Sizes(batch, rows, cols, depth))
    more = slowed(g.program, c, machine)
    return rate if not more else 1 / (1 / rate + more / flops(g, c.name))


def call_seconds(g: Graph, c: Compute, machine: Gpu) -> float:
    """Seconds of a product in a call of the library, with what is between calls."""
    read = {ld.tensor: g.points({d for e in ld.index for d in dims_used(e)}) for ld in loads(c.body)}
    kinds = {t: g.program.dtype_of(t) for t in read}
    narrowest = min(kinds.values(), key=lambda dtype: dtype.nbytes)
    moved = g.points(out_dims(c)) * c.dtype.nbytes + sum(n * kinds[t].nbytes for t, n in read.items())
    memory = moved / (machine.reached * machine.bandwidth)
    return machine.call + max(flops(g, c.name) / call_rate(g, c, narrowest, machine), memory)


def flops(g: Graph, m: str) -> float:
    c = g.by_name[m]
    return 2.0 * g.points({*out_dims(c), *c.rdims})
