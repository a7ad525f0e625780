"""`tilefold::prefix_gradient`: the gradient of running products and log-sum-exps, with kernels of ours on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilefold.backends.triton import prefix_gradient
from tilefold.backends.triton.written import Launch
from tilefold.frontend.operators.prefix import units

_LIBRARY = torch.library.Library("tilefold", "FRAGMENT")
_LIBRARY.define(
    "prefix_gradient(Tensor grad, Tensor x, Tensor y, int dim, str kind) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_LIBRARY, "prefix_gradient", "CUDA")
def _on_gpu(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    with torch.cuda.device(x.device):
        return prefix_gradient.run(grad.contiguous(), x.contiguous(), y.contiguous(), dim, kind, units(x))


def launches(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int, kind: str) -> Sequence[Launch]:
    """Of the operator on a GPU's tensors, which may be fake ones."""
    return prefix_gradient.launches(grad.contiguous(), x.contiguous(), y.contiguous(), dim, kind, units(x))[1]


@torch.library.impl(_LIBRARY, "prefix_gradient", "CPU")
def _on_cpu(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    out, ahead = torch.empty(x.shape, dtype=x.dtype), torch.zeros_like(grad.select(dim, 0))
    for k in reversed(range(x.shape[dim])):
        share = 0 if k + 1 == x.shape[dim] else _share(x, y, dim, k + 1, kind)
        ahead = grad.select(dim, k) + share * ahead
        out.select(dim, k).copy_(_scale(x, y, dim, k, kind) * ahead)
    return out


def _share(x: torch.Tensor, y: torch.Tensor, dim: int, k: int, kind: str) -> torch.Tensor:
    return x.select(dim, k) if kind == "prod" else _ratio(y.select(dim, k - 1), y.select(dim, k))


def _scale(x: torch.Tensor, y: torch.Tensor, dim: int, k: int, kind: str) -> torch.Tensor | int:
    if kind == "prod":
        return y.select(dim, k - 1) if k else 1
    return _ratio(x.select(dim, k), y.select(dim, k))


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """exp(a - b), 1 where both are the same infinity."""
    return torch.where(a == b, 0, a - b).exp()


torch.library.register_fake(
    "tilefold::prefix_gradient",
    lambda grad, x, y, dim, kind: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    lib=_LIBRARY,
)
prefix_gradient_op = torch.ops.tilefold.prefix_gradient.default
