"""RedFuser's tables 2 and 3: rows, shapes, floors; and wide softmax and RMSNorm rows."""

from __future__ import annotations

import torch

from tilefold.suites.case import together
from tilefold.suites.gpu import operators as o
from tilefold.suites.gpu.case import Attention, GpuCase, Work, attended, leading, normal, uniform

_H, _B, _F, _Q = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn

#: bs, heads, queries, keys, head_dim (table 2a)
MHA = {
    "H1": (32, 8, 512, 512, 64),
    "H2": (32, 12, 512, 512, 64),
    "H3": (32, 16, 512, 512, 64),
    "H4": (32, 12, 256, 256, 64),
    "H5": (32, 16, 256, 256, 64),
    "H6": (32, 16, 256, 256, 80),
    "H7": (32, 64, 1, 1024, 128),
    "H8": (32, 64, 1, 2048, 128),
    "H9": (32, 64, 1, 4096, 128),
}
#: bs, heads, keys, value dim, dim of the positions beside it (table 2b)
MLA = {
    "L1": (32, 128, 1024, 512, 64),
    "L2": (32, 128, 2048, 512, 64),
    "L3": (32, 128, 4096, 512, 64),
    "L4": (16, 128, 1024, 512, 64),
    "L5": (16, 128, 2048, 512, 64),
    "L6": (16, 128, 4096, 512, 64),
    "L7": (1, 128, 1024, 512, 64),
    "L8": (1, 128, 2048, 512, 64),
    "L9": (1, 128, 4096, 512, 64),
}
#: tokens, hidden, experts, chosen (table 2c)
MOE = {
    "R1": (2048, 768, 128, 1),
    "R2": (2048, 1024, 128, 1),
    "R3": (2048, 4096, 128, 1),
    "R4": (2048, 2560, 64, 6),
    "R5": (2048, 8192, 64, 8),
    "R6": (2048, 2048, 64, 6),
    "R7": (2048, 2048, 128, 8),
    "R8": (2048, 4096, 128, 8),
}
#: M, N, K (table 2d)
QUANT = {
    "Q1": (4096, 1536, 2560),
    "Q2": (4096, 2560, 1536),
    "Q3": (4096, 3584, 8192),
    "Q4": (4096, 8192, 3584),
    "Q5": (4096, 7168, 2048),
    "Q6": (4096, 2048, 7168),
    "Q7": (4096, 2048, 768),
    "Q8": (4096, 768, 2048),
    "Q9": (4096, 4096, 1536),
    "Q10": (4096, 1536, 4096),
}
_BATCHES = ((1, 8192), (1, 32768), (128, 8192), (128, 32768), (512, 8192), (512, 32768), (1024, 8192), (1024, 32768))
#: rows, columns (table 3a)
VARIANCE = {f"V{n}": s for n, s in enumerate(_BATCHES, 1)}
#: bodies, particles (table 3b; three coordinates)
INERTIA = {f"I{n}": s for n, s in enumerate(_BATCHES, 1)}
#: rows, columns
WIDE = ((65536, 4096), (8192, 32768), (2048, 131072))
SOFTMAX = {f"X{n}": s for n, s in enumerate(WIDE, 1)}
RMS_NORM = {f"N{n}": s for n, s in enumerate(WIDE, 1)}


def mha(row: str, bs: int, heads: int, queries: int, keys: int, dim: int) -> GpuCase:
    """Plain attention in fp16."""
    spec = Attention()
    kv = normal(bs, heads, keys, dim, dtype=_H)
    return GpuCase(
        "redfuser",
        row,
        "mha" if queries > 1 else "mha decode",
        f"q {bs} x {heads} x {queries} x {dim}, {keys} keys",
        o.attention,
        together(normal(bs, heads, queries, dim, dtype=_H), kv, kv),
        Work(4.0 * bs * heads * spec.pairs(queries, keys) * dim, 4.0 * bs * heads * (queries + keys) * dim, "f16"),
        attended(spec),
        peers=("eager", "compile", "cudnn", "flash"),
        length=keys,
        attention=spec,
    )


def mla(row: str, bs: int, heads: int, keys: int, value_dim: int, position_dim: int) -> GpuCase:
    """Latent attention, decode, in bf16: every head reads the same keys, whose head is also the values."""
    dim = value_dim + position_dim
    elements = bs * (heads * (dim + value_dim) + keys * dim)
    return GpuCase(
        "redfuser",
        row,
        "mla",
        f"q {bs} x {heads} x {dim}, {keys} keys",
        o.mla(value_dim),
        together(normal(bs, heads, dim, dtype=_B), normal(bs, keys, dim, dtype=_B)),
        Work(2.0 * bs * heads * keys * (dim + value_dim), 2.0 * elements, "f16"),
        leading(0, 1),
        length=keys,
        planned=True,
    )


def moe(row: str, tokens: int, hidden: int, experts: int, chosen: int) -> GpuCase:
    """Routing in bf16, probabilities in float32. The logits have unit variance."""
    return GpuCase(
        "redfuser",
        row,
        "moe routing",
        f"{tokens} x {hidden}, {experts} experts, top {chosen}",
        o.moe_routing(chosen),
        together(normal(tokens, hidden, dtype=_B), normal(hidden, experts, dtype=_B, scale=hidden**-0.5)),
        Work(2.0 * tokens * hidden * experts, 2.0 * hidden * (tokens + experts) + 12.0 * tokens * chosen, "f16"),
        leading(0),
        peers=("eager", "compile", "gemm"),
        length=hidden,
    )


def quant(row: str, m: int, n: int, k: int) -> GpuCase:
    """Per-token quantisation and product, bf16 -> e4m3 -> bf16."""

    def make(gen: torch.Generator) -> tuple[torch.Tensor, ...]:
        a = normal(m, k, dtype=_B)(gen)
        w = normal(n, k, dtype=_Q)(gen).t()
        return a, w, uniform(1, n, low=0.5, high=1.5)(gen)

    return GpuCase(
        "redfuser",
        row,
        "quant gemm",
        f"{m} x {k} times {k} x {n}",
        o.quant_gemm,
        make,
        Work(2.0 * m * n * k, 2.0 * m * k + n * k + 4.0 * n + 2.0 * m * n, "f8"),
        leading(0),
        peers=("eager", "compile", "fp8 gemm"),
        length=k,
        planned=True,
    )


def variance(row: str, rows: int, columns: int) -> GpuCase:
    """Population variance of float32 rows, by its definition."""
    return GpuCase(
        "redfuser",
        row,
        "variance",
        f"{rows} x {columns}",
        o.variance_by_hand,
        together(normal(rows, columns, dtype=_F)),
        Work(0.0, 4.0 * rows * (columns + 1)),
        leading(0),
        peers=("eager", "compile", "torch.var"),
        length=columns,
    )


def inertia(row: str, bodies: int, particles: int) -> GpuCase:
    """Moment of inertia of float32 particles in three dimensions."""
    return GpuCase(
        "redfuser",
        row,
        "inertia",
        f"{bodies} x {particles} x 3",
        o.inertia,
        together(uniform(bodies, particles, low=0.1, high=1.0), normal(bodies, particles, 3, dtype=_F)),
        Work(0.0, 4.0 * bodies * (4 * particles + 1)),
        leading(0, 1),
        length=particles,
    )


def softmax(row: str, rows: int, columns: int) -> GpuCase:
    """Softmax of bf16 rows."""
    return GpuCase(
        "redfuser",
        row,
        "softmax",
        f"{rows} x {columns}",
        o.softmax,
        together(normal(rows, columns, dtype=_B)),
        Work(0.0, 4.0 * rows * columns),
        leading(0),
        peers=("eager", "compile", "quack", "liger"),
        length=columns,
    )


def rms_norm(row: str, rows: int, columns: int) -> GpuCase:
    """RMSNorm of bf16 rows with a weight."""
    return GpuCase(
        "redfuser",
        row,
        "rms norm",
        f"{rows} x {columns}",
        o.rms_norm,
        together(normal(rows, columns, dtype=_B), normal(columns, dtype=_B)),
        Work(0.0, 4.0 * rows * columns + 2.0 * columns),
        leading(0),
        peers=("eager", "compile", "quack", "liger"),
        length=columns,
    )


ROWS: tuple[GpuCase, ...] = (
    *(mha(name, *shape) for name, shape in MHA.items()),
    *(mla(name, *shape) for name, shape in MLA.items()),
    *(moe(name, *shape) for name, shape in MOE.items()),
    *(quant(name, *shape) for name, shape in QUANT.items()),
    *(variance(name, *shape) for name, shape in VARIANCE.items()),
    *(inertia(name, *shape) for name, shape in INERTIA.items()),
    *(softmax(name, *shape) for name, shape in SOFTMAX.items()),
    *(rms_norm(name, *shape) for name, shape in RMS_NORM.items()),
)

#: The same operators at awkward sizes of a few kilobytes.
SMALL: tuple[GpuCase, ...] = (
    mha("H-small", 2, 3, 70, 70, 64),
    mha("H-small-80", 1, 2, 33, 70, 80),
    mha("H-small-decode", 2, 4, 1, 301, 128),
    mla("L-small", 2, 16, 150, 64, 16),
    moe("R-small-1", 37, 96, 128, 1),
    moe("R-small-6", 37, 96, 64, 6),
    quant("Q-small", 48, 80, 160),
    variance("V-small", 19, 517),
    inertia("I-small", 7, 301),
    softmax("X-small", 19, 517),
    rms_norm("N-small", 19, 517),
)
