"""Which configuration a kernel runs with on the GPU: tuned results where there are some, else the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

import torch

from tilefold.backends.triton.compile import toolchain
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.launch import Chooser
from tilefold.backends.triton.tiles import Shape, default_config
from tilefold.block.ir import Block
from tilefold.plan.gpu_forms import Given
from tilefold.runtime.tuner.table import Table, key_of
from tilefold.tile.pieces import power_of_two


def chooser(given: Given | None = None) -> Chooser:
    """Looks a kernel up in the tables of the current device; `given` changes the default instead."""
    return _choose if given is None else partial(_given, given)


def _given(given: Given, block: Block, sizes: Mapping[str, int]) -> TritonConfig:
    base, shape = default_config(block, sizes), Shape.of(block)
    tiles, seen = dict(base.tiles), shape.seen(sizes)
    streamed = {} if given.stream is None else dict.fromkeys(shape.streamed, given.stream)
    rows = {} if given.rows is None else dict.fromkeys(shape.parallel[-1:], given.rows)
    for d, n in (streamed | rows).items():
        tiles[d] = min(n, power_of_two(seen[d]))
    warps = base.warps if given.warps is None else given.warps
    return replace(base, tiles=tiles, warps=warps, stages=base.stages if given.stages is None else given.stages)


@lru_cache
def table(device: str) -> Table:
    """The tables of a device of that name, read once a process."""
    return Table(device, toolchain())


def device_name() -> str:
    """The current CUDA device's model, without its memory size and form."""
    words = torch.cuda.get_device_name().split()
    return " ".join(w for w in words[:2])


def _choose(block: Block, sizes: Mapping[str, int]) -> TritonConfig | None:
    if not torch.cuda.is_available():
        return None
    return table(device_name()).find(key_of(block, sizes))
