"""Products of odd depths in Triton's interpreter: kernels of operands with zeros behind them."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch.nn.functional import linear

from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.plan import aligned_kernels
from tilefold.plan.targets.gpu import GpuTarget


def layer(x, w, b):
    return torch.relu(linear(x, w, b))


def skip(h, d, w, b):
    return layer(torch.cat([h, d], -1), w, b)


def odd_depths() -> str:
    """Both operands copied; the weight alone, beside a concatenation that the kernel computes. Nothing is read outside
    of memory, and infinity meets no zero."""
    wrong = []
    for fn, shapes, copies in ((layer, ((40, 19), (24, 19)), 2), (skip, ((40, 16), (40, 3), (24, 19)), 1)):
        torch.manual_seed(0)
        args = [torch.randn(s).to(torch.float16) for s in (*shapes, (24,))]
        args[0][0, 3] = torch.inf
        p = trace(fn, *args).program
        ours = patch.object(GpuTarget, "products", lambda self, p: frozenset())
        with ours, patch.object(aligned_kernels, "_gain", lambda *_: 1.0):
            compiled = compile_program(p, device="interpreter")
        got = compiled(dict(zip([i.name for i in p.inputs], args, strict=True)), {})[p.outputs[0]]
        steps = [s.name for s in compiled.steps]
        right = torch.allclose(got, fn(*args), rtol=1e-2, atol=1e-2, equal_nan=True)
        if not right or sum(n.endswith("_wide") for n in steps) != copies or len(steps) != copies + 1:
            wrong.append(f"{fn.__name__}: {steps}, {'right' if right else 'wrong'}")
    return ", ".join(wrong)
