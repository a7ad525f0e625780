"""Block shapes of a kernel: tilings around the default, priced; the cheapest first.

The search keeps the loops of the block program (which dims are spatial and which temporal is decided by legality and
by the snapshot) and settles one target after the other (rows and columns of products, then streamed and contracted
lengths; the area of other tiles). Tilings that come to the same loops are priced once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    """A tiling of a block program and what it is predicted to cost."""

    tiles: tuple[tuple[str, int], ...]
    cost: Cost

    def __str__(self) -> str:
        return " ".join(f"{d}:{n}" for d, n in self.tiles)


def shapes(
    block: Block, sizes: Mapping[str, int], machine: Machine, unit: UnitAxes | None = None, *, all_tiles: bool = True
) -> tuple[Shape, ...]:
    """Tilings, the cheapest first; without `all_tiles` only the default, which another one has to beat clearly."""
    axes = {i.name: len(i.shape) for i in block.inputs} | {r.name: len(r.dims) for r in block.results}
    arranged = arrange(block, {t: (unit or {}).get(t, n - 1 if n else None) for t, n in axes.items()})
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
    return tuple(sorted(found.values(), key=lambda s: s.cost.seconds * (1.0 if s is usual else DOUBT)))


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
