"""`tilefold::added_rows`: rows added to a table at indices that may repeat, in place, with kernels of ours on GPUs.

`rows_of_sums` adds them to zeros, which it makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from tilefold import config
from tilefold.backends.triton import added_rows
from tilefold.backends.triton.written import Launch

_LIBRARY = torch.library.Library("tilefold", "FRAGMENT")
_LIBRARY.define("added_rows(Tensor(a!) table, Tensor at, Tensor rows, int skipped) -> Tensor(a!)")
_LIBRARY.define("rows_of_sums(Tensor at, Tensor rows, SymInt[] shape, int skipped) -> Tensor")


@torch.library.impl(_LIBRARY, "added_rows", "CUDA")
def _on_gpu(table: torch.Tensor, at: torch.Tensor, rows: torch.Tensor, skipped: int) -> torch.Tensor:
    with torch.cuda.device(table.device):
        for launch in launches(table, at, rows, skipped):
            launch.run()
    return table


def launches(table: torch.Tensor, at: torch.Tensor, rows: torch.Tensor, skipped: int) -> Sequence[Launch]:
    """Of the operator on a GPU's tensors, which may be fake ones."""
    n, width, k = table.shape[0], prod(table.shape[1:]), at.numel()
    given = table.view(n, width), at.reshape(k).contiguous(), rows.reshape(k, width).contiguous()
    return added_rows.launches(*given, skipped, checked=config.load().index_checks)


def launches_on_zeros(at: torch.Tensor, rows: torch.Tensor, shape: Sequence[int], skipped: int) -> Sequence[Launch]:
    """The same of `rows_of_sums`."""
    return launches(rows.new_empty(shape), at, rows, skipped)


@torch.library.impl(_LIBRARY, "added_rows", "CPU")
def _on_cpu(table: torch.Tensor, at: torch.Tensor, rows: torch.Tensor, skipped: int) -> torch.Tensor:
    n, shape = table.shape[0], table.shape[1:]
    where, given = at.reshape(-1) % max(1, n), rows.reshape(-1, *shape)
    kept = (where != skipped).nonzero().reshape(-1)
    wide = torch.float64 if table.dtype is torch.float64 else torch.float32
    total = table.to(wide).index_add_(0, where[kept].long(), given[kept].to(wide))
    return table.copy_(total)


@torch.library.impl(_LIBRARY, "rows_of_sums", "CompositeExplicitAutograd")
def _of_zeros(at: torch.Tensor, rows: torch.Tensor, shape: list[int], skipped: int) -> torch.Tensor:
    table: torch.Tensor = added_rows_op(rows.new_zeros(shape), at, rows, skipped)
    return table


torch.library.register_fake("tilefold::added_rows", lambda table, at, rows, skipped: table, lib=_LIBRARY)
torch.library.register_fake(
    "tilefold::rows_of_sums", lambda at, rows, shape, skipped: rows.new_empty(shape), lib=_LIBRARY
)
added_rows_op = torch.ops.tilefold.added_rows.default
rows_of_sums_op = torch.ops.tilefold.rows_of_sums.default
