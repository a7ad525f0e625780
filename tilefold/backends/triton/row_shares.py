"""How evenly fixed shares of the grid fall where groups of warps own rows, and streams are of unequal length.

Thread blocks are persistent. With fixed shares each goes through the tiles of the grid there and back (`tf_tile`), in
an order with the longest first among as many heads as share a cache (`tf_longest_first`); where heads side by side are
no multiple of the multiprocessors, some always have the longer ones (64 heads of 192, 4,096 keys: 1.6 times the mean).
Tiles drawn from a counter are even, but for the last: one head left alone ends with its longest block (16 heads of 128,
16,384 keys: 1.04). So the heads that come last are enough for several tiles a thread block.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Bytes of streamed tensors that thread blocks at work together should share: half of the second-level cache.
CACHED = 24 << 20
#: Tiles a thread block of the heads that come last, side by side, where they are drawn.
LAST = 3
#: What drawing may cost: on an H200, causal, between a gain of 1.3 and a loss of 3.6 %.
DRAWING = 1.04
#: Most tiles that are looked at.
MOST = 1 << 16


def unevenness(lengths: Sequence[float], heads: int, side: int, units: int) -> float:
    """The longest fixed share over the mean. lengths: of the stream, for each block of rows, longest first."""
    if not heads or not sum(lengths) or len(lengths) * heads > MOST:
        return 1.0
    shares, sides = [0.0] * units, [min(side, heads - first) for first in range(0, heads, side)]
    order = [b for n in sides for b in range(len(lengths)) for _ in range(n)]
    for n, b in enumerate(order):
        r, at = divmod(n, units)
        shares[units - 1 - at if r & 1 else at] += lengths[b]
    return max(shares) * units / sum(shares)
