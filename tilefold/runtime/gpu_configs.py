"""Which configuration a kernel runs with on the GPU: tuned results where there are some, else the default."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from tilefold.backends.triton.compile import toolchain
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.launch import Chooser
from tilefold.block.ir import Block
from tilefold.runtime.tuner.table import Table, key_of


def chooser() -> Chooser:
    """Looks a kernel up in the tables of the current device."""
    return _choose


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
