"""Tiles of loops that read otherwise than they store: of every n-th element, or of one element for several.

Triton gives a thread as many neighbours of a tile as the widest access of them takes. What is read along with them one
element in n (means of sixteen columns) a thread then reads far from its neighbour in the warp, and each line of the
cache is looked up for it several times. What is read at a position that is computed (the gradient of such a mean) has a
layout of its own, of one element a thread, and passes through shared memory at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.traffic import WARP, Access, Traffic
from tilefold.backends.triton.widths import MOST_WARPS
from tilefold.tile.lanes import MOST_STEPS
from tilefold.tile.pieces import power_of_two

if TYPE_CHECKING:
    from tilefold.backends.triton.tiles import Shape

#: Bytes from one element to the next from which a row of them is apart.
APART = 8


def for_mislaid(c: TritonConfig, s: Shape, t: Traffic) -> TritonConfig:
    """One element a thread where elements of one row are read so: more warps for a row that one tile covers, and
    shorter tiles of a loop over rows whose columns are computed positions.

    On an H200, 768 rows: means of 16 of 6,144 columns, their GELU and the largest, 512 lanes by four warps 24.6 us, by
    sixteen 12.2; the gradient, spread over 16 columns each and summed over rows, 256 x 32 by eight warps 30 us, 128 x
    32 9.9.
    """
    if s.products:
        return c
    tiles, warps = dict(c.tiles), c.warps
    alone = all(tiles.get(d, 1) == 1 for d in s.parallel)
    for d in s.streamed:
        tile = tiles.get(d, 0)
        if alone and tile >= t.sizes[d] and _torn(t, d, d, computed=False):
            warps = max(warps, min(MOST_WARPS // 2, power_of_two(t.sizes[d]) // WARP))
        for n in s.parallel:
            if tile > MOST_STEPS and tiles.get(n, 1) > 1 and _torn(t, n, d, computed=True):
                most = MOST_STEPS * max(1, WARP * warps // tiles[n])
                tiles[d] = min(tiles[d], most)
    return c if (tiles, warps) == (c.tiles, c.warps) else replace(c, tiles=tiles, warps=warps)


def _torn(t: Traffic, n: str, d: str, *, computed: bool) -> bool:
    """Whether of a loop over d some access has neighbours along n, and another has none: its position is computed, or
    a step is far."""
    steps = [(_step(a, n), a.nbytes) for a in t.accesses if d in a.dims]
    far = (k is None if computed else k is not None and k * nbytes >= APART and k > 1 for k, nbytes in steps)
    return any(k == 1 for k, _ in steps) and any(far)


def _step(a: Access, n: str) -> int | None:
    """Elements from one index of a dim to the next; None: a computed position, 0: it lies along another axis."""
    if n not in a.dims or any(axis and n in axis for axis in a.axes[1:]):
        return 0
    first: Mapping[str, int] | None = a.axes[0] if a.axes else {}
    return None if first is None else abs(first.get(n, 0))
