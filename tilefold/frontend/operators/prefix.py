"""`tilefold::prefixes`: running sums, products and log-sum-exps of columns, with kernels of ours on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilefold.backends.triton import prefixes
from tilefold.backends.triton.written import Launch

_LIBRARY = torch.library.Library("tilefold", "FRAGMENT")
_LIBRARY.define(
    'prefixes(Tensor x, int dim, str kind, ScalarType dtype, str turned="") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_LIBRARY, "prefixes", "CUDA")
def _on_gpu(x: torch.Tensor, dim: int, kind: str, dtype: torch.dtype, turned: str = "") -> torch.Tensor:
    with torch.cuda.device(x.device):
        return prefixes.run(x.contiguous(), dim, kind, dtype, units(x), turned)


def launches(x: torch.Tensor, dim: int, kind: str, dtype: torch.dtype, turned: str = "") -> Sequence[Launch]:
    """Of the operator on a GPU's tensor, which may be a fake one."""
    return prefixes.launches(x.contiguous(), dim, kind, dtype, units(x), turned)[1]


def units(x: torch.Tensor) -> int:
    """Multiprocessors of a tensor's device."""
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


@torch.library.impl(_LIBRARY, "prefixes", "CPU")
def _on_cpu(x: torch.Tensor, dim: int, kind: str, dtype: torch.dtype, turned: str = "") -> torch.Tensor:
    x = x.flip(dim) if prefixes.READ in turned else x
    if kind == "logsumexp":
        y = torch.logcumsumexp(x.to(dtype), dim)
    else:
        y = torch.cumsum(x, dim, dtype=dtype) if kind == "sum" else torch.cumprod(x, dim, dtype=dtype)
    return y.flip(dim) if prefixes.WRITTEN in turned else y


torch.library.register_fake(
    "tilefold::prefixes",
    lambda x, dim, kind, dtype, turned="": torch.empty(x.shape, dtype=dtype, device=x.device),
    lib=_LIBRARY,
)
prefixes_op = torch.ops.tilefold.prefixes.default
