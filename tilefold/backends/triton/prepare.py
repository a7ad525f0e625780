"""A block program as the tile kernel that a GPU configuration describes."""

from __future__ import annotations

from collections.abc import Mapping

from tilefold.backends.triton.config import TritonConfig
from tilefold.block.ir import Block, Loop, walk
from tilefold.tile.ir import Kernel
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.pieces import cut, product_dims
from tilefold.tile.stream import stream
from tilefold.tile.verify import verify


def tile_kernel(block: Block, config: TritonConfig, unit: Mapping[str, int | None]) -> Kernel:
    """Lowered with the configuration's tiles; long contractions streamed, odd extents in pieces."""
    loops = {n.dim for n in walk(block.body) if isinstance(n, Loop)}
    tiles = {d: config.tiles.get(d, 1) for d in loops}
    kernel = verify(lower(block, LowerOptions(unit=unit, tiles=tiles, arranged=False)))
    kernel = stream(kernel, {d: n for d, n in config.tiles.items() if d not in loops})
    return verify(cut(kernel, product_dims(kernel)))
