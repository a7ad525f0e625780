"""Fused functions at the top of a module, which another process can import."""

from __future__ import annotations

import torch

from tilefold.frontend.fuse import fuse


@fuse(runner="interpreter")
def soft(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.softmax(x * scale, -1)


@fuse(runner="interpreter")
def moments(x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, torch.Tensor]:
    y = x - shift
    return {"mean": y.mean(-1), "best": y.argmax(-1), "square": y.square().sum(-1)}
