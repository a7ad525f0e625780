"""Resizing of images, whose gradient stays one operator.

torch takes `interpolate` apart before autograd sees it: its gradient would be sums at indices, which are left to
others. Here the forward is taken apart as ever, and the backward is torch's operator, a gather
(`operators.resize_gradients`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten
#: (mode, axes) -> the gradient.
_BACKWARD = {
    ("linear", 1): aten.upsample_linear1d_backward.default,
    ("bilinear", 2): aten.upsample_bilinear2d_backward.default,
    ("trilinear", 3): aten.upsample_trilinear3d_backward.default,
    ("bicubic", 2): aten.upsample_bicubic2d_backward.default,
    ("nearest", 1): aten.upsample_nearest1d_backward.default,
    ("nearest", 2): aten.upsample_nearest2d_backward.default,
    ("nearest", 3): aten.upsample_nearest3d_backward.default,
    ("nearest-exact", 1): aten._upsample_nearest_exact1d_backward.default,
    ("nearest-exact", 2): aten._upsample_nearest_exact2d_backward.default,
    ("nearest-exact", 3): aten._upsample_nearest_exact3d_backward.default,
}


class _Resized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: Any, scale: Any, mode: str, corners: bool | None) -> torch.Tensor:
        rank = x.dim() - 2
        y = F.interpolate(x, size, scale, mode, corners)
        scales = scale if isinstance(scale, list | tuple) else [scale] * rank
        ctx.settings = list(y.shape[2:]), list(x.shape), *([] if corners is None else [corners]), *scales
        ctx.operator, ctx.dtype = _BACKWARD[mode, rank], x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.operator(dy, *ctx.settings).to(ctx.dtype), None, None, None, None


def interpolate(
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor:
    """torch's, with a gradient of one operator where extents are known."""
    others = antialias or bool(recompute_scale_factor)
    if others or not _covered(input, mode, size, scale_factor):
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    corners = None if "nearest" in mode else bool(align_corners)
    made: torch.Tensor = _Resized.apply(input, size, scale_factor, mode, corners)
    return made


def _covered(x: torch.Tensor, mode: str, size: Any, scale: Any) -> bool:
    """Whether it has a gradient, of known sizes (torch says nothing of symbolic ones for linear interpolation).

    Not in deterministic mode, where torch refuses its operators if they are left to it, nor under transforms.
    """
    asked = x.requires_grad and torch.is_grad_enabled() and x.is_floating_point()
    if not asked or (mode, x.dim() - 2) not in _BACKWARD:
        return False
    given = [n for v in (size, scale) for n in (v if isinstance(v, list | tuple) else [v]) if n is not None]
    if not all(isinstance(n, int | float) and n > 0 for n in (*x.shape, *given)):
        return False
    return not torch.are_deterministic_algorithms_enabled() and torch._C._functorch.peek_interpreter_stack() is None
