"""Tiles for kernels with matrix products: rows and columns that matrix units take, steps of what is contracted.

Products of float32, which no matrix unit takes unrounded, have small tiles and many threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilefold.backends.triton.config import TritonConfig
from tilefold.plan.hardware import H100
from tilefold.tile.pieces import MATRIX_UNIT, largest_power, power_of_two

if TYPE_CHECKING:
    from tilefold.backends.triton.tiles import Shape

#: A contraction of more elements than this is streamed.
CONTRACTED = 256
#: Columns up to which a product's contraction is read in long steps; bytes of both operands and elements of the
#: contraction that a step has at most and at least; rows of a block where blocks are few.
STEPPED, STEP, CHUNK, LEAST_ROWS = 128, 1 << 15, 64, 32
#: Elements of an operand of a float32 product that a thread block of eight warps has in registers.
EXACT = 4096
#: Inside a streamed loop an operand is held up to so many elements of a contraction (576: latent attention).
HELD_CONTRACTED = 640
#: Sums that several products of a tile have in registers beside what eight warps compute of them: of twice as many,
#: scores and their gradient in tiles of 128 x 128, each thread spills 600 bytes, of four warps 2,900.
SUMS = 1 << 14
#: Elements of rows that are held whole, as scores that are summed before they are used: two values of eight warps.
WHOLE_ROWS = 1 << 14
#: Groups of warps that share a state of more than 256 columns.
GROUPS = 2
#: Rows that a tile of several dims should have, and times the multiprocessors that blocks of such tiles are at least.
FILLED, ENOUGH = 64, 3
#: Products of a tile of such rows that four warps have registers for: scores, and what sums values by them.
CHAIN = 2
#: Elements a warp of an operand of 16 bits that is read into registers; of a contraction that a step has at least.
OPERAND, LEAST_DEPTH = 1024, 64


def with_products(s: Shape, sizes: Mapping[str, int]) -> TritonConfig:
    tiles: dict[str, int] = {}
    lanes: dict[str, int] = {}
    sides = frozenset(d for m, n, _ in s.products for d in m | n)
    rows = [d for d in s.parallel if d in sides and d not in s.shared and d not in s.common]
    rows = [d for d in rows if not _beside(s, d, rows, sizes)]
    others = [d for d in s.parallel if d not in rows]
    tiles |= dict.fromkeys(others, 1)
    blocks = math.prod(sizes[d] for d in others)
    inside = {d for _, _, k in s.products for d in k if _held_whole(s, d)} - {*s.streamed}
    long = {d for d in inside if sizes[d] > HELD_CONTRACTED}
    chunks = {d for _, _, k in s.products for d in k if sizes[d] > CONTRACTED and not _held_whole(s, d)}
    held = {d for m, n, k in s.products for d in m | n | k} - {*s.parallel, *s.streamed, *long, *chunks}
    wide = max([sizes[d] for d in held] or [1])
    whole = math.prod(-(-sizes[d] // 128) for d in rows) * blocks
    parts = blocks * math.prod(sizes[d] for d in s.segments)
    for d in rows:
        # blocks of unequal length fill the machine better where they are many
        small = whole < H100.cores if len(rows) > 1 else s.bounded or wide <= 64 or whole < 3 * H100.cores
        most = 64 if wide > 256 or small else 128
        while wide > 256 and most > 16 and len(rows) == 1 and parts * -(-sizes[d] // most) < H100.cores * 3 // 4:
            most //= 2
        tiles[d] = max(16, min(most, power_of_two(sizes[d])))
    few = all(tiles[d] <= 16 and sizes[d] < 16 for d in rows)
    for d, c in s.shared.items():
        packed = max(n for n in range(1, min(c, 64) + 1) if c % n == 0)
        if d in tiles and few and packed > 1:
            tiles[d] = packed
            if (not rows and packed < MATRIX_UNIT) or packed & (packed - 1):
                lanes[d] = power_of_two(packed if rows else max(packed, MATRIX_UNIT))
    for d in rows:
        if sizes[d] < 16:
            lanes[d] = 16
            tiles[d] = min(tiles[d], power_of_two(sizes[d]))
    wider = {} if s.exact or wide > STEPPED else _wider(s, rows, others, sizes, {**tiles, **lanes})
    tiles |= wider
    lanes |= _padded(s, sizes)
    for d in s.streamed:
        product = d in sides or any(d in k for _, _, k in s.products)
        tiles[d] = 64 if product else 1024
    tiles |= {d: 64 for d in sorted(chunks) if d not in tiles and wide > 1}
    tiles |= dict.fromkeys(sorted(long), 64)
    if s.exact:
        return _exact(s, TritonConfig(tiles, lanes), rows, sizes)
    whole_rows = not sides <= set(s.parallel) and chunks.issuperset(s.streamed)
    loaded = chunks.isdisjoint(sides)  # attention's second product contracts what its first makes
    if chunks and loaded and whole_rows and not s.segments and wide <= STEPPED:
        return _in_steps(TritonConfig(tiles, lanes), s, rows, sizes, chunks)
    big = max([tiles[d] for d in rows] or [16])
    if long and wide == 1:  # a matrix product, and what is reduced over its columns
        columns = {d: 128 for d in s.streamed if big >= 64}
        return TritonConfig({**tiles, **columns}, lanes, warps=8 if big >= 64 else 4, stages=3)
    if not rows and wide >= 256:  # a thread block holds all of a product: half the stream, or registers spill
        return TritonConfig({**tiles, **{d: min(tiles[d], 32) for d in s.streamed}}, lanes, warps=8, stages=3)
    if wide > 256:
        if big > 32:
            return TritonConfig(tiles, lanes, warps=8, stages=2, groups=GROUPS)
        return TritonConfig(tiles, lanes, stages=3)
    if big >= 128 and wide >= 128:
        return TritonConfig(tiles, lanes, warps=8, stages=2, descriptors=True)
    warps = 8 if wider and len(s.products) > CHAIN else 4
    for d in rows if s.whole and not s.exact else ():  # rows of a streamed dim that are held whole
        across = max(math.prod(power_of_two(sizes[e]) for e in s.whole & (m | n)) for m, n, _ in s.products)
        while tiles[d] > MATRIX_UNIT and tiles[d] * across > WHOLE_ROWS:
            tiles[d] //= 2
        warps = 8 if tiles[d] * across >= WHOLE_ROWS else warps
    sums = [m | n for m, n, _ in s.products if m | n <= set(rows) and not s.streamed]
    while sum(math.prod(tiles[d] for d in x) for x in sums) > SUMS:
        tiles[max(rows, key=lambda d: tiles[d])] //= 2
        warps = 8
    return TritonConfig(tiles, lanes, warps=warps, stages=3, descriptors=s.bounded and big >= 64 and wide >= 128)


def _in_steps(
    c: TritonConfig, s: Shape, rows: Sequence[str], sizes: Mapping[str, int], chunks: frozenset[str] | set[str]
) -> TritonConfig:
    """Few columns, all in one block, and a long contraction: each step costs a latency of the memory, shared by the
    loads that are under way, so that steps are long and several are ahead; and fewer rows a block where blocks are few.

    On an H200, [1024, 1024] times [1024, 8]: 6.1 us in tiles of 32 x 256, 27 of 64 x 64.
    """
    tiles = dict(c.tiles)
    blocks = math.prod(-(-sizes[d] // tiles.get(d, 1)) for d in s.parallel)
    if blocks < H100.cores * 3 // 4:
        tiles |= {d: min(tiles[d], LEAST_ROWS) for d in rows}
    held = {d: c.lanes.get(d, power_of_two(sizes[d])) for d in sizes if d not in s.parallel and d not in chunks}
    sides = [frozenset(side | k) for m, n, k in s.products for side in (m, n)]
    across = max(1, sum(math.prod({**tiles, **held}.get(d, 1) for d in side - chunks) for side in sides))
    for d in sorted(chunks):
        most = max(CHUNK, STEP // ((2 if s.narrow else 4) * across))
        tiles[d] = min(power_of_two(sizes[d]), largest_power(most))
    return replace(c, tiles=tiles, warps=4, stages=4)


def _exact(s: Shape, c: TritonConfig, rows: Sequence[str], sizes: Mapping[str, int]) -> TritonConfig:
    """Small tiles, many threads: the operands of a product of float32 are in registers, all of what it contracts, and
    of each row all that a block has of it (ten places of eight columns).

    Of few rows in segments, which only read: longer steps, three of them ahead."""
    dims = {d for m, n, k in s.products for d in m | n | k}
    sums = {d for _, _, k in s.products for d in k if d not in s.streamed}
    chunked = {d for d in sums if d in c.tiles or (not s.streamed and sizes[d] > 2 * MATRIX_UNIT)}
    held = {d: c.lanes.get(d, power_of_two(sizes[d])) for d in dims - chunked - c.tiles.keys()}
    with_rows = [x for m, n, k in s.products for x in (m | k, n | k, m | n) if x & set(rows)]
    wide = max([*held.values(), *(math.prod(held.get(d, 1) for d in x) for x in with_rows)] or [1])
    most = max(MATRIX_UNIT, min(64, power_of_two(EXACT // wide)))
    tiles = {**c.tiles, **{d: min(c.tiles[d], most) for d in rows}}
    tiles |= {d: min(tiles[d], 32 if wide <= 128 else MATRIX_UNIT) for d in s.streamed}
    tiles |= dict.fromkeys(filter(chunked.__contains__, sizes), MATRIX_UNIT)
    few = any(math.prod(sizes[d] for d in side) <= MATRIX_UNIT for m, n, _ in s.products for side in (m, n))
    if few and s.segments and len(s.products) == 1 and s.cut.keys() >= set(s.streamed):
        return replace(c, tiles=tiles | dict.fromkeys(s.streamed, CHUNK), warps=4, stages=4)
    return replace(c, tiles=tiles, warps=8, stages=2)


def for_depth(c: TritonConfig, s: Shape, sizes: Mapping[str, int]) -> TritonConfig:
    """Shorter steps of a product that sums over several dims, as heads and their columns: a step has all of those that
    are held, and an operand of it is read into registers (16 x 1,024 by four warps: 14 KB a thread spilled)."""
    tiles = dict(c.tiles)

    def lanes(d: str) -> int:
        most = max(1, power_of_two(sizes[d]))
        return max(c.lanes.get(d, 1), min(tiles.get(d, most), most))

    for m, n, k in s.products:
        stepped = sorted(d for d in k if d in tiles and d not in s.parallel)
        most = EXACT if s.exact else OPERAND * c.warps
        while len(k) > 1 and max(math.prod(map(lanes, side | k)) for side in (m, n)) > most:
            longest = max(stepped, key=lanes, default="")
            if not longest or lanes(longest) == 1 or math.prod(map(lanes, k)) <= LEAST_DEPTH:
                break
            tiles[longest] = lanes(longest) // 2
    return c if tiles == c.tiles else replace(c, tiles=tiles)


def _wider(
    s: Shape, rows: Sequence[str], others: Sequence[str], sizes: Mapping[str, int], lanes: Mapping[str, int]
) -> dict[str, int]:
    """Tiles of dims beside short rows (lines of a window beside the pixels of one), which fill a tile with them: what a
    thread block reads of the other operands serves all of its rows. Attention in 600 windows of 14 x 14 pixels, keys
    and values read by 8,400 blocks of 14 rows each: 176 us of an H100 by forecast; by 2,400 of 56, 85."""
    found: dict[str, int] = {}
    blocks = math.prod(-(-sizes[d] // lanes[d]) for d in s.parallel)
    for d in reversed(others):
        mine = [side for m, n, _ in s.products for side in (m, n) if d in side]
        if not all(side & {*rows} for side in mine) or not mine or d in s.shared or d in s.common or d in s.segments:
            continue
        held = max(math.prod({**lanes, **found}[x] for x in side & {*s.parallel}) for side in mine)
        more = min(largest_power(max(1, FILLED // held)), power_of_two(sizes[d]))
        if blocks // sizes[d] * -(-sizes[d] // more) >= ENOUGH * H100.cores:
            found[d] = more
            blocks = blocks // sizes[d] * -(-sizes[d] // more)
    return found


def _beside(s: Shape, d: str, rows: Sequence[str], sizes: Mapping[str, int]) -> bool:
    """Whether every operand with d has rows enough along another dim: one that is not parallel, or is longer.

    Of equally long dims the last one counts as the longer one.
    """
    mine = [side for m, n, _ in s.products for side in (m, n) if d in side]

    def enough(x: str) -> bool:
        if x in rows:
            return (sizes[x], rows.index(x)) > (sizes[d], rows.index(d))
        return x not in s.parallel and sizes[x] >= MATRIX_UNIT

    return all(any(enough(x) for x in side - {d}) for side in mine)


def _padded(s: Shape, sizes: Mapping[str, int]) -> dict[str, int]:
    """Lanes that fill a matrix unit, of dims held whole that are the only ones of an operand's side: eight experts.

    Not of a few coordinates in float32, whose products are summed as they are.
    """
    found: dict[str, int] = {}
    for m, n, k in s.products:
        for side in (m, n, k) if m and n else ():
            if len(side) == 1 and not side & {*s.parallel, *s.streamed}:
                least = MATRIX_UNIT // 2 if s.exact and side == k else 2
                found |= {d: MATRIX_UNIT for d in side if least <= sizes[d] < MATRIX_UNIT}
    return found


def _held_whole(s: Shape, d: str) -> bool:
    """Whether the streamed loop's products contract d: then its operand stays in the block."""
    return any(d in k and (set(s.streamed) & (m | n)) for m, n, k in s.products)
