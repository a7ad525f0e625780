"""Prefixes of a fold down an axis that is not the last one in memory: running sums, products and log-sum-exps
of columns (those of rows: `prefix_rows`).

The fold's state is one number a column. Columns are lanes, and rows are taken by chunks that a thread holds whole, so
that a chunk's prefixes are a scan in registers by the fold's merge (Blelloch, "Prefix sums and their applications",
1990). Where columns alone do not fill the device, rows are cut into blocks over the grid: a first kernel folds each
block, and each block of the second starts from the merge of those before it.

Rows that are read from the end, or written from there, cost nothing: sums of what is behind each place (suffixes), as
gradients of running sums are, are turned rows, summed and turned again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from tilefold.backends.triton import prefix_rows
from tilefold.backends.triton.prelude import INTERPRETED
from tilefold.backends.triton.written import Launch
from tilefold.errors import BackendError

#: Merge and neutral element of each fold.
FOLDS: Mapping[str, tuple[str, str]] = {
    "sum": ("a + b", "0"),
    "prod": ("a * b", "1"),
    "logsumexp": ("tl.maximum(a, b) + tl.log(1 + tl.exp(-tl.where(a == b, 0, tl.abs(a - b))))", 'float("-inf")'),
}
#: Warps of a block; bytes that a thread loads at once; rows of a chunk and lanes at most, lanes at least.
_WARPS, _VECTOR, _ROWS, _LANES, _LEAST = 4, 16, 16, 1024, 32
#: Thread blocks that a multiprocessor should have, and rows of a block of theirs at least.
_BLOCKS, _FEW = 4, 64
#: Types of states.
_TYPES = {torch.float64: "tl.float64", torch.float32: "tl.float32", torch.int64: "tl.int64"}

_SOURCE = """import triton
import triton.language as tl


@triton.jit
def merge(a, b):
    return {merge}


@triton.jit
def place(inner, blocks):
    pid = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(inner, {lanes})
    lanes = (pid % across) * {lanes} + tl.arange(0, {lanes})
    return pid // across // blocks, (pid // across) % blocks, lanes, lanes < inner


@triton.jit
def totals(p_x, p_total, n, inner, blocks, height):
    outer, block, lanes, live = place(inner, blocks)
    start = block * height
    stop = tl.minimum(start + height, n)
    rows = tl.arange(0, {rows})
    state = tl.full([{rows}, {lanes}], {neutral}, {kind})
    for k in range(start, stop, {rows}):
        ok = ((k + rows) < stop)[:, None] & live[None, :]
        x = tl.load(p_x + (outer * n + {read})[:, None] * inner + lanes[None, :], mask=ok, other={neutral})
        state = merge(state, x.to({kind}))
    tl.store(p_total + (outer * blocks + block) * inner + lanes, tl.reduce(state, 0, merge), mask=live)


@triton.jit
def prefixes(p_x, p_total, p_y, n, inner, blocks, height):
    outer, block, lanes, live = place(inner, blocks)
    start = block * height
    stop = tl.minimum(start + height, n)
    rows = tl.arange(0, {rows})
    state = tl.full([{lanes}], {neutral}, {kind})
    for k in range(0, block, 1):
        state = merge(state, tl.load(p_total + (outer * blocks + k) * inner + lanes, mask=live, other={neutral}))
    for k in range(start, stop, {rows}):
        ok = ((k + rows) < stop)[:, None] & live[None, :]
        x = tl.load(p_x + (outer * n + {read})[:, None] * inner + lanes[None, :], mask=ok, other={neutral}).to({kind})
        y = merge(tl.broadcast_to(state[None, :], [{rows}, {lanes}]), tl.associative_scan(x, 0, merge))
        at = (outer * n + {written})[:, None] * inner + lanes[None, :]
        tl.store(p_y + at, y.to(p_y.dtype.element_ty), mask=ok)
        state = merge(state, tl.reduce(x, 0, merge))
"""


#: The row of a place, and of one counted from the end.
_ROW, _TURNED = "k + rows", "n - 1 - (k + rows)"
#: Which rows are counted from the end: those that are read, those that are written.
READ, WRITTEN = "r", "w"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor [outer, n, inner] is shared: lanes of a thread block, rows of its chunks, blocks of rows, rows of
    each."""

    lanes: int
    rows: int
    blocks: int
    height: int

    def grid(self, outer: int, inner: int) -> int:
        """Thread blocks."""
        return outer * self.blocks * -(-inner // self.lanes)


def cut(outer: int, n: int, inner: int, nbytes: int, units: int) -> Cut:
    """As many blocks of rows as fill a device of so many multiprocessors, of enough rows each. nbytes: of an element;
    a thread has one vector of columns and all rows of a chunk."""
    most = min(_LANES, _WARPS * 32 * _VECTOR // nbytes)
    lanes = min(most, max(_LEAST, 1 << (inner - 1).bit_length()))
    rows = min(_ROWS, 4 * nbytes)
    columns = max(1, outer * -(-inner // lanes))
    wanted = min(-(-_BLOCKS * units // columns), -(-n // _FEW))
    height = -(-n // max(1, wanted) // rows) * rows
    return Cut(lanes, rows, -(-n // height), height)


@cache
def source(fold: str, rows: int, lanes: int, kind: str, turned: str = "", *, interpreted: bool = False) -> str:
    """Both kernels of a fold, for chunks of so many rows and lanes. kind: the type of its state. turned: of READ and
    WRITTEN. BackendError: there is no fold of that name."""
    if fold not in FOLDS:
        raise BackendError(f"there is no fold {fold}", hint=f"one of {', '.join(FOLDS)}")
    merge, neutral = FOLDS[fold]
    read, written = (_TURNED if x in turned else _ROW for x in (READ, WRITTEN))
    text = _SOURCE.format(merge=merge, neutral=neutral, rows=rows, lanes=lanes, kind=kind, read=read, written=written)
    return text.replace(" in range(", " in tf_range(") + INTERPRETED if interpreted else text


def launches(
    x: torch.Tensor, dim: int, kind: str, dtype: torch.dtype, units: int, turned: str = ""
) -> tuple[torch.Tensor, list[Launch]]:
    """What `run` gives, once its launches have run; the tensor may be a fake one. BackendError: turned rows that are
    contiguous."""
    outer, n, inner = prod(x.shape[:dim]), x.shape[dim], prod(x.shape[dim + 1 :])
    y = x.new_empty(x.shape, dtype=dtype)
    if not x.numel():
        return y, []
    wide = torch.float64 if dtype is torch.float64 else torch.float32 if dtype.is_floating_point else torch.int64
    if inner == 1 and kind in FOLDS:
        if turned:
            raise BackendError("rows that are contiguous are not turned")
        return y, prefix_rows.launches(x.view(outer, n), y, kind, wide, _TYPES[wide], units)
    how = cut(outer, n, inner, x.element_size(), units)
    text = source(kind, how.rows, how.lanes, _TYPES[wide], turned, interpreted=x.device.type == "cpu")
    total = x.new_empty((outer, how.blocks, inner), dtype=wide)
    grid, sizes = how.grid(outer, inner), (n, inner, how.blocks, how.height)
    found = [Launch(text, "totals", (x, total), sizes, grid, _WARPS)] if how.blocks > 1 else []
    return y, [*found, Launch(text, "prefixes", (x, total, y), sizes, grid, _WARPS)]


def run(x: torch.Tensor, dim: int, kind: str, dtype: torch.dtype, units: int, turned: str = "") -> torch.Tensor:
    """The prefixes of `kind` of a contiguous tensor along dim, on its device (a CPU's: by Triton's interpreter); in
    dtype, the state in at least float32 or int64. turned: whether the tensor is READ turned along dim, and the result
    WRITTEN so."""
    y, found = launches(x, dim, kind, dtype, units, turned)
    for launch in found:
        launch.run()
    return y
