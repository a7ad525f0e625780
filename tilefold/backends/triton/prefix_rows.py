"""Prefixes of a fold along rows, the last axis in memory: running sums, products and log-sum-exps.

Lanes lie along the row, which a thread block scans in chunks, most rows in one; short rows are several a block. Where
rows are few each is cut into blocks, as columns are (`prefixes`): a first kernel folds these, and each block of the
second starts from the merge of those before it.

A log-sum-exp's state is a pair, the largest element and the sum of the others' exponentials to it: a merge has one
exponential, and the logarithm is taken where a prefix is stored. Inductor's merges have both: 1,200 rows of 3,001 took
146 us on an H100, where their bytes take 9.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from tilefold.backends.triton.prelude import INTERPRETED
from tilefold.backends.triton.written import Launch
from tilefold.tile.pieces import largest_power, power_of_two

#: Lanes of a chunk, the widest last; elements of a thread block, and of a thread.
_CHUNKS, _AREA, _EACH = (1024, 2048, 4096), 2048, 16
#: Bytes that a thread moves at once.
_VECTOR = 16
#: Thread blocks that a multiprocessor should have.
_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Fold:
    """A fold whose states are one variable or several: their names; the merge of a state and a later one, whose names
    end in _2, as statements; an element x as a state; a state's value; a neutral element."""

    state: tuple[str, ...]
    merge: str
    element: str
    value: str
    neutral: str

    def named(self, end: str) -> str:
        """The variables of a state."""
        return ", ".join(n + end for n in self.state)


_PAIR = """top = tl.maximum(a, a_2)
    factor = tl.exp(-tl.where(a == a_2, 0, tl.abs(a - a_2)))
    return top, tl.where(a >= a_2, s + s_2 * factor, s * factor + s_2)"""
FOLDS = {
    "sum": Fold(("a",), "return a + a_2", "x", "a", "0"),
    "prod": Fold(("a",), "return a * a_2", "x", "a", "1"),
    "logsumexp": Fold(("a", "s"), _PAIR, "(x, tl.full(x.shape, 1, x.dtype))", "a + tl.log(s)", 'float("-inf")'),
}

_SOURCE = """import triton
import triton.language as tl


@triton.jit
def merge({own}, {next}):
    {merge}


@triton.jit
def place(outer, n, blocks, height):
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks * {rows} + tl.arange(0, {rows})
    start = row * n // {even} * {even} + pid % blocks * height
    return row, pid % blocks, start, tl.where(row < outer, tl.minimum(start + height, row * n + n), 0)


@triton.jit
def read(p_x, row, start, stop, k, n):
    at = (start + k)[:, None] + tl.arange(0, {lanes})[None, :]
    whole = (at // {even} * {even} >= (row * n)[:, None]) & (at // {even} * {even} + {even} <= stop[:, None])
    torn = (at >= (row * n)[:, None]) & (at < stop[:, None]) & ~whole
    x = tl.load(p_x + at, mask=whole, other={neutral})
    {edges}
    return at, whole, torn, x.to({kind})


@triton.jit
def write(p_y, at, whole, torn, y):
    y = y.to(p_y.dtype.element_ty)
    tl.store(p_y + at, y, mask=whole)
    {torn}


@triton.jit
def nothing():
    x = tl.full([{rows}], {neutral}, {kind})
    return {element}


@triton.jit
def totals(p_x, p_total, outer, n, blocks, height):
    row, block, start, stop = place(outer, n, blocks, height)
    {own} = nothing()
    for k in range(0, height, {lanes}):
        at, whole, torn, x = read(p_x, row, start, stop, k, n)
        {next} = tl.reduce({element}, 1, merge)
        {own} = merge({own}, {next})
    tl.store(p_total + row * blocks + block, {value}, mask=row < outer)


@triton.jit
def ahead_of(p_total, row, block, outer, blocks):
    ahead = tl.arange(0, {groups})[None, :]
    live = (row < outer)[:, None] & (ahead < block)
    x = tl.load(p_total + (row[:, None] * blocks + ahead), mask=live, other={neutral})
    return tl.reduce({element}, 1, merge)


@triton.jit
def prefixes(p_x, p_total, p_y, outer, n, blocks, height):
    row, block, start, stop = place(outer, n, blocks, height)
    {before} = ahead_of(p_total, row, block, outer, blocks)
    for k in range(0, height, {lanes}):
        at, whole, torn, x = read(p_x, row, start, stop, k, n)
        {next} = tl.associative_scan({element}, 1, merge)
        {own} = merge({spread}, {next})
        write(p_y, at, whole, torn, {value})
        {next} = tl.reduce({element}, 1, merge)
        {before} = merge({before}, {next})


@triton.jit
def whole_rows(p_x, p_y, outer, n):
    row, block, start, stop = place(outer, n, 1, {lanes})
    at, whole, torn, x = read(p_x, row, start, stop, 0, n)
    {own} = tl.associative_scan({element}, 1, merge)
    write(p_y, at, whole, torn, {value})
"""


@dataclass(frozen=True, slots=True)
class RowCut:
    """How a tensor [outer, n] is shared: rows of a thread block and lanes of its chunks, blocks of a row, elements of
    each. A row's first chunk begins at a multiple of `even`, at most that many elements before it."""

    rows: int
    lanes: int
    blocks: int
    height: int
    even: int

    def grid(self, outer: int) -> int:
        """Thread blocks."""
        return -(-outer // self.rows) * self.blocks

    @property
    def warps(self) -> int:
        """Of a thread block."""
        return max(1, self.rows * self.lanes // (32 * _EACH))


def row_cut(outer: int, n: int, nbytes: int, units: int) -> RowCut:
    """Chunks that leave few lanes idle, and as many blocks of a row as fill a device of so many multiprocessors.
    nbytes: of the narrowest element that is moved."""
    even = max(1, _VECTOR // nbytes)
    span = n if n % even == 0 else n + even - 1
    rows, lanes = 1, min(reversed(_CHUNKS), key=lambda c: -(-span // c) * c)
    if span <= _CHUNKS[-1]:
        lanes = max(even, power_of_two(span))
        rows = largest_power(max(1, min(_AREA // lanes, outer // (_BLOCKS * units))))
    wanted = max(1, min(-(-_BLOCKS * units // -(-outer // rows)), span // lanes))
    height = -(-span // wanted // lanes) * lanes
    return RowCut(rows, lanes, -(-span // height), height, even)


@cache
def source(kind: str, how: RowCut, dtype: str, *, torn: bool, interpreted: bool = False) -> str:
    """The kernels of a fold. dtype: of its states; torn: whether rows begin or end inside vectors, of which elements
    are then moved one by one."""
    f = FOLDS[kind]
    text = _SOURCE.format(
        own=f.named(""), next=f.named("_2"), before=f.named("_0"), merge=f.merge, element=f.element, value=f.value,
        spread=", ".join(f"tl.broadcast_to({n}_0[:, None], [{how.rows}, {how.lanes}])" for n in f.state),
        neutral=f.neutral, kind=dtype, rows=how.rows, lanes=how.lanes, even=how.even,
        groups=power_of_two(max(1, how.blocks)),
        edges=f"x = tl.where(whole, x, tl.load(p_x + at, mask=torn, other={f.neutral}))" if torn else "",
        torn="tl.store(p_y + at, y, mask=torn)" if torn else "",
    )  # fmt: skip
    return text.replace(" in range(", " in tf_range(") + INTERPRETED if interpreted else text


def launches(x: torch.Tensor, y: torch.Tensor, kind: str, wide: torch.dtype, dtype: str, units: int) -> list[Launch]:
    """Those that put the prefixes of x [rows, n] into y. wide: the type of states, dtype: its name."""
    outer, n = x.shape
    how = row_cut(outer, n, min(x.element_size(), y.element_size()), units)
    torn = n % how.even != 0
    text = source(kind, how, dtype, torn=torn, interpreted=x.device.type == "cpu")
    grid = how.grid(outer)
    if how.blocks == 1 and how.height == how.lanes:
        return [Launch(text, "whole_rows", (x, y), (outer, n), grid, how.warps)]
    total, sizes = x.new_empty((outer, how.blocks), dtype=wide), (outer, n, how.blocks, how.height)
    found = [Launch(text, "totals", (x, total), sizes, grid, how.warps)] if how.blocks > 1 else []
    return [*found, Launch(text, "prefixes", (x, total, y), sizes, grid, how.warps)]
