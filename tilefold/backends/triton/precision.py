"""What torch allows products of float32 on CUDA."""

from __future__ import annotations

import torch


def matmul_precision() -> str:
    """Read when a call is planned: "tf32" where that is allowed."""
    return str(torch.backends.cuda.matmul.fp32_precision)
