"""Tile sizes for the loops of a kernel, from what its statements do.

Dims that matrix products keep are tiled for register blocking and cache reuse; batch-like
dims run one index a tile; in kernels without products the tiles are sized so that what a block
touches stays in the first-level cache. The planner's cost model replaces these defaults
later; everything downstream takes the sizes as given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilefold.algebra.expr import dims_used, loads
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, exprs_of, walk
from tilefold.tensor.analysis import is_static
from tilefold.tensor.sizes import estimate
from tilefold.tile.layout import product_of


@dataclass(frozen=True, slots=True)
class TileTargets:
    """Defaults in elements: `kept` and `streamed` for products, `area` for everything else; `line`: what a tile has
    at least along the last axis of what it reads transposed.
    """

    kept: int = 128
    streamed: int = 192
    contracted: int = 512
    area: int = 8192
    row: int = 4096
    line: int = 32


def choose_tiles(block: Block, t: TileTargets | None = None) -> Mapping[str, int]:
    """dim -> tile for every loop of the block program."""
    return Tiler(block).tiles(t or TileTargets())


class Tiler:
    """The loops of a block program, looked at once for any number of targets. `multiplies`: it has products."""

    def __init__(self, block: Block):
        self.block = block
        self.loops = {n.dim: n for n in walk(block.body) if isinstance(n, Loop)}
        dims = {n.name: n.dims for n in walk(block.body) if isinstance(n, Let | Init)}
        self.beside, self.contracted = _product_dims(block.body, dims)
        self.multiplies = bool(self.beside)

    def tiles(self, t: TileTargets) -> Mapping[str, int]:
        """dim -> tile."""
        tiles: dict[str, int] = {}
        if not self.multiplies:
            tiles = _by_area(self.block, self.loops, t)
            return {d: self._fitted(d, n) for d, n in tiles.items()}
        for d, n in reversed(self.loops.items()):
            if n.kind == "for":
                wanted = t.contracted if d in self.contracted and d not in self.beside else t.streamed
            else:
                wanted = t.kept // math.prod(self._inside(d, tiles, t)) if d in self.beside else 1
            tiles[d] = self._fitted(d, wanted)
        return {d: tiles[d] for d in self.loops}

    def _inside(self, d: str, tiles: Mapping[str, int], t: TileTargets) -> Iterator[int]:
        """Indices that a block has of dims beside `d`: the rows of a product are those of all its dims together, of
        which the last fill the tile."""
        for x in self.beside[d]:
            if x in tiles and self.loops[x].kind == "forall":
                yield tiles[x]
            elif x not in self.loops or self.loops[x].kind == "for":
                yield max(1, _bound(self.block, x, t.kept))

    def _fitted(self, d: str, size: int) -> int:
        return 1 if self.loops[d].single else max(1, min(size, _bound(self.block, d, size)))


def _product_dims(nodes: tuple[Node, ...], dims: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, set[str]], set[str]]:
    """Dims exclusive to one side of some matrix product, each with those beside it on that side, and dims contracted
    by one."""
    beside: dict[str, set[str]] = {}
    contracted: set[str] = set()
    for n in walk(nodes):
        if isinstance(n, Let | Accumulate):
            p = product_of(n, dims[n.name])
            if p is not None:
                for side in (p.rows, p.cols):
                    for d in side:
                        beside.setdefault(d, set()).update(x for x in side if x != d)
                contracted |= set(p.rdims)
    return beside, contracted


def _by_area(block: Block, loops: Mapping[str, Loop], t: TileTargets) -> dict[str, int]:
    """Last dims first, as much as fits `area` elements of the largest statement."""
    inner = 1
    for n in walk(block.body):
        local = {d for d in _dims(n) if d not in loops}
        size = 1
        for d in local:
            size *= max(1, estimate(block.sizes[d])) if is_static(block.sizes[d]) else t.row
        inner = max(inner, size)
    tiles: dict[str, int] = {}
    room = max(1, t.area // inner)
    streamed = [d for d, n in loops.items() if n.kind == "for"]
    for d in streamed:
        tiles[d] = max(1, min(t.row, room, estimate(block.sizes[d])))
    room = max(1, room // max([1, *tiles.values()]))
    spread = [d for d, n in loops.items() if n.kind == "forall"]
    for d in reversed(spread):
        across = d == spread[-1] and _read_across(block, d, spread)
        tiles[d] = max(1, min(room // t.line if across and room >= t.line**2 else room, estimate(block.sizes[d])))
        room = max(1, room // tiles[d])
    return tiles


def _read_across(block: Block, dim: str, dims: list[str]) -> bool:
    """Whether something moves with `dim`, but with another of `dims` along its last axis: a transposed operand."""
    for x in (x for n in walk(block.body) for e in exprs_of(n) for x in loads(e) if x.index):
        last = dims_used(x.index[-1])
        before = {d for e in x.index[:-1] for d in dims_used(e)}
        if dim in before and dim not in last and not last.isdisjoint(dims):
            return True
    return False


def _dims(n: Node) -> set[str]:
    used = {d for e in exprs_of(n) for d in dims_used(e)}
    match n:
        case Let(dims=dims, rdims=rdims):
            return used | set(dims) | set(rdims)
        case Init(dims=dims) | Store(dims=dims):
            return used | set(dims)
        case Accumulate() | Update() | Loop():
            return used
    raise AssertionError(n)


def _bound(block: Block, d: str, size: int) -> int:
    """No tile is longer than a static extent."""
    e = block.sizes[d]
    return estimate(e) if hasattr(e, "value") else size
