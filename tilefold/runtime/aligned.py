"""Rows of matrices that begin at multiples of 16 bytes, as the fast kernels of a GPU's library want them.

cuBLAS takes rows of any length, but where those of 16-bit operands or results begin elsewhere (50257 columns, 1023
features) its kernels move them element by element, at a fraction of their rate (`Gpu.ragged`). So what lies between
steps has its rows apart, and an operand or result that a caller has packed is copied where that takes less time than it
saves. torch.compile pads such products too, decided by timing them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from tilefold.algebra.dtypes import DType
from tilefold.plan.hardware import Gpu

#: Bytes that rows begin at multiples of.
BYTES = 16


def apart(shape: Sequence[int], itemsize: int) -> tuple[int, ...] | None:
    """Strides in elements of a tensor whose rows begin at multiples of 16 bytes; None where packed ones do."""
    if len(shape) < 2 or shape[-1] * itemsize % BYTES == 0 or BYTES % itemsize:
        return None
    each = BYTES // itemsize
    strides = [1, -(-shape[-1] // each) * each]
    for n in reversed(shape[1:-1]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides))


def empty_apart(shape: Sequence[int], dtype: torch.dtype, *, device: torch.device | None) -> torch.Tensor:
    """Memory of this shape with its rows apart."""
    strides = apart(shape, dtype.itemsize)
    if strides is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device=device)


def fits(x: torch.Tensor) -> bool:
    """Whether the rows of a matrix, or of a batch of them, and its first element, are at multiples of 16 bytes."""
    strides, size = x.stride(), x.element_size()
    if all(s != 1 or n == 1 for s, n in zip(strides[-2:], x.shape[-2:], strict=True)):
        return True  # neither rows nor columns are packed: the library copies it anyway
    steps = [s for s, n in zip(strides, x.shape, strict=True) if s != 1 and n != 1]
    return x.storage_offset() * size % BYTES == 0 and all(s * size % BYTES == 0 for s in steps)


def copied(x: torch.Tensor) -> torch.Tensor:
    """The same matrices with their rows (or columns, where these are what is packed) apart."""
    by_columns = x.stride(-2) == 1 and x.stride(-1) != 1
    y = x.mT if by_columns else x
    y = empty_apart(y.shape, y.dtype, device=y.device).copy_(y)
    return y.mT if by_columns else y


def worth(flops: float, copies: Iterable[int], gpu: Gpu) -> bool:
    """Whether a product of so many FLOP is faster with tensors of so many bytes copied before or after it."""
    rate = gpu.gemm_rate(DType.BF16, library=True)
    moved = sum(gpu.second_kernel + 2 * n / (gpu.reached * gpu.bandwidth) for n in copies)
    return flops / (gpu.ragged * rate) > flops / rate + moved


def product_flops(x: torch.Tensor, y: torch.Tensor) -> float:
    """Of x [.., rows, depth] times y [.., depth, columns]."""
    return 2.0 * math.prod(x.shape) * y.shape[-1]
