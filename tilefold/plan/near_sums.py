"""Reductions over few elements that neighbours have in common, on a GPU: written out, a thread has all of each place.

    held       lanes along what is reduced, padded to powers of two, and an exchange between threads at the end
    written    f(0) + f(1) + .., lanes along the places alone: what is read lies in registers, once

Windows that slide over an image (5 x 5 elements are 64 lanes), and pairs of the few members of a row (16 x 16 pairs
of 16 elements, each of which would go to 16 other threads). Products of matrices and convolutions are not looked at,
nor what has its neighbours in memory along what is reduced.

Microseconds on an H100, held, and forecast for held and written: the mean and variance of 5 x 5 pixels 131, 158, 63
(Inductor's, which writes them out, 94), differences of 16 members of an ensemble, in pairs, 68 with what is around
them, 39, 32 (35); written out, these were measured to take 31.5.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import COMBINE
from tilefold.algebra.expr import Call, Cast, Expr, Index, Load, children, dims_used, loads, type_of
from tilefold.block.stages import inline_reads
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph, expr_flops, is_static
from tilefold.tensor.convolution import is_windowed
from tilefold.tensor.index_simplify import is_integer, poly
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import matrices
from tilefold.tensor.windows import windows_written_out

#: Terms that are written out, and their arithmetic, for their code; places of a multiprocessor: each thread has one.
MOST, ADDS, PLACES = 256, 2048, 512
#: Places side by side in memory: a warp's.
ALONG = 32


def near_sums_written_out(p: Program, machine: Gpu) -> Program:
    """The program with those reductions as maps."""
    g = Graph.of(p)
    found = {c.name: e for c in p.body if (e := _near(g, c, machine)) is not None}
    if not found:
        return p
    body = tuple(replace(c, body=found[c.name]) if c.name in found else c for c in p.body)
    return windows_written_out(replace(p, body=body), frozenset(found))


def _near(g: Graph, c: Compute, machine: Gpu) -> Expr | None:
    """What a reduction is of, with its padding, where it is such a one."""
    sizes = g.program.sizes
    if c.reducer not in COMBINE or c.index_name is not None or not c.rdims or is_windowed(c):
        return None
    if not all(is_static(sizes[d]) for d in (*c.dims, *c.rdims)) or matrices(c, g.extent) is not None:
        return None
    taps = g.points(c.rdims)
    if not 1 < taps <= MOST or g.points(c.dims) < PLACES * machine.cores:
        return None
    over = frozenset(c.rdims)
    e = inline_reads(g, c.body, lambda ld: _pads(g, ld) and not dims_used(ld).isdisjoint(over))
    near = [ld for ld in loads(e) if not dims_used(ld).isdisjoint(over)]
    elements = sum(g.points(dims_used(ld) & over) for ld in near)
    long = {d for d in c.dims if g.extent(d) >= ALONG}
    if not near or elements > machine.window or taps * expr_flops(e) > ADDS:
        return None
    if type_of(e, g.program.dtype_of) is DType.BOOL:  # sums of them count, in integers
        return None
    if not all(all(map(is_integer, ld.index)) and dims_used(ld.index[-1]) & long for ld in near):
        return None
    shared = 2 * elements <= taps * len(near)
    return e if shared or all(_slides(g, ld, c) for ld in near) else None


def _pads(g: Graph, ld: Load) -> bool:
    """Whether what is read is a map that chooses between elements and numbers, by its dims alone."""
    m = g.by_name.get(ld.tensor)
    return m is not None and m.reducer is None and _chooses(m.body)


def _chooses(e: Expr) -> bool:
    match e:
        case Load(_, index):
            return all(map(is_integer, index))
        case Cast(arg, dtype):
            return not dtype.rounds and _chooses(arg)
        case Call("where", (condition, a, b)):
            return not loads(condition) and _chooses(a) and _chooses(b)
    return not children(e)


def _slides(g: Graph, ld: Load, c: Compute) -> bool:
    """Whether places next to each other read some of the same elements: k + m, of more m than a step of k."""
    for e in ld.index:
        steps = {
            mono[0].dim: n
            for mono, n in poly(e, g.program.sizes).items()
            if len(mono) == 1 and isinstance(mono[0], Index)
        }
        of = [abs(steps[d]) for d in c.dims if d in steps]
        if of and any(min(of) < abs(steps[d]) * g.extent(d) for d in c.rdims if d in steps):
            return True
    return False
