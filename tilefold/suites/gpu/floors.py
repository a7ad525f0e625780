"""Ceilings of the device, measured at the start of a run, and the floor of a row under them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilefold.suites.gpu.case import Work
from tilefold.suites.gpu.measure import Thunk, Timer

#: Side of the matrices and bytes of the buffer that the ceilings are measured with, by device.
_SIDES = {"cuda": (4096, 8192), "cpu": (256,)}
_BYTES = {"cuda": 2 << 30, "cpu": 1 << 22}


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOP/s of the library's products by `Work.peak` (0 where there is none), and bytes/s of memory.

    `memory` is the best of a copy (read + written) and a read.
    """

    f16: float
    f8: float
    memory: float

    def floor(self, work: Work) -> tuple[float, str]:
        """Seconds that any implementation takes at least, and what sets them ("memory" or the product's rate)."""
        flops = {"f16": self.f16, "f8": self.f8, "": 0.0}[work.peak]
        arithmetic = work.flops / flops if flops else 0.0
        traffic = work.nbytes / self.memory
        return (arithmetic, work.peak) if arithmetic > traffic else (traffic, "memory")


def measure_rates(device: str, timer: Timer) -> Rates:
    """The ceilings of this device; a second or two."""
    f16 = max(_gemm(device, n, timer) for n in _SIDES[device])
    f8 = max((_gemm_f8(device, n, timer) for n in _SIDES[device]), default=0.0) if device == "cuda" else 0.0
    x = torch.randn(_BYTES[device] // 4, device=device)
    y = torch.empty_like(x)
    copy, read = _fastest(timer, lambda: y.copy_(x)), _fastest(timer, lambda: x.view(-1, 4096).amax(-1))
    return Rates(f16, f8, max(2 * x.nbytes / copy, x.nbytes / read))


def _gemm(device: str, n: int, timer: Timer) -> float:
    dtype = torch.float16 if device == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * n**3 / _fastest(timer, lambda: a @ b)


def _gemm_f8(device: str, n: int, timer: Timer) -> float:
    """Row-wise scaled products; 0 on devices without them."""
    if torch.cuda.get_device_capability() < (8, 9):
        return 0.0
    a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(n, 1, device=device)
    run = _fastest(timer, lambda: torch._scaled_mm(a, b.t(), one, one.t(), out_dtype=torch.bfloat16))
    return 2.0 * n**3 / run


def _fastest(timer: Timer, call: Thunk) -> float:
    """The best of some rounds: a ceiling is what was reached at all."""
    return min(timer.rounds({"": timer.ready(call)}, most=20, budget=0.3)[""].seconds)
