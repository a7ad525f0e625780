"""Convolutions and their gradients on a GPU, as far as they are taken apart: biases, lines, few channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilefold.frontend.capture import few_channels
from tilefold.frontend.operators.images import LINE


def convolution(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *settings: Any) -> torch.Tensor:
    """A transposed convolution on a GPU as that and a sum with its bias, [N, O, ...] + [O, 1 ..]; one of few channels
    as one of more (`few_channels`); one of one axis of space as one of two (`_has_plane`). Others stay whole.

    The library adds the bias of a transposed one in a pass over its result; as an operator it belongs to what follows.
    """
    stride, padding, dilation, transposed, _, groups = settings
    steps = few_channels.strided(x, w, stride, padding, dilation, transposed, groups)
    if steps is not None:
        return few_channels.convolution(x, w, bias, steps)
    plane = _has_plane(x, w, settings)
    if not plane and (bias is None or not transposed or x.device.type != "cuda"):
        return NotImplemented  # type: ignore[no-any-return] # what says so stays as it is
    given, how = ((x.unsqueeze(2), w.unsqueeze(2)), _of_plane(settings)) if plane else ((x, w), settings)
    y: torch.Tensor = torch.ops.aten.convolution.default(*given, None, *how)
    y = y.squeeze(2) if plane else y
    return y if bias is None else y + bias.view(-1, *[1] * (x.dim() - 2))


def _has_plane(x: torch.Tensor, w: torch.Tensor, settings: Sequence[Any]) -> bool:
    """Whether a convolution of one axis of space is one of two: transposed ones of 16 bits on a GPU whose windows
    overlap (others are products). torch asks for contiguous places of one axis, which the library, whose kernels want
    contiguous channels, converts; of two axes it takes what it gets. 32 x 96 x 2000 to 8000 places, both passes on an
    H200: conversions of 170 us beside kernels of 160."""
    stride, *_, transposed, _, groups = settings
    line = bool(transposed) and x.dim() == LINE and x.device.type == "cuda" and x.dtype.itemsize == 2
    return line and groups == 1 and list(w.shape[2:]) != list(stride)


def _of_plane(settings: Sequence[Any]) -> tuple[Any, ...]:
    """Settings with an axis of one place in front."""
    stride, padding, dilation, transposed, output, groups, *rest = settings
    return [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output], groups, *rest


def gradients(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: list[int] | None, *settings: Any
) -> tuple[torch.Tensor | None, ...]:
    """On a GPU the gradient of a bias as a sum of dy [N, O, ...] over all but channels, and the others without it; of
    one axis of space as `convolution` has it.

    Where the library computes the others, torch sums in a kernel of its own; as an operator it is summed beside what
    makes dy, or by a kernel of ours: 32 x 96 x 8000 of bf16, on an H200, took 51 us of a step there.
    """
    *how, (image, weight, wanted) = settings
    plane = _has_plane(x, w, how)
    if not plane and (not wanted or dy.device.type != "cuda"):
        return NotImplemented  # type: ignore[no-any-return] # what says so stays as it is
    given, asked = ([t.unsqueeze(2) for t in (dy, x, w)], _of_plane(how)) if plane else ([dy, x, w], tuple(how))
    made: Sequence[torch.Tensor | None] = (None, None)
    if image or weight:
        made = torch.ops.aten.convolution_backward.default(*given, None, *asked, [image, weight, False])[:2]
    dx, dw = (t.squeeze(2) if plane and t is not None else t for t in made)
    return dx, dw, dy.sum([d for d in range(dy.dim()) if d != 1]) if wanted else None
