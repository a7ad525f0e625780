"""Rows added to a table's rows at indices that may repeat: table[at[k]] += rows[k], rounded once.

A row that is added alone is added where the table is. Those that share a row of the table are summed first, in at least
float32 and in any order (atomic additions): one of them, the owner, has the sum. So memory of the table's type and size
is all that is needed, and nothing is sorted. A table in 16 bits that is summed in float32 as a whole is written, read
and written again, whatever few rows are added; torch's own gradient of an embedding sorts. A table that is as wide as
the sums takes the atomic additions itself.
"""

from __future__ import annotations

import torch

from tilefold.backends.triton.build import module_of
from tilefold.backends.triton.prelude import ASSERTING, prelude

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
def counted(p_at, p_count, p_owner, n, rows, skipped, STEP: tl.constexpr):
    k = tl.program_id(0) * STEP + tl.arange(0, STEP)
    row, exists = rows_at(p_at, k, k < n, rows)
    tf_exist(exists, k < n)
    live = (k < n) & (row != skipped) & exists
    tl.atomic_add(p_count + row, 1, mask=live, sem="relaxed")
    tl.store(p_owner + row, k, mask=live)


@triton.jit
def tile(n, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    pid = tl.program_id(0)
    across = tl.cdiv(width, COLUMNS)
    k = (pid // across) * ROWS + tl.arange(0, ROWS)
    columns = (pid % across) * COLUMNS + tl.arange(0, COLUMNS)
    return k, columns, k < n, (columns < width)[None, :]


@triton.jit
def added(p_at, p_rows, p_table, n, rows, skipped, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    k, columns, live, wide = tile(n, width, ROWS, COLUMNS)
    row, exists = rows_at(p_at, k, live, rows)
    tf_exist(exists, k < n)
    live = (live & exists & (row != skipped))[:, None] & wide
    x = tl.load(p_rows + k.to(tl.int64)[:, None] * stride + columns[None, :], mask=live, other=0)
    place = p_table + row[:, None] * width + columns[None, :]
    tl.atomic_add(place, x.to(p_table.dtype.element_ty), mask=live, sem="relaxed")


@triton.jit
def begun(p_at, p_count, p_owner, p_rows, p_table, p_sum, n, rows, skipped, width, stride, ROWS: tl.constexpr,
          COLUMNS: tl.constexpr, SHARED: tl.constexpr, WIDE: tl.constexpr):
    k, columns, live, wide = tile(n, width, ROWS, COLUMNS)
    row, live, count, owner = places(p_at, p_count, p_owner, k, live, rows, skipped)
    own = live & (owner == k)
    x = tl.load(p_rows + k.to(tl.int64)[:, None] * stride + columns[None, :], mask=own[:, None] & wide, other=0)
    place = p_table + row[:, None] * width + columns[None, :]
    y = tl.load(place, mask=own[:, None] & wide, other=0).to(WIDE) + x.to(WIDE)
    tl.store(place, y.to(p_table.dtype.element_ty), mask=(own & (count == 1))[:, None] & wide)
    slot = row if SHARED else k.to(tl.int64)
    tl.store(p_sum + slot[:, None] * width + columns[None, :], y, mask=(own & (count > 1))[:, None] & wide)


@triton.jit
def gathered(p_at, p_count, p_owner, p_rows, p_sum, n, rows, skipped, width, stride, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, SHARED: tl.constexpr, WIDE: tl.constexpr):
    k, columns, live, wide = tile(n, width, ROWS, COLUMNS)
    row, live, count, owner = places(p_at, p_count, p_owner, k, live, rows, skipped)
    other = (live & (owner != k))[:, None] & wide
    x = tl.load(p_rows + k.to(tl.int64)[:, None] * stride + columns[None, :], mask=other, other=0)
    slot = row if SHARED else owner.to(tl.int64)
    tl.atomic_add(p_sum + slot[:, None] * width + columns[None, :], x.to(WIDE), mask=other, sem="relaxed")


@triton.jit
def ended(p_at, p_count, p_owner, p_table, p_sum, n, rows, skipped, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
          SHARED: tl.constexpr):
    k, columns, live, wide = tile(n, width, ROWS, COLUMNS)
    row, live, count, owner = places(p_at, p_count, p_owner, k, live, rows, skipped)
    own = (live & (owner == k) & (count > 1))[:, None] & wide
    slot = row if SHARED else k.to(tl.int64)
    y = tl.load(p_sum + slot[:, None] * width + columns[None, :], mask=own, other=0)
    tl.store(p_table + row[:, None] * width + columns[None, :], y.to(p_table.dtype.element_ty), mask=own)
"""


def source(*, checked: bool = True, interpreted: bool = False) -> str:
    """The kernels. checked: an index that does not exist is an error; else nothing is added for it."""
    text = _SOURCE if checked else _SOURCE.replace(_CHECK, "")
    return prelude(text, interpreted=interpreted) + text


def run(table: torch.Tensor, at: torch.Tensor, rows: torch.Tensor, skipped: int, *, checked: bool) -> torch.Tensor:
    """The table with rows added, in place: table, contiguous [n, width]; at, integers [k], where negative ones count
    from the end; rows [k, width], columns side by side. Nothing is added to row `skipped` (-1: there is none). checked:
    see `source`. (Tensors of a CPU: by Triton's interpreter.)"""
    import triton.language as tl  # noqa: PLC0415 (an optional package)

    (n, width), k = table.shape, at.shape[0]
    if not rows.numel():
        return table
    text = source(checked=checked, interpreted=table.device.type == "cpu")
    made = module_of(text, "added_rows")
    wide, of = (torch.float64, tl.float64) if table.dtype is torch.float64 else (torch.float32, tl.float32)
    columns = min(_COLUMNS, 1 << (width - 1).bit_length())
    high, shared = min(_ROWS, _TILE // columns), n < k
    grid = (-(-k // high) * -(-width // columns),)
    checks = {"debug": True, "sanitize_overflow": False} if ASSERTING in text else {}
    sizes = (k, n, skipped, width)
    if table.dtype is wide:
        made.added[grid](at, rows, table, *sizes, rows.stride(0), high, columns, num_warps=_WARPS, **checks)
        return table
    count = torch.zeros(n, dtype=torch.int32, device=table.device)
    owner = torch.empty_like(count)
    total = torch.empty((min(n, k), width), dtype=wide, device=table.device)
    where, fixed = (at, count, owner), (high, columns, shared)
    made.counted[(-(-k // _STEP),)](*where, k, n, skipped, _STEP, num_warps=_WARPS, **checks)
    made.begun[grid](*where, rows, table, total, *sizes, rows.stride(0), *fixed, of, num_warps=_WARPS)
    made.gathered[grid](*where, rows, total, *sizes, rows.stride(0), *fixed, of, num_warps=_WARPS)
    made.ended[grid](*where, table, total, *sizes, *fixed, num_warps=_WARPS)
    return table
