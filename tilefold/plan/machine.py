"""The description of the machine we are on."""

from __future__ import annotations

from functools import lru_cache

import torch

from tilefold.algebra.dtypes import DType
from tilefold.plan.hardware import Machine


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """Rates of this CPU, nominal (only quotients matter): see `docs/design/backend-cpp.md` for the measurements.

    Without AVX-512 bf16 instructions the library multiplies narrow types through slow generic code.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    wide = capability == "AVX512"
    peak = 200e9 if wide else 100e9
    narrow = 2 * peak if wide else 1e9
    return Machine(
        name=f"cpu-{capability.lower()}",
        bandwidth=20e9,
        launch=10e-6,
        own={DType.F64: 0.4 * peak, DType.F32: 0.75 * peak, DType.BF16: 0.75 * peak, DType.F16: 0.75 * peak},
        library={DType.F64: 0.45 * peak, DType.F32: 0.9 * peak, DType.BF16: narrow, DType.F16: narrow},
    )
