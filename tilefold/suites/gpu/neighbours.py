"""Neighbours of the two papers' rows: lengths that no table has, bf16, batches, other ratios of heads.

What is tuned for the papers' shapes says nothing of these; the tables stand beside each other.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tilefold.suites.gpu import neptune, redfuser
from tilefold.suites.gpu.case import GpuCase
from tilefold.suites.gpu.neptune import Mode

_B, _H = torch.bfloat16, torch.float16
_VARIANTS = {v.name: v for v in neptune.VARIANTS}


def _attention(
    name: str,
    mode: Mode,
    length: int,
    batch: int = 1,
    dtype: torch.dtype = _H,
    *,
    heads: tuple[int, int] | None = None,
    dim: int | None = None,
) -> GpuCase:
    """A variant of Neptune's with other `heads` (of queries, of keys) or head size."""
    v = _VARIANTS[name]
    own, shared = heads or (v.heads, v.kv_heads)
    case = neptune.attention(replace(v, heads=own, kv_heads=shared, dim=dim or v.dim), mode, length, batch, dtype)
    kind = "bf16" if dtype is _B else "fp16"
    return _named(case, f"{name}-{mode}-{batch}x{own}/{shared}x{length}x{dim or v.dim}-{kind}")


def _named(case: GpuCase, row: str) -> GpuCase:
    return replace(case, suite="neighbours", row=row)


ROWS: tuple[GpuCase, ...] = (
    _attention("global", "prefill", 577, 8, _B),
    _attention("causal", "prefill", 3000),
    _attention("causal", "prefill", 2048, 2, _B),
    _attention("causal", "prefill", 1500, dim=96),
    _attention("gqa", "prefill", 3000, 1, _B, heads=(24, 8)),
    _attention("softcap", "prefill", 3000, 1, _B),
    _attention("alibi", "prefill", 1500, 4),
    _attention("window", "prefill", 6000, 1, _B),
    _attention("causal", "decode", 3000, 2),
    _attention("gqa", "decode", 5000, 4, _B, heads=(28, 4)),
    _attention("softcap", "decode", 3000, 1, _B, heads=(16, 8)),
    _named(redfuser.mha("", 24, 10, 384, 384, 64), "mha-24x10x384x64"),
    _named(redfuser.mla("", 24, 64, 3000, 512, 64), "mla-24x64x3000"),
    _named(redfuser.moe("", 3000, 1536, 96, 4), "moe-3000x1536x96"),
    _named(redfuser.quant("", 3000, 2048, 3072), "quant-3000x2048x3072"),
    _named(redfuser.variance("", 300, 20000), "variance-300x20000"),
    _named(redfuser.inertia("", 200, 10000), "inertia-200x10000"),
    _named(redfuser.softmax("", 10000, 3000), "softmax-10000x3000"),
    _named(redfuser.rms_norm("", 10000, 3000), "rmsnorm-10000x3000"),
    _named(neptune.l2_norm(100, 3000), "l2norm-100x3000"),
    _named(neptune.rms_norm_max(100, 30000), "rmsnorm-max-100x30000"),
    _named(neptune.performer(3000), "performer-3000"),
)

#: The same kinds at a few kilobytes.
SMALL: tuple[GpuCase, ...] = (
    _attention("gqa", "prefill", 37, 2, _B, heads=(6, 2), dim=16),
    _attention("alibi", "decode", 37, 2, _B, heads=(4, 4), dim=16),
    _named(redfuser.softmax("", 5, 300), "softmax-5x300"),
)
