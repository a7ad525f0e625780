"""Which tensors of a graph are images: those whose channels (axis 1) may be contiguous, and then are stored so.

Of four and five axes torch calls such memory channels-last. Of three it has no name for it, and tensors that lie so are
more often matrices that somebody transposed: they are images where a convolution of one axis of space has contiguous
channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

aten = torch.ops.aten
#: Axes of images with channels, of one axis of space and of more.
LINE, IMAGES = 3, frozenset({4, 5})
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def ranks_of_images(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Numbers of axes that images of a graph have."""
    lines = (x for n in gm.graph.nodes if n.target in _CONVOLUTIONS for x in _tensors(n) if x.dim() == LINE)
    return IMAGES | {LINE} if any(map(has_channels_last, lines)) else IMAGES


def has_channels_last(x: torch.Tensor) -> bool:
    """Whether the channels of an image are contiguous, and its places are not."""
    return x.dim() >= LINE and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _tensors(n: torch.fx.Node) -> Iterator[torch.Tensor]:
    """What a node makes and reads."""
    for a in (n, *n.all_input_nodes):
        val = a.meta.get("val")
        yield from (x for x in (val if isinstance(val, tuple | list) else [val]) if isinstance(x, torch.Tensor))
