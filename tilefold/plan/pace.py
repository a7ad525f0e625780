"""How fast a form of attention goes through its scores: the price of a library's call and of both kernels of ours.

A streamed fold with two products works on blocks of rows by tiles of the stream. The seconds of all multiprocessors
together are those of its blocks and of its tiles; a head wider than 64 columns takes longer a tile, not a block, as
exponentials do not become more. Blocks of rows are whole, so that rows are rounded up to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Streamed indices of a tile; columns of a head whose tiles take `tile`, and of one whose take `wide`.
STREAMED, NARROW, WIDE = 128, 64, 128


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of all multiprocessors together. rows: of a block. start: of a block, beside its stream; edge: what an
    end of the stream adds that follows the rows (causal masks). tile: for `STREAMED` indices, of heads of up to 64
    columns; wide: of 128."""

    rows: int
    start: float
    edge: float
    tile: float
    wide: float

    def seconds(self, x: Scores, units: int = 1) -> float:
        """Of these scores, where `units` multiprocessors go through blocks one after the other: no less than the block
        that meets most takes one of them."""
        blocks = x.heads * -(-x.rows // self.rows)
        if not x.ends:  # else those that have less to do take more of them
            blocks = -(-blocks // units) * units
        more = (self.rows + self.rows % STREAMED) / 2 if x.ends else 0
        of_block, of_tile = self.start + self.edge * x.ends, self.each(x.columns) / STREAMED
        evenly = blocks * (of_block + (x.streamed + more) * of_tile)
        return evenly if units == 1 else max(evenly, units * (of_block + x.longest * of_tile))

    def each(self, columns: int) -> float:
        """Of a tile of a head of so many columns."""
        more = max(0, -(-columns // NARROW) * NARROW - NARROW)
        return self.tile + more / (WIDE - NARROW) * (self.wide - self.tile)


@dataclass(frozen=True, slots=True)
class Scores:
    """heads: of all batches. streamed: indices that a row meets on average; where the stream `ends` with the rows (a
    causal mask, a window), a block meets half of itself more. columns: of a head. planes: bytes that are read for each
    score (a bias). longest: indices that the row with most meets."""

    heads: int
    rows: int
    streamed: float
    ends: bool
    columns: int
    planes: int = 0
    longest: float = 0.0

    def served(self, rows: int, rate: float, nbytes: int = 2) -> float:
        """Seconds in which a cache serves, at `rate` bytes a second, what blocks of so many rows read: both operands
        along the stream (elements of `nbytes`), and the planes."""
        blocks = self.heads * -(-self.rows // rows)
        return blocks * self.streamed * (2 * nbytes * self.columns + rows * self.planes) / rate


def owned_seconds(x: Scores, paces: Sequence[tuple[int, Pace]], units: int) -> float:
    """Of groups that own rows, by the pace for heads of so many columns; infinite where none was measured."""
    pace = next((p for most, p in paces if x.columns <= most), None)
    return math.inf if pace is None else pace.seconds(x, units)
