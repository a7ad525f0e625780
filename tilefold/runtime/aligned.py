"""Products of 16-bit operands on a GPU, with columns and contracted elements in multiples of 16 bytes.

cuBLAS takes any extents, but where rows of operands or results are no multiple of 16 bytes (50257 columns, 1023
features) its kernels move them element by element, at a fraction of their rate (`Gpu.ragged`), wherever the rows begin.
So operands are copied with zeros behind their rows, and the result has columns that nobody reads, where that is
estimated faster. torch.compile pads such products too, decided by timing them.
"""

from __future__ import annotations

import torch

from tilefold.algebra.dtypes import DType
from tilefold.plan.hardware import Gpu

#: Bytes that rows are a multiple of.
BYTES = 16


def rounded(n: int, itemsize: int) -> int:
    """The least extent from n on whose rows are a multiple of 16 bytes."""
    each = max(1, BYTES // itemsize)
    return -(-n // each) * each


def filled(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x, with zeros to so many rows and columns; x itself where it has them. Its unit axis stays what it is."""
    if tuple(x.shape[-2:]) == (rows, columns):
        return x
    if x.stride(-2) == 1 and x.stride(-1) != 1:
        return filled(x.mT, columns, rows).mT
    y = x.new_empty((*x.shape[:-2], rows, columns))
    y[..., : x.shape[-2], : x.shape[-1]].copy_(x)
    if columns > x.shape[-1]:
        y[..., x.shape[-1] :].zero_()
    if rows > x.shape[-2]:
        y[..., x.shape[-2] :, :].zero_()
    return y


def alike(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two batches of as many matrices; one matrix that is the same for all is not copied. Matrices stay as they are."""
    if x.dim() < 3 or x.shape[0] == y.shape[0]:
        return x, y
    return (x.expand(y.shape[0], -1, -1), y) if x.shape[0] == 1 else (x, y.expand(x.shape[0], -1, -1))


def product(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [.., rows, depth] times y [.., depth, columns], and a bias of the columns; the rows of the result lie apart
    where columns are ragged."""
    size, columns = x.element_size(), y.shape[-1]
    depth, wide = (rounded(n, size) for n in y.shape[-2:])
    a, b = filled(x, x.shape[-2], depth), filled(y, depth, wide)
    if bias is not None and wide == columns:
        return torch.addmm(bias, a, b)
    out = (torch.bmm(*alike(a, b)) if a.dim() == 3 else torch.mm(a, b))[..., :columns]
    return out if bias is None else out + bias


def worth(batch: int, rows: int, depth: int, columns: int, itemsize: int, gpu: Gpu, *, packed: bool) -> bool:
    """Whether a product of these extents is estimated faster with operands copied, and, if it has to be packed, the
    result too. False where nothing is ragged."""
    deep, wide = (rounded(n, itemsize) != n for n in (depth, columns))
    sizes = ((rows * depth, deep), (depth * columns, deep or wide), (rows * columns, wide and packed))
    moved = sum(
        gpu.second_kernel + 2 * batch * n * itemsize / (gpu.reached * gpu.bandwidth) for n, moves in sizes if moves
    )
    seconds = 2.0 * batch * rows * depth * columns / gpu.gemm_rate(DType.BF16, library=True)
    return (deep or wide) and seconds / gpu.ragged > seconds + moved
