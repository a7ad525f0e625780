"""What a fold on a GPU does beside the product that it reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tilefold.algebra.expr import tensors_read
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph, is_map
from tilefold.tensor.ir import Compute


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
