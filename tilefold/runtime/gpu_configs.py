"""Which configuration a kernel runs with on the GPU: tuned results where there are some, else the default."""

from __future__ import annotations

from collections.abc import Mapping

from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.launch import Chooser
from tilefold.block.ir import Block
from tilefold.block.text import show

_overrides: dict[str, TritonConfig] = {}


def chooser() -> Chooser:
    """Looks a kernel up by its program."""
    return _choose


def override(block: Block, config: TritonConfig | None) -> None:
    """Run `block` with `config` from now on (None: the default again)."""
    key = show(block)
    if config is None:
        _overrides.pop(key, None)
    else:
        _overrides[key] = config


def _choose(block: Block, sizes: Mapping[str, int]) -> TritonConfig | None:
    return _overrides.get(show(block)) if _overrides else None
