"""Block shapes of a kernel: every tiling of a small grid of targets, priced; the cheapest first.

The search keeps the loops of the block program (which dims are spatial and which temporal is decided by legality and
by the snapshot) and varies tiles and the order of the grid. Tilings that lower to the same loops are priced once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, walk
from tilefold.plan.cost import Cost, block_bytes, cost_of
from tilefold.plan.dataflow import Analysis
from tilefold.plan.hardware import Machine
from tilefold.tile.layout import UnitAxes, arrange, product_of
from tilefold.tile.sizes import TileTargets, choose_tiles

#: Targets that are tried: rows and columns of products, streamed and contracted lengths; elements of other tiles.
KEPT = (64, 128, 256)
STREAMED = (64, 128, 192, 384)
CONTRACTED = (256, 512)
AREAS = (2048, 4096, 8192, 16384, 32768)


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
    """Tilings, the cheapest first (the default tiling first among equals); without `all_tiles` only the default."""
    axes = {i.name: len(i.shape) for i in block.inputs} | {r.name: len(r.dims) for r in block.results}
    arranged = arrange(block, {t: (unit or {}).get(t, n - 1 if n else None) for t, n in axes.items()})
    whole = block_bytes(arranged, sizes)
    analysis = Analysis(arranged, sizes)
    found: dict[tuple[tuple[str, int], ...], Shape] = {}
    for targets in _targets(multiplies(arranged)) if all_tiles else (TileTargets(),):
        tiles = choose_tiles(arranged, targets)
        key = tuple(tiles.items())
        if key not in found:
            found[key] = Shape(key, cost_of(analysis.dataflow(tiles, machine), whole, machine))
    return tuple(sorted(found.values(), key=lambda s: s.cost.seconds))


def multiplies(block: Block) -> bool:
    """Whether a statement is a matrix product."""
    dims = {n.name: n.dims for n in walk(block.body) if isinstance(n, Let | Init)}
    return any(isinstance(n, Let | Accumulate) and product_of(n, dims[n.name]) for n in walk(block.body))


def _targets(products: bool) -> Iterator[TileTargets]:
    """The default, then the grid of those that matter."""
    yield TileTargets()
    if products:
        for kept, streamed, contracted in product(KEPT, STREAMED, CONTRACTED):
            yield TileTargets(kept=kept, streamed=streamed, contracted=contracted)
    else:
        for area in AREAS:
            yield TileTargets(area=area)


def spatial(block: Block) -> tuple[str, ...]:
    """Dims of the grid, outermost first."""
    dims = []
    nodes = block.body
    while len(nodes) == 1 and isinstance(nodes[0], Loop) and nodes[0].kind == "forall":
        dims.append(nodes[0].dim)
        nodes = nodes[0].body
    return tuple(dims)
