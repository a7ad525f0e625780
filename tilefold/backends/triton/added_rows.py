"""Rows added to a table's rows at indices that may repeat: table[at[k]] += rows[k], rounded once.

A row that is added alone is added where the table is. Those that share a row of the table are summed first, in at least
float32 and in any order (atomic additions): one of them, the owner, has the sum. So memory of the table's type and size
is all that is needed, and nothing is sorted. A table in 16 bits that is summed in float32 as a whole is written, read
and written again, whatever few rows are added; torch's own gradient of an embedding sorts. A table that is as wide as
the sums takes the atomic additions itself.
"""

from __future__ import annotations

from functools import cache

import torch

from tilefold.backends.triton.prelude import prelude
from tilefold.backends.triton.written import Launch

#: Elements of a thread block's tile at most, columns and rows of it, its warps; indices of a block that counts them.
_TILE, _COLUMNS, _ROWS, _WARPS, _STEP = 2048, 1024, 256, 4, 256

_CHECK = "    tf_exist(exists, k < n)\n"
_SOURCE = """

@triton.jit
def rows_at(p_at, k, live, rows):
    row = tl.load(p_at + k, mask=live, other=0).to(tl.int64)
    row = tl.where(row < 0, row + rows, row)
    return row, (row >= 0) & (row < rows)


@triton.jit
def places(p_at, p_count, p_owner, k, live, rows, skipped):
    row, exists = rows_at(p_at, k, live, rows)
    live = live & exists & (row != skipped)
    return row, live, tl.load(p_count + row, mask=live, other=0), tl.load(p_owner + row, mask=live, other=0)


@triton.jit
def counted(p_at, p_count, p_owner, n, rows, skipped):
    k = tl.program_id(0) * {step} + tl.arange(0, {step})
    row, exists = rows_at(p_at, k, k < n, rows)
    tf_exist(exists, k < n)
    live = (k < n) & (row != skipped) & exists
    tl.atomic_add(p_count + row, 1, mask=live, sem="relaxed")
    tl.store(p_owner + row, k, mask=live)


@triton.jit
def tile(n, width):
    pid = tl.program_id(0)
    across = tl.cdiv(width, {columns})
    k = (pid // across) * {high} + tl.arange(0, {high})
    columns = (pid % across) * {columns} + tl.arange(0, {columns})
    return k, columns, k < n, (columns < width)[None, :]


@triton.jit
def added(p_at, p_rows, p_table, n, rows, skipped, width, stride):
    k, columns, live, wide = tile(n, width)
    row, exists = rows_at(p_at, k, live, rows)
    tf_exist(exists, k < n)
    live = (live & exists & (row != skipped))[:, None] & wide
    x = tl.load(p_rows + k.to(tl.int64)[:, None] * stride + columns[None, :], mask=live, other=0)
    place = p_table + row[:, None] * width + columns[None, :]
    tl.atomic_add(place, x.to(p_table.dtype.element_ty), mask=live, sem="relaxed")


@triton.jit
def begun(p_at, p_count, p_owner, p_rows, p_table, p_sum, n, rows, skipped, width, stride):
    k, columns, live, wide = tile(n, width)
    row, live, count, owner = places(p_at, p_count, p_owner, k, live, rows, skipped)
    own = live & (owner == k)
    x = tl.load(p_rows + k.to(tl.int64)[:, None] * stride + columns[None, :], mask=own[:, None] & wide, other=0)
    place = p_table + row[:, None] * width + columns[None, :]
    y = tl.load(place, mask=own[:, None] & wide, other=0).to({wide}) + x.to({wide})
    tl.store(place, y.to(p_table.dtype.element_ty), mask=(own & (count == 1))[:, None] & wide)
    slot = row if {shared} else k.to(tl.int64)
    tl.store(p_sum + slot[:, None] * width + columns[None, :], y, mask=(own & (count > 1))[:, None] & wide)


@triton.jit
def gathered(p_at, p_count, p_owner, p_rows, p_sum, n, rows, skipped, width, stride):
    k, columns, live, wide = tile(n, width)
    row, live, count, owner = places(p_at, p_count, p_owner, k, live, rows, skipped)
    other = (live & (owner != k))[:, None] & wide
    x = tl.load(p_rows + k.to(tl.int64)[:, None] * stride + columns[None, :], mask=other, other=0)
    slot = row if {shared} else owner.to(tl.int64)
    tl.atomic_add(p_sum + slot[:, None] * width + columns[None, :], x.to({wide}), mask=other, sem="relaxed")


@triton.jit
def ended(p_at, p_count, p_owner, p_table, p_sum, n, rows, skipped, width):
    k, columns, live, wide = tile(n, width)
    row, live, count, owner = places(p_at, p_count, p_owner, k, live, rows, skipped)
    own = (live & (owner == k) & (count > 1))[:, None] & wide
    slot = row if {shared} else k.to(tl.int64)
    y = tl.load(p_sum + slot[:, None] * width + columns[None, :], mask=own, other=0)
    tl.store(p_table + row[:, None] * width + columns[None, :], y.to(p_table.dtype.element_ty), mask=own)
"""


@cache
def source(high: int, columns: int, *, shared: bool, wide: str, checked: bool = True, interpreted: bool = False) -> str:
    """The kernels, for tiles of so many rows and columns. shared: rows of a table have places for sums, else rows that
    are added. wide: the type of sums. checked: an index that does not exist is an error; else nothing is added for
    it."""
    text = _SOURCE.format(step=_STEP, high=high, columns=columns, shared=shared, wide=wide)
    text = text if checked else text.replace(_CHECK, "")
    return prelude(text, interpreted=interpreted) + text


def launches(table: torch.Tensor, at: torch.Tensor, rows: torch.Tensor, skipped: int, *, checked: bool) -> list[Launch]:
    """Of `run`; the tensors may be fake ones."""
    (n, width), k = table.shape, at.shape[0]
    if not rows.numel():
        return []
    wide, of = (torch.float64, "tl.float64") if table.dtype is torch.float64 else (torch.float32, "tl.float32")
    columns = min(_COLUMNS, 1 << (width - 1).bit_length())
    high, shared = min(_ROWS, _TILE // columns), n < k
    text = source(high, columns, shared=shared, wide=of, checked=checked, interpreted=table.device.type == "cpu")
    sizes, grid = (k, n, skipped, width), -(-k // high) * -(-width // columns)
    if table.dtype is wide:
        return [Launch(text, "added", (at, rows, table), (*sizes, rows.stride(0)), grid, _WARPS)]
    count = table.new_zeros(n, dtype=torch.int32)
    owner, total = torch.empty_like(count), table.new_empty((min(n, k), width), dtype=wide)
    where = at, count, owner
    return [
        Launch(text, "counted", where, (k, n, skipped), -(-k // _STEP), _WARPS),
        Launch(text, "begun", (*where, rows, table, total), (*sizes, rows.stride(0)), grid, _WARPS),
        Launch(text, "gathered", (*where, rows, total), (*sizes, rows.stride(0)), grid, _WARPS),
        Launch(text, "ended", (*where, table, total), sizes, grid, _WARPS),
    ]


def run(table: torch.Tensor, at: torch.Tensor, rows: torch.Tensor, skipped: int, *, checked: bool) -> torch.Tensor:
    """The table with rows added, in place: table, contiguous [n, width]; at, integers [k], where negative ones count
    from the end; rows [k, width], columns side by side. Nothing is added to row `skipped` (-1: there is none). checked:
    see `source`. (Tensors of a CPU: by Triton's interpreter.)"""
    for launch in launches(table, at, rows, skipped, checked=checked):
        launch.run()
    return table
