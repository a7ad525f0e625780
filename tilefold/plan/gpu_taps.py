"""Maps that read windows, element by element, on a GPU: convolutions that are written out, gradients of pooling.

A kernel of such a map alone has neighbouring lanes read neighbours. One that also sums each channel over images and
places runs down columns, one that sums all of them (a loss) holds much of an image, and either computes far fewer
products a second (`Gpu.tap_rate`, `Gpu.summed_tap_rate`): 67 M windows of 7 of bf16 and a loss took 6.9 ms on an H100.

So does one that multiplies matrices. Its operand passes registers, in which a tile of all columns waits for it: 12,544
rows of 128 windows of 9, times 512 columns, took 2.2 ms on an H100 (255 registers a thread and 2,868 bytes spilled).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tilefold.algebra.expr import Load, dims_used, loads
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph, is_map
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import matrices
from tilefold.tensor.sliding import Sliding

#: Reads of one tensor that make a window.
LEAST = 4


def summed_of_channels(g: Graph, c: Compute) -> bool:
    """Whether a sum over several dims reads the statement or maps of it, and leaves one dim, or dims behind the first
    (channels that were shuffled are two): statistics of a batch."""
    return any(_of_channels(c.dims, summed) for summed in _summed(g, c))


def _summed(g: Graph, c: Compute) -> list[set[str]]:
    """Dims of the statement that sums of it, or of maps of it, are over, by what they read of each (a part of a causal
    convolution's places has a dim of its own)."""
    found: list[set[str]] = []
    at = {c.name: {d: {d} for d in c.dims}}
    for x in g.program.body:
        reads = [ld for ld in loads(x.body) if ld.tensor in at]
        if not reads or x.name in at:
            continue
        dims = {d: {e for ld in reads for e in _read_at(g.by_name[ld.tensor], at[ld.tensor][d], ld)} for d in c.dims}
        if x.reducer is not None:
            found.append({d for d in c.dims if not dims[d].isdisjoint(x.rdims)})
        elif is_map(x):
            at[x.name] = dims
    return found


def _read_at(m: Compute, dims: Collection[str], ld: Load) -> set[str]:
    """The dims of a statement that reads m there, where m has these."""
    return {e for d, i in zip(m.dims, ld.index, strict=True) if d in dims for e in dims_used(i)}


def _contracted(g: Graph, c: Compute, calls: Collection[str]) -> bool:
    """Whether a product of matrices that is no call has the statement, or maps of it, for an operand, and columns of
    its own beside it: a thread block would compute it again for them, or hold them together."""
    return any(
        x.name not in calls
        and set(x.rdims) & set(c.dims)
        and set(x.dims) - set(c.dims)
        and matrices(x, g.extent) is not None
        for x in g.reached(c.name, g.consumers, is_map)
    )


def _of_channels(dims: tuple[str, ...], summed: set[str]) -> bool:
    left = len(dims) - len(summed)
    return len(summed) >= 2 and (left == 1 or (left > 1 and dims[0] in summed))


def windows_under_sums(g: Graph, machine: Gpu, calls: Collection[str] = ()) -> frozenset[str]:
    """Maps of windows that had better be written by kernels of their own than computed where channels, or all of
    them, are summed, or where a product of matrices contracts them. calls: products of the library."""
    return frozenset(c.name for c in g.program.body if _apart(g, c, machine, calls))


def parts_pay(c: Compute, made: float, parts: float, window: Sliding, *, machine: Gpu) -> bool:
    """Whether a reduction over windows that slide takes longer than one of parts (`tensor.sliding`): it looks at fewer
    elements, and parts are written and read again."""
    inner, outer = window.taps
    whole, apart = made * window.count * window.others, parts * inner + made * outer
    return apart / machine.tap_rate + machine.copied(parts * c.dtype.compute.nbytes) < whole / machine.tap_rate


def _apart(g: Graph, c: Compute, machine: Gpu, calls: Collection[str]) -> bool:
    reads = Counter(ld.tensor for ld in set(loads(c.body))) if c.reducer is None else Counter[str]()
    products = g.points(c.dims) * sum(n for n in reads.values() if n >= LEAST)
    if not products:
        return False
    whole = len(c.dims) > 1 and set(c.dims) in _summed(g, c)
    if not (whole or summed_of_channels(g, c) or _contracted(g, c, calls)):
        return False
    return products / machine.tap_rate + machine.copied(g.nbytes([c.name])) < products / machine.summed_tap_rate
