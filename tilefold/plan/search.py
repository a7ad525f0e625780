"""Block shapes and loop orders of a kernel: tilings around the default, priced; the cheapest first.

Which dims are spatial and which temporal is decided by legality and by the snapshot. The search settles one target
after the other (rows and columns of products, then streamed and contracted lengths; the area of other tiles), and then
which spatial dim runs innermost. Tilings that come to the same loops are priced once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilefold.block.interchange import interchanged, parallel
from tilefold.block.ir import Block, Loop
from tilefold.plan.cost import Cost, block_bytes, cost_of
from tilefold.plan.dataflow import Analysis
from tilefold.plan.hardware import Machine
from tilefold.tile.layout import UnitAxes, arrange
from tilefold.tile.sizes import Tiler, TileTargets

#: Targets that are tried: rows and columns of products, streamed and contracted lengths; elements of other tiles.
KEPT = (16, 32, 64, 128, 256)
STREAMED = (64, 128, 192, 384)
CONTRACTED = (128, 256, 512)
AREAS = (4096, 8192, 16384, 32768)
#: How much better than the default another tiling must look: predictions of tilings of a kernel are this close.
DOUBT = 1.04


@dataclass(frozen=True, slots=True)
class Shape:
    """A tiling of a block program and what it is predicted to cost. `order`: of its parallel loops, outermost first,
    where it is not the program's own."""

    tiles: tuple[tuple[str, int], ...]
    cost: Cost
    order: tuple[str, ...] = ()

    def __str__(self) -> str:
        tiles = " ".join(f"{d}:{n}" for d, n in self.tiles)
        return f"{tiles}, {self.order[-1]} innermost" if self.order else tiles


def shapes(
    block: Block, sizes: Mapping[str, int], machine: Machine, unit: UnitAxes | None = None, *, all_tiles: bool = True
) -> tuple[Shape, ...]:
    """Tilings, the cheapest first; without `all_tiles` only the default, which another one has to beat clearly."""
    axes = {i.name: len(i.shape) for i in block.inputs} | {r.name: len(r.dims) for r in block.results}
    units = {t: (unit or {}).get(t, n - 1 if n else None) for t, n in axes.items()}
    arranged = arrange(block, units)
    whole = block_bytes(arranged, sizes)
    analysis, tiler = Analysis(arranged, sizes), Tiler(arranged)
    found: dict[tuple[tuple[str, int], ...], Shape] = {}

    def price(targets: TileTargets) -> float:
        tiles = tiler.tiles(targets)
        key = tuple(tiles.items())
        if key not in found:
            found[key] = Shape(key, cost_of(analysis.dataflow(tiles, machine), whole, machine))
        return found[key].cost.seconds

    best = TileTargets()
    price(best)
    if all_tiles:
        for name, values in _PRODUCTS if tiler.multiplies else _OTHERS:
            best = min([best, *(replace(best, **{name: n}) for n in values)], key=price)
    usual = next(iter(found.values()))

    def doubted(s: Shape) -> float:
        return s.cost.seconds * (1.0 if s is usual else DOUBT)

    out = sorted(found.values(), key=doubted)
    for order in _orders(block, sizes, dict(out[0].tiles)) if all_tiles else ():
        turned = Analysis(arrange(interchanged(block, order), units), sizes)
        cost = cost_of(turned.dataflow(dict(out[0].tiles), machine), whole, machine)
        if cost.seconds * DOUBT < doubted(out[0]):
            out.insert(0, Shape(out[0].tiles, cost, order))
    return tuple(out)


def _orders(block: Block, sizes: Mapping[str, int], tiles: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Other orders of the parallel loops: each dim of several blocks innermost, the rest as it is."""
    dims = parallel(block)
    several = [d for d in dims if sizes[d] > tiles.get(d, 1)]
    return [(*(x for x in dims if x != d), d) for d in several[:-1]]


#: The targets in the order in which they are settled, one at a time.
_PRODUCTS = (("kept", KEPT), ("streamed", STREAMED), ("contracted", CONTRACTED), ("kept", KEPT))
_OTHERS = (("area", AREAS),)


def spatial(block: Block) -> tuple[str, ...]:
    """Dims of the grid, outermost first."""
    dims = []
    nodes = block.body
    while len(nodes) == 1 and isinstance(nodes[0], Loop) and nodes[0].kind == "forall":
        dims.append(nodes[0].dim)
        nodes = nodes[0].body
    return tuple(dims)
