"""Neptune's table 1 and section 8.4: ten attention operators over lengths, and three others.

All in fp16, batch 1. Prefill has as many queries as keys, decode one query, which sees every key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tilefold.suites.case import Maker, together
from tilefold.suites.functions import alibi_slopes, projection
from tilefold.suites.gpu import operators as o
from tilefold.suites.gpu.case import Attention, GpuCase, Work, attended, leading, normal, whole

_H = torch.float16
Mode = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A line of table 1. `base`: the model that has it."""

    name: str
    modes: tuple[Mode, ...]
    heads: int
    kv_heads: int
    dim: int
    spec: Attention
    fn: o.Operator
    base: str


WINDOW, CAP = 4096, 50.0
VARIANTS: tuple[Variant, ...] = (
    Variant("global", ("prefill",), 16, 16, 64, Attention(), o.attention, "ViT-L/16"),
    Variant("causal", ("prefill", "decode"), 32, 32, 128, Attention(causal=True), o.causal, "GPT3-6.7B"),
    Variant("alibi", ("prefill", "decode"), 32, 32, 128, Attention(causal=True, alibi=True), o.alibi, "MPT-7B"),
    Variant("gqa", ("prefill", "decode"), 64, 8, 128, Attention(causal=True), o.gqa, "Llama3-70B"),
    Variant(
        "softcap", ("prefill", "decode"), 32, 16, 128, Attention(causal=True, cap=CAP), o.softcap(CAP), "Gemma2-27B"
    ),
    Variant("window", ("prefill",), 32, 16, 128, Attention(causal=True, window=WINDOW), o.window(WINDOW), "Gemma2-27B"),
)
LENGTHS = tuple(2**n for n in range(7, 16))
ROW_COUNTS = (32, 64, 128, 256)
COLUMNS = tuple(2**n for n in range(10, 18))
PERFORMER_LENGTHS = tuple(2**n for n in range(9, 16))


def attention(v: Variant, mode: Mode, length: int, batch: int = 1, dtype: torch.dtype = _H) -> GpuCase:
    """One operator at one length, of numbers of 16 bits."""
    queries = length if mode == "prefill" else 1
    elements = batch * (2 * v.heads * queries + 2 * v.kv_heads * length) * v.dim
    kv = normal(batch, v.kv_heads, length, v.dim, dtype=dtype)
    make: Maker = together(normal(batch, v.heads, queries, v.dim, dtype=dtype), kv, kv)
    libraries = ("cudnn", "flash", "flex") if v.spec.plain else ("flex",)
    return GpuCase(
        "neptune",
        f"{v.name}-{mode}-{length}",
        f"{v.name} {mode}",
        f"q {batch} x {v.heads} x {queries} x {v.dim}, {v.kv_heads} x {length} keys",
        v.fn,
        _with_slopes(make, v.heads, dtype) if v.spec.alibi else make,
        Work(4.0 * batch * v.heads * v.spec.pairs(queries, length) * v.dim, 2.0 * elements, "f16"),
        attended(v.spec),
        peers=("eager", "compile", *libraries),
        length=length,
        attention=v.spec,
    )


def _with_slopes(make: Maker, heads: int, dtype: torch.dtype) -> Maker:
    return lambda gen: (*make(gen), alibi_slopes(heads).to(gen.device, dtype))


def l2_norm(rows: int, columns: int) -> GpuCase:
    """Scaled by the largest magnitude."""
    return GpuCase(
        "neptune",
        f"l2norm-{rows}x{columns}",
        "l2 norm",
        f"{rows} x {columns}",
        o.l2_norm,
        together(normal(rows, columns, dtype=_H)),
        Work(0.0, 2.0 * rows * (columns + 1)),
        leading(0),
        length=columns,
    )


def rms_norm_max(rows: int, columns: int) -> GpuCase:
    """RMSNorm and the maximum of its rows."""
    return GpuCase(
        "neptune",
        f"rmsnorm-max-{rows}x{columns}",
        "rmsnorm max",
        f"{rows} x {columns}",
        o.rms_norm_max,
        together(normal(rows, columns, dtype=_H)),
        Work(0.0, 2.0 * rows * (2 * columns + 1)),
        leading(0),
        length=columns,
    )


def performer(length: int, heads: int = 8, dim: int = 64, features: int = 256) -> GpuCase:
    """Linear attention with positive random features."""
    one = normal(1, heads, length, dim, dtype=_H)

    def make(gen: torch.Generator) -> tuple[torch.Tensor, ...]:
        drawn = projection(features, dim, torch.Generator().manual_seed(0)).to(gen.device, _H)
        return one(gen), one(gen), one(gen), drawn

    return GpuCase(
        "neptune",
        f"performer-{length}",
        "performer",
        f"{heads} x {length} x {dim}, {features} features",
        o.performer,
        make,
        Work(8.0 * heads * length * dim * features, 2.0 * (4 * heads * length + features) * dim, "f16"),
        whole,
        length=length,
    )


ROWS: tuple[GpuCase, ...] = (
    *(attention(v, mode, n) for v in VARIANTS for mode in v.modes for n in LENGTHS),
    *(l2_norm(rows, n) for rows in ROW_COUNTS for n in COLUMNS),
    *(rms_norm_max(rows, n) for rows in ROW_COUNTS for n in COLUMNS),
    *(performer(n) for n in PERFORMER_LENGTHS),
)


def _small(v: Variant, mode: Mode) -> GpuCase:
    """The operator at a length that no tile divides, with fewer and smaller heads (and a shorter window)."""
    group, window = min(v.heads // v.kv_heads, 3), None if v.spec.window is None else 32
    spec = Attention(v.spec.causal, v.spec.alibi, v.spec.cap, window)
    fn = v.fn if window is None else o.window(window)
    return attention(Variant(v.name, v.modes, 2 * group, 2, 64, spec, fn, v.base), mode, 67)


#: The same operators at awkward sizes of a few kilobytes.
SMALL: tuple[GpuCase, ...] = (
    *(_small(v, mode) for v in VARIANTS for mode in v.modes),
    l2_norm(5, 517),
    rms_norm_max(5, 517),
    performer(70, heads=2, dim=16, features=24),
)
