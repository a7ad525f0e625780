"""What a kernel runs with whose threads spill registers, once the assembler has said so.

How many values are alive at once is known when a kernel is assembled: estimates (`tilings`) go by what crosses
reductions, by operands and by functions, and a gradient of 20 loads and 100 operations holds more than they say.

Measured on an H200, microseconds: generalised intersections of boxes, backward, 716 bytes spilled by four elements a
thread 51, by two 36; a fold of 256 columns with exponentials between two products, 308 bytes by four warps 71, by eight
36.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.tiles import Shape, held_lanes, with_singles
from tilefold.backends.triton.traffic import WARP
from tilefold.block.crossing import REGISTER
from tilefold.block.ir import Block
from tilefold.block.pairs import ranged

#: Bytes of a thread that may be spilled: a few, outside loops, cost nothing.
SPILLED = 64
#: Warps up to which each of a thread's registers may be used: twice as many halve what a thread holds.
HALVED = 4


def spilled(done: Any) -> int:
    """Bytes that a thread of a loaded kernel spills; 0 where its driver does not say."""
    return REGISTER * int(getattr(done, "n_spills", None) or 0)


def eased(c: TritonConfig, b: Block, sizes: Mapping[str, int]) -> TritonConfig | None:
    """A configuration with fewer elements a thread for extents about as `sizes`; None: there is none.

    Twice the warps where they are few, else half of a tile: of an outer dim, whose neighbours nobody reads together, or
    of a stream. A product's tiles stay what matrix units want.
    """
    if c.groups or c.registers:
        return None
    over = ranged(b)
    sizes = {d: n for d, n in sizes.items() if d in over}
    s = with_singles(Shape.of(b), b, sizes)
    local = held_lanes(s, s.seen(sizes))
    if 2 * WARP * c.warps <= s.area({**local, **c.tiles}) and c.warps <= HALVED:
        return replace(c, warps=2 * c.warps)
    if s.products or s.area({**local, **c.tiles}) <= WARP * c.warps:
        return None
    order = (*(d for d in s.parallel if d not in s.segments), *s.streamed)
    d = next((d for d in order if c.tiles.get(d, 1) > 1), None)
    return None if d is None else replace(c, tiles={**c.tiles, d: c.tiles[d] // 2})
