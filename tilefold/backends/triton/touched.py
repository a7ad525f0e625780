"""What the warps of a thread block touch with one access of a tensor: addresses computed, as lanes have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import torch

from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import Call, Expr, call, dims_used, loads, transform
from tilefold.backends.triton.lane_steps import lane_step, looked_up
from tilefold.backends.triton.memory import SECTOR
from tilefold.backends.triton.narrow import LEAST
from tilefold.backends.triton.traffic import VECTOR, WARP
from tilefold.tensor.index_simplify import const
from tilefold.tile.affine import coefficients
from tilefold.tile.pieces import power_of_two

#: Bytes of a line of the first-level cache; lines that a multiprocessor looks up a second: one a cycle.
LINE, CYCLES = 128, 1.7e9
#: Accesses of warps that are looked at, of a tile's; elements of a tile that are.
LOOKED_AT, MOST = 256, 1 << 16
#: Accesses that are remembered: the ways to cut a group have most of theirs in common.
KNOWN = 256


@dataclass(frozen=True, slots=True)
class Access:
    """A tile of a tensor, read or written by a thread block.

    index: one expression a tensor axis. unit_axis: the one of stride 1. nbytes: of an element. declared: extents as the
    kernel has them; shape, strides: as they are, in elements. dims: of the tile in order, each with its start, stop and
    lanes. sizes: extents of these dims, and of those that an index has. threads: of a block. multiplies: whether the
    kernel has products of matrices. joined: whether the last two dims are one axis of lanes, pairs of neighbours
    (`pairs.both_of`).
    """

    index: tuple[Expr, ...]
    unit_axis: int | None
    nbytes: int
    declared: tuple[Expr, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dims: tuple[tuple[str, int, int, int], ...]
    sizes: tuple[tuple[str, int], ...]
    syms: tuple[tuple[str, int], ...]
    threads: int
    multiplies: bool
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Tile:
    """What a tile is. nbytes: used; sectors: numbers of those touched, of 1 / cut of the tile; lines: of the cache that
    warps look up; sent: bytes of sectors of all warps' accesses; vector: neighbours that a lane has in one of these;
    narrow: accesses of warps whose lanes have less than a copy takes, for that is all that rows are a multiple of."""

    nbytes: float
    sectors: torch.Tensor
    cut: float
    lines: float
    sent: float
    vector: int
    narrow: float = 0.0


@lru_cache(maxsize=KNOWN)
def touched(a: Access) -> Tile:
    """Of one tile."""
    dims, sizes = {d: place for d, *place in a.dims}, dict(a.sizes)
    order, env = list(dims), Env(anywhere, sizes, dict(a.syms))
    ranges, lanes, cut = dict[str, tuple[int, int]](), list[int](), 1.0
    room = MOST
    for d in reversed(order):
        start, _, n = dims[d]
        kept = max(1, min(n, room))
        room //= kept
        cut *= n / kept
        lanes.insert(0, kept)
        ranges[d] = (start, start + kept)
    grid = Grid({d: ranges[d] for d in order})
    shape, place = tuple(lanes), torch.zeros((1,) * len(order), dtype=torch.int64)
    there = torch.ones((1,) * len(order), dtype=torch.bool)
    near = None if a.unit_axis is None else coefficients(a.index[a.unit_axis])
    elsewhere = frozenset(d for n, e in enumerate(a.index) if n != a.unit_axis for d in dims_used(e))
    plain = frozenset(near or ()) - elsewhere  # other strides are numbers of the call, which Triton does not know
    for e, extent, stride in zip(a.index, a.shape, a.strides, strict=True):
        loaded = any(True for _ in loads(e))
        at = evaluate(transform(e, _around) if loaded else e, grid, env).to(torch.int64)
        if loaded:
            at = at % max(1, extent)
        there = there & (at >= 0) & (at < extent)
        place = place + at * stride
    for n, d in enumerate(order):
        valid = torch.arange(*ranges[d]) < min(dims[d][1], sizes[d])
        there = there & valid.reshape([-1 if n == k else 1 for k in range(len(order))])
    nbytes = a.nbytes
    place, there = (place * nbytes).broadcast_to(shape), there.broadcast_to(shape)
    along, between = [d for d in order if dims[d][2] > 1], False
    if along and not a.multiplies and not a.joined and a.unit_axis is not None:
        extents = {d: const(n) for d, n in a.sizes}
        step = lane_step(a.unit_axis, a.declared, a.index, along, extents, lambda d, n: n % dims[d][2] == 0)
        if looked_up(a.unit_axis, a.index, along):
            between = True
        elif step is not None and 0 < step * nbytes < SECTOR:
            firsts = place.movedim(order.index(along[-1]), -1)[..., 0]  # dims of one index may be behind it
            between = step != 1 or bool((firsts % VECTOR != 0).any())
    if a.joined:
        place, there, order = place.flatten(-2), there.flatten(-2), order[:-1]
    axis, vector, whole = (
        _laid(place, order, plain, nbytes, a.threads) if not between else (order.index(along[-1]), 1, VECTOR)
    )
    turned = [axis, *(n for n in range(len(order)) if n != axis)] if order else []
    flat = place.permute(turned[::-1]).reshape(-1)
    valid = there.permute(turned[::-1]).reshape(-1)
    used = float(valid.sum()) * nbytes * cut
    tile = torch.unique(flat[valid] // SECTOR)
    a_warp = min(flat.numel(), WARP * vector)
    flat, valid = flat.reshape(-1, a_warp), valid.reshape(-1, a_warp)
    every = max(1, len(flat) // LOOKED_AT)
    some, more = flat[::every], len(flat) / len(flat[::every]) * cut
    here = valid[::every]
    lines, sent = _distinct(some // LINE, here) * more, _distinct(some // SECTOR, here) * SECTOR * more
    narrow = float(here.any(1).sum()) * more if whole * nbytes < LEAST else 0.0
    return Tile(used, tile, cut, lines, sent, vector, narrow)


def _distinct(x: torch.Tensor, valid: torch.Tensor) -> float:
    """Different numbers of each row, over all rows, of those that are valid."""
    x = torch.where(valid, x, -1).sort(1).values
    return float((x[:, 1:] != x[:, :-1]).sum() + x.shape[0] - (x[:, 0] == -1).sum())


def _laid(
    place: torch.Tensor, order: Sequence[str], plain: frozenset[str], nbytes: int, threads: int
) -> tuple[int, int, int]:
    """The axis along which a warp's lanes lie, and elements of a lane: neighbours at multiples of their bytes; and what
    these would be of a larger tile."""
    best, axis = 1, 0
    for n, d in enumerate(order):
        if d not in plain or place.shape[n] == 1:
            continue
        along = place.movedim(n, -1)
        run = along.shape[-1] if bool((along.diff(dim=-1) == nbytes).all()) else 1
        if run > best:
            best, axis = run, n
    if best == 1 or not order:
        return axis if not order or place.shape[axis] > 1 else _first(place), 1, VECTOR
    firsts = place.movedim(axis, -1)[..., 0]
    vector = max(1, VECTOR // nbytes)
    while vector > 1 and (best % vector or bool((firsts % (vector * nbytes) != 0).any())):
        vector //= 2
    return axis, max(1, min(vector, power_of_two(place.numel() // threads))), vector


def _first(place: torch.Tensor) -> int:
    """The first axis of more than one index."""
    return next((n for n, k in enumerate(place.shape) if k > 1), 0)


def _around(e: Expr) -> Expr | None:
    """A checked index, for what stands for a loaded one: the check would hold most of those numbers at the last place,
    and a read at places without order would be the read of one."""
    return call("mod", *e.args) if isinstance(e, Call) and e.op == "within" else None


def anywhere(tensor: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Stands for what an index is loaded from: numbers without order, others for each tensor."""
    mixed = torch.tensor(12345 + crc32(tensor.encode()) % 104729)
    for n, x in enumerate(at):
        mixed = mixed + x.to(torch.int64) * (7919 + 104729 * n)
    return (mixed * 2654435761 >> 7) & 0xFFFFF


@dataclass(frozen=True, slots=True)
class Touch:
    """An access of a tensor. nbytes: used by a tile. sectors: bytes of the sectors of a tile; lines: of the first-level
    cache, of all of its warps' accesses; sent: bytes of sectors of these. times: tiles, of all thread blocks. lanes: of
    a tile's dims; narrow: see `Tile`."""

    tensor: str
    stored: bool
    nbytes: float
    sectors: float
    lines: float
    sent: float
    times: float
    lanes: tuple[int, ...] = ()
    narrow: float = 0.0

    @property
    def wasted(self) -> float:
        """Bytes that warps ask the cache for, over the bytes that they use."""
        return self.sent / max(1.0, self.nbytes)
