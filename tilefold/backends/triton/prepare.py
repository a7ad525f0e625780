"""A block program as the tile kernel that a GPU configuration describes."""

from __future__ import annotations

from collections.abc import Mapping

from tilefold.algebra.expr import Const
from tilefold.backends.triton.config import TritonConfig
from tilefold.block.ir import Block, Loop, walk
from tilefold.tile.ir import For, Kernel, Stmt
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.pieces import cut, power_of_two, product_dims
from tilefold.tile.stream import stream
from tilefold.tile.verify import verify

#: An operand is padded to at most this many columns; longer ones are always cut into pieces.
MOST_PADDED = 512


def tile_kernel(block: Block, config: TritonConfig, unit: Mapping[str, int | None]) -> Kernel:
    """Lowered with the configuration's tiles; long contractions streamed, odd extents in pieces."""
    loops = {n.dim for n in walk(block.body) if isinstance(n, Loop)}
    tiles = {d: config.tiles.get(d, 1) for d in loops}
    kernel = verify(lower(block, LowerOptions(unit=unit, tiles=tiles, arranged=False)))
    kernel = stream(kernel, {d: n for d, n in config.tiles.items() if d not in loops})
    dims = product_dims(kernel)
    if not steady(kernel):
        dims = tuple(d for d in dims if _padded(kernel, d) > MOST_PADDED)
    return verify(cut(kernel, dims))


def steady(kernel: Kernel) -> bool:
    """Whether every loop runs over whole tiles, two or more, so that the compiler sees a loop and no tail.

    Products of pieces in straight-line code (loops of one iteration are unrolled) came out wrong on Hopper with
    Triton 3.6: 64 + 16 columns, 45 rows, 77 keys; in loops, and in the interpreter, the same code is right.
    """

    def ok(s: Stmt) -> bool:
        if not isinstance(s, For):
            return True
        e = kernel.sizes[s.dim]
        whole = isinstance(e, Const) and int(e.value) % s.tile == 0 and int(e.value) >= 2 * s.tile
        return whole and s.start is None and s.stop is None and all(map(ok, s.body))

    return all(map(ok, kernel.body)) and any(isinstance(s, For) for s in kernel.body)


def _padded(kernel: Kernel, d: str) -> int:
    e = kernel.sizes[d]
    return power_of_two(int(e.value)) if isinstance(e, Const) else 0
