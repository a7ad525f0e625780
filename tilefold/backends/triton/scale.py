"""A tensor times a number of the device, in place: nothing is read or written where the number is 1.

What a loss is multiplied by is on the device when its gradient arrives there, and mostly 1. A host that asked would
wait; a kernel asks at its start.
"""

from __future__ import annotations

from functools import cache

import torch

from tilefold.backends.triton.prelude import INTERPRETED
from tilefold.backends.triton.written import Launch

#: Elements of a step of a thread block, its warps, and thread blocks a multiprocessor.
_STEP, _WARPS, _BLOCKS = 4096, 8, 8

_SOURCE = """import triton
import triton.language as tl


@triton.jit
def scale(p_x, p_factor, n, blocks, steps):
    factor = tl.load(p_factor).to({wide})
    if factor != 1:
        for k in range(0, steps, 1):
            at = (k * blocks + tl.program_id(0)).to(tl.int64) * {step} + tl.arange(0, {step})
            x = tl.load(p_x + at, mask=at < n)
            tl.store(p_x + at, (x.to({wide}) * factor).to(p_x.dtype.element_ty), mask=at < n)
"""


@cache
def source(wide: str, *, interpreted: bool = False) -> str:
    """The kernel. wide: the type of products."""
    text = _SOURCE.format(step=_STEP, wide=wide)
    return text.replace(" in range(", " in tf_range(") + INTERPRETED if interpreted else text


def launches(x: torch.Tensor, factor: torch.Tensor, units: int) -> list[Launch]:
    """Of `run`; the tensors may be fake ones."""
    blocks = max(1, min(_BLOCKS * units, -(-x.numel() // _STEP)))
    steps = -(-x.numel() // (blocks * _STEP))
    wide = "tl.float64" if x.dtype is torch.float64 else "tl.float32"
    text = source(wide, interpreted=x.device.type == "cpu")
    return [Launch(text, "scale", (x, factor), (x.numel(), blocks, steps), blocks, _WARPS)]


def run(x: torch.Tensor, factor: torch.Tensor, units: int) -> torch.Tensor:
    """x, times a factor of one element on its device: a dense tensor of floats, changed in place. units:
    multiprocessors. (Tensors of a CPU: by Triton's interpreter.)"""
    for launch in launches(x, factor, units):
        launch.run()
    return x
