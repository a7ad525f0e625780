"""Whether tensors are like those of an earlier call: one call into C++ instead of a key of shapes and strides.

Considered: keys in Python (three tensors: 5 us on a slow core, against 0.9); torch's guards around the call (more).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._dynamo.guards import TensorGuards


class Alike:
    """Types, devices, extents and strides of tensors, and whether they need gradients. Not the tensors themselves."""

    def __init__(self, xs: Sequence[torch.Tensor]):
        plain = bool(xs) and all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in xs)
        self._guards = TensorGuards(*xs, dynamic_dims_sizes=None, dynamic_dims_strides=None) if plain else None

    def __call__(self, xs: Sequence[torch.Tensor]) -> bool:
        """Whether xs are like them. True is a proof of it; False is none of a difference."""
        return self._guards is not None and self._guards.check(*xs)
