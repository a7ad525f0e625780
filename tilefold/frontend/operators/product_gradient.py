"""`tilefold::product_gradient`: the gradient of a running product, with a kernel of ours on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilefold.backends.triton import product_gradient
from tilefold.backends.triton.written import Launch

_LIBRARY = torch.library.Library("tilefold", "FRAGMENT")
_LIBRARY.define(
    "product_gradient(Tensor grad, Tensor x, Tensor y, int dim) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


@torch.library.impl(_LIBRARY, "product_gradient", "CUDA")
def _on_gpu(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    with torch.cuda.device(x.device):
        return product_gradient.run(grad.contiguous(), x.contiguous(), y.contiguous(), dim)


def launches(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int) -> Sequence[Launch]:
    """Of the operator on a GPU's tensors, which may be fake ones."""
    return product_gradient.launches(grad.contiguous(), x.contiguous(), y.contiguous(), dim)[1]


@torch.library.impl(_LIBRARY, "product_gradient", "CPU")
def _on_cpu(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    out, ahead = torch.empty(x.shape, dtype=x.dtype), torch.zeros_like(grad.select(dim, 0))
    for k in reversed(range(x.shape[dim])):
        ahead = grad.select(dim, k) + (x.select(dim, k + 1) * ahead if k + 1 < x.shape[dim] else 0)
        out.select(dim, k).copy_(y.select(dim, k - 1) * ahead if k else ahead)
    return out


torch.library.register_fake(
    "tilefold::product_gradient",
    lambda grad, x, y, dim: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    lib=_LIBRARY,
)
product_gradient_op = torch.ops.tilefold.product_gradient.default
