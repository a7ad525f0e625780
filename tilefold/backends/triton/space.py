"""Configurations worth trying for a kernel, the default first; none of them changes the result."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.row_tiles import owning_rows
from tilefold.backends.triton.tiles import Shape, default_config
from tilefold.block.ir import Block
from tilefold.tile.pieces import power_of_two

Effort = Literal["none", "quick", "full"]
#: (rows, streamed, warps, stages, descriptors) of kernels with products, for the quick effort.
_QUICK = (
    (128, 64, 8, 2, True),
    (128, 128, 8, 3, True),
    (128, 128, 8, 2, True),
    (128, 64, 8, 3, True),
    (128, 64, 4, 3, True),
    (64, 64, 4, 3, True),
    (64, 64, 4, 3, False),
    (64, 64, 4, 2, True),
    (64, 128, 4, 3, True),
    (128, 32, 4, 4, False),
    (64, 64, 8, 2, True),
    (32, 64, 4, 3, False),
    (16, 64, 4, 3, False),
)
#: (indices of the last parallel dim, streamed, warps, stages) where products have no rows: decoding one query.
_QUICK_VECTORS = (
    (1, 64, 2, 3), (1, 64, 2, 4), (1, 64, 4, 3), (1, 32, 1, 4), (1, 128, 2, 2), (1, 128, 4, 2), (1, 128, 4, 3),
    (2, 32, 2, 3), (4, 32, 4, 3), (4, 32, 4, 2), (4, 64, 4, 2), (8, 32, 8, 3),
)  # fmt: skip


def space(block: Block, sizes: Mapping[str, int], effort: Effort) -> tuple[TritonConfig, ...]:
    """Candidates for extents about as `sizes`."""
    base = default_config(block, sizes)
    if effort == "none":
        return (base,)
    s = Shape.of(block)
    seen = s.seen(sizes)
    products = any(m and n for m, n, _ in s.products)
    rows = owning_rows(block, sizes, base, every=True)
    found = _with_products(base, s, seen, effort) if products else _without(base, s, seen, effort)
    owned = [*_owning(rows)] if rows is not base else []
    unique = {c.key(): c for c in (base, *owned, *found)}
    return tuple(unique.values())


def _with_products(base: TritonConfig, s: Shape, sizes: Mapping[str, int], effort: Effort) -> Iterator[TritonConfig]:
    rows = [d for d in s.parallel if base.tiles.get(d, 1) >= 16]
    streams = [d for d in base.tiles if d in s.streamed or d not in s.parallel]
    if base.groups:
        yield replace(base, groups=0)
    choices = _QUICK if effort == "quick" else tuple(
        itertools.product((16, 32, 64, 128), (32, 64, 128), (2, 4, 8), (2, 3, 4), (False, True))
    )  # fmt: skip
    for r, c, warps, stages, described in choices:
        tiles = dict(base.tiles)
        for at, d in enumerate(rows):
            tiles[d] = max(16, min(r if at == 0 else max(r, 64), power_of_two(sizes[d])))
        for d in streams:
            tiles[d] = min(c, max(16, power_of_two(sizes[d])))
        if not rows and warps == 8:
            warps = 2
        made = replace(base, tiles=tiles, warps=warps, stages=stages, descriptors=described, groups=0)
        yield made
        if effort == "full" and warps == 4 and described:
            yield replace(made, specialize=True)


def _owning(rows: TritonConfig) -> Iterator[TritonConfig]:
    """Groups of warps that own rows: how many, whether they draw their tiles, whether results leave turned."""
    for groups, draws in itertools.product((2, 3), (False, True)):
        yield replace(rows, groups=groups, draws=draws)
    yield replace(rows, descriptors=True)


def _without(base: TritonConfig, s: Shape, sizes: Mapping[str, int], effort: Effort) -> Iterator[TritonConfig]:
    last = s.parallel[-1] if s.parallel else None
    if any(k - frozenset(s.streamed) for _, _, k in s.products):
        yield from _vectors(base, s, sizes, effort)
        return
    lengths: tuple[int, ...] = (
        (1024, 4096, 16384) if effort == "quick" else (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    )
    rows: tuple[int, ...] = (1, 4) if effort == "quick" else (1, 2, 4, 8, 16, 32)
    if s.again and effort == "quick":
        lengths, rows = (8192, 16384, 32768), (1,)
    if s.again and s.narrow:
        lengths = (*lengths, 65536)
    warps = ((4, 8, 16, 32) if s.again else (4, 8, 16)) if effort == "quick" else (1, 2, 4, 8, 16, 32)
    if not s.streamed:
        warps, rows = tuple(dict.fromkeys((1, 2, *warps))), tuple(dict.fromkeys((1, 2, *rows)))
    for w, n, r in itertools.product(warps, lengths if s.streamed else (0,), rows):
        tiles = dict(base.tiles)
        for d in s.streamed:
            tiles[d] = min(n, power_of_two(sizes[d]))
        if last is not None:
            tiles[last] = min(r, power_of_two(sizes[last]))
        made = replace(base, tiles=tiles, warps=w)
        yield made
        if s.streamed and r == 1:  # copies ahead of their use take no cache hints, and single elements badly
            yield replace(made, stages=1)


def _vectors(base: TritonConfig, s: Shape, sizes: Mapping[str, int], effort: Effort) -> Iterator[TritonConfig]:
    """A fold whose products have no rows reads at the memory's rate: what counts is how much is on its way."""
    last = s.parallel[-1] if s.parallel else None
    full = itertools.product((1, 2, 4, 8), (16, 32, 64, 128, 256), (1, 2, 4, 8), (1, 2, 3, 4, 6))
    for rows, n, warps, stages in _QUICK_VECTORS if effort == "quick" else full:
        tiles = dict(base.tiles)
        for d in s.streamed:
            tiles[d] = min(n, power_of_two(sizes[d]))
        if last is not None:
            tiles[last] = min(rows, power_of_two(sizes[last]))
        yield replace(base, tiles=tiles, warps=warps, stages=stages)
