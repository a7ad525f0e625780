"""A tensor times a number of the device, in place: nothing is read or written where the number is 1.

What a loss is multiplied by is on the device when its gradient arrives there, and mostly 1. A host that asked would
wait; a kernel asks at its start.
"""

from __future__ import annotations

import torch

from tilefold.backends.triton.build import module_of
from tilefold.backends.triton.prelude import INTERPRETED

#: Elements of a step of a thread block, its warps, and thread blocks a multiprocessor.
_STEP, _WARPS, _BLOCKS = 4096, 8, 8

_SOURCE = """import triton
import triton.language as tl


@triton.jit
def scale(p_x, p_factor, n, blocks, steps, STEP: tl.constexpr, WIDE: tl.constexpr):
    factor = tl.load(p_factor).to(WIDE)
    if factor != 1:
        for k in range(0, steps, 1):
            at = (k * blocks + tl.program_id(0)).to(tl.int64) * STEP + tl.arange(0, STEP)
            x = tl.load(p_x + at, mask=at < n)
            tl.store(p_x + at, (x.to(WIDE) * factor).to(p_x.dtype.element_ty), mask=at < n)
"""


def source(*, interpreted: bool = False) -> str:
    """The kernel."""
    return _SOURCE.replace(" in range(", " in tf_range(") + INTERPRETED if interpreted else _SOURCE


def run(x: torch.Tensor, factor: torch.Tensor, units: int) -> torch.Tensor:
    """x, times a factor of one element on its device: a dense tensor of floats, changed in place. units:
    multiprocessors. (Tensors of a CPU: by Triton's interpreter.)"""
    import triton.language as tl  # noqa: PLC0415 (an optional package)

    made = module_of(source(interpreted=x.device.type == "cpu"), "scale")
    blocks = max(1, min(_BLOCKS * units, -(-x.numel() // _STEP)))
    wide = tl.float64 if x.dtype is torch.float64 else tl.float32
    steps = -(-x.numel() // (blocks * _STEP))
    made.scale[(blocks,)](x, factor, x.numel(), blocks, steps, _STEP, wide, num_warps=_WARPS)
    return x
