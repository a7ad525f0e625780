"""Folds with a wide state, and a configuration that shares it among groups of warps whatever the sizes are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from tilefold.backends.triton import tiles
from tilefold.backends.triton.config import TritonConfig
from tilefold.block.ir import Block
from tilefold.suites.gpu import operators as o

H, B = torch.float16, torch.bfloat16
_default = tiles.default_config


def biased(q, k, v, bias):
    return torch.softmax(q @ k.mT * 0.1 + bias, -1) @ v


def masked(q, k, v, mask):
    return torch.softmax(torch.where(mask, q @ k.mT * 0.1, -1e4), -1) @ v


def weighed(q, k, v):
    """No softmax, no factors."""
    return torch.nn.functional.silu(q @ k.mT * 0.1) @ v


def attention(queries: int, keys: int, dim: int, value: int, dtype: torch.dtype = H, kv: int = 4):
    """Shapes and types of q, k, v: one batch, four heads."""
    return [((1, 4, queries, dim), dtype), ((1, kv, keys, dim), dtype), ((1, kv, keys, value), dtype)]


def latent(batch: int, heads: int, keys: int, dtype: torch.dtype = B):
    """Shapes and types of latent attention: 512 columns of values, 64 of positions."""
    return [((batch, heads, 576), dtype), ((batch, keys, 576), dtype)]


#: Name -> function, shapes and types of its arguments.
WIDE: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[tuple[int, ...], torch.dtype]]]] = {
    "latent": (o.mla(512), latent(3, 128, 2048)),
    "latent, ragged": (o.mla(512), latent(2, 96, 1000)),
    "latent, one kernel": (o.mla(512), latent(70, 128, 777, H)),
    "keys apart from values": (o.attention, attention(128, 256, 64, 512)),
    "ragged": (o.attention, attention(130, 203, 64, 512)),
    "causal": (o.causal, attention(333, 333, 64, 512)),
    "causal, 256 columns": (o.causal, attention(200, 400, 256, 256)),
    "window": (o.window(64), attention(300, 300, 64, 512)),
    "soft cap": (o.softcap(50.0), attention(200, 300, 64, 512)),
    "grouped heads": (o.gqa, attention(130, 200, 64, 512, kv=2)),
    "bias": (biased, [*attention(130, 200, 64, 512), ((130, 200), H)]),
    "mask": (masked, [*attention(130, 200, 64, 512, B), ((130, 200), torch.bool)]),
    "no softmax": (weighed, attention(130, 200, 64, 512)),
}


def shared_out(block: Block, sizes: Mapping[str, int], unit: tiles.UnitAxes | None = None, **how: bool) -> TritonConfig:
    """The default, in tiles of 64 rows and 64 streamed indices, for two groups."""
    base, s = _default(block, sizes, unit, **how), tiles.Shape.of(block)
    if not any(m and n for m, n, _ in s.products):
        return base
    rows = [d for d in s.parallel if max(base.tiles.get(d, 1), base.lanes.get(d, 1)) >= 16][-1:]
    cut = {**base.tiles, **dict.fromkeys([*rows, *s.streamed], 64)}
    return replace(base, tiles=cut, lanes={}, groups=2, warps=8, stages=2, descriptors=False)
