"""What a fold on a GPU does beside the product that it reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tilefold.algebra.expr import Call, Cast, Expr, Load, dims_used, loads, tensors_read
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph, expr_flops, is_map
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import product_of

#: Columns of a thread block that makes the rows which it multiplies, each of which makes them again.
COLUMNS = 128
#: A number's way from memory or to a sum, a product that is added to one, in units of an add.
MOVED, SUMMED = 1, 3


@dataclass(frozen=True, slots=True)
class Beside:
    """What a fold does beside its product. nbytes: read of other tensors. seconds: that orders (top-k) take longer of
    tiles than of whole rows, and functions that branch between products."""

    nbytes: float = 0.0
    seconds: float = 0.0


#: Of a fold of nothing but its product.
NOTHING = Beside()


def beside_of(g: Graph, c: Compute, folds: Sequence[Compute], machine: Gpu) -> Beside:
    """Of reductions of a product's result."""
    return Beside(_read_beside(g, c, folds), _ordering(g, folds, machine))


def made_beside(g: Graph, c: Compute, machine: Gpu) -> Beside:
    """Of a product of rows that a reduction makes (normalisation): the arithmetic of each element, for each block of
    columns, and sums of weights for each block of rows where what is multiplied has more than one term.

    (x - mean) r w + b is one product of x, two sums of weights, and a sum of columns that is repaired with every mean:
    patches of 384 normalised for 192 columns, 63 us on an H100; a pass over them and the library's product take 21.
    """
    p = product_of(c)
    assert p is not None, c
    over = {*c.rdims}
    made = [ld.tensor for ld in loads(c.body) if ld.tensor in g.by_name]
    above = {*made, *(x.name for m in made for x in g.reached(m, g.producers, lambda x: _of_rows(x, over)))}
    above = {m for m in above if _of_rows(g.by_name[m], over)}
    rows, cols = (p.rows, p.cols) if {*g.by_name[made[0]].dims} & {*p.rows} else (p.cols, p.rows)
    units = ceil(g.points(cols) / COLUMNS) * sum(
        g.points({*x.dims, *x.rdims}) * (expr_flops(x.body) + MOVED) for x in map(g.by_name.__getitem__, above)
    )
    more = sum(_terms(g, g.by_name[m].body, c.rdims) - 1 for m in made)
    sums = more * g.points({*p.batch, *cols, *c.rdims}) * ceil(g.points(rows) / machine.rows)
    return Beside(seconds=(units + SUMMED * sums) / machine.vector)


def _of_rows(x: Compute, over: set[str]) -> bool:
    """Whether something is computed of each element of rows, or reduced of these."""
    return over <= {*(x.rdims if x.reducer else x.dims)}


def _terms(g: Graph, e: Expr, along: Sequence[str]) -> int:
    """Products that a sum of e times something is, maps along these dims in place."""
    match e:
        case Call("add" | "sub", (a, b)):
            return _terms(g, a, along) + _terms(g, b, along)
        case Call("mul", (a, b)):
            return _terms(g, a, along) * _terms(g, b, along)
        case Call("div", (a, b)) if not {*along} & dims_used(b):
            return _terms(g, a, along)
        case Call("neg", (a,)) | Cast(arg=a):
            return _terms(g, a, along)
        case Load(tensor=t) if t in g.by_name and is_map(g.by_name[t]) and {*along} <= {*g.by_name[t].dims}:
            return _terms(g, g.by_name[t].body, along)
    return 1


def _read_beside(g: Graph, c: Compute, folds: Sequence[Compute]) -> float:
    """Bytes of other tensors that reductions of a product's result read with it (images, of which each channel's sum
    takes what a product makes of all of them)."""
    after = {x.name for x in g.reached(c.name, g.consumers, is_map)}
    above = {m.name for x in folds for m in g.reached(x.name, g.producers, is_map)}
    folded = {x.name for x in folds} | (after & above)
    read = {t for m in folded for t in tensors_read(g.by_name[m].body)}
    return g.nbytes(read - folded - {c.name})


def _ordering(g: Graph, folds: Sequence[Compute], machine: Gpu) -> float:
    """Seconds that finding the greatest elements takes longer tile by tile than in whole rows, as far as a block holds
    these: one after the other, each over all of a tile's row and of those that were found before."""

    def seconds(x: Compute, tile: float) -> float:
        return g.points(x.dims) * ceil(g.points(x.rdims) / tile) * machine.slot * (1 + tile / machine.slot_width)

    orders = [x for x in folds if x.reducer == "topk"]
    return sum(seconds(x, machine.one_tile) - seconds(x, min(g.points(x.rdims), machine.read_at_once)) for x in orders)
