"""The zoo: every cascade that must be derived, fused into one kernel, and right on hostile inputs.

Sizes are chosen to be awkward rather than large: not multiples of any tile, more than one tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilefold.frontend.hostile import Args
from tilefold.suites import functions as f
from tilefold.suites.case import Case, Maker, labels, normal, together, uniform

R, C = 19, 517


def _rows(extra: Callable[[torch.Generator], tuple[torch.Tensor, ...]] | None = None) -> tuple[tuple[str, Maker], ...]:
    """Hostile forms of an [R, C] input: one column, ties, a masked row, a large offset; `extra` arguments follow."""

    def with_x(make: Callable[[torch.Generator], torch.Tensor]) -> Maker:
        return lambda gen: (make(gen), *(extra(gen) if extra is not None else ()))

    def masked(gen: torch.Generator) -> torch.Tensor:
        x = torch.randn(R, C, generator=gen)
        x[0] = -torch.inf
        x[1, :-1] = -torch.inf
        x[2, 100:] = -torch.inf
        return x

    forms: list[tuple[str, Callable[[torch.Generator], torch.Tensor]]] = [
        ("ties", lambda gen: torch.randint(0, 3, (R, C), generator=gen).float()),
        ("masked rows", masked),
        ("offset 1e3", lambda gen: torch.randn(R, C, generator=gen) + 1e3),
    ]
    if extra is None:
        forms += [("one column", normal(R, 1)), ("one element", normal(1, 1)), ("no rows", normal(0, C))]
    return tuple((name, with_x(make)) for name, make in forms)


def _qkv(
    b: int, h: int, sq: int, skv: int, d: int, *, hkv: int | None = None, dtype: torch.dtype = torch.float32
) -> Maker:
    kv = (b, hkv or h, skv, d)
    return together(normal(b, h, sq, d, dtype=dtype), normal(*kv, dtype=dtype), normal(*kv, dtype=dtype))


def _large_scores(make: Maker, factor: float = 1e4) -> Maker:
    """Scores of the order of `factor`: exp without its maximum would overflow."""

    def scaled(gen: torch.Generator) -> Args:
        q, *rest = make(gen)
        return q * factor, *rest

    return scaled


def _with_slopes(make: Maker, heads: int) -> Maker:
    return lambda gen: (*make(gen), f.alibi_slopes(heads))


PREFILL = _qkv(2, 3, 70, 70, 64)
DECODE = _qkv(2, 3, 1, 301, 64)
SHORT: tuple[tuple[str, Maker], ...] = (
    ("one key", _qkv(2, 3, 1, 1, 64)),
    ("length 5", _qkv(2, 3, 5, 5, 64)),
    ("length 129", _qkv(1, 3, 129, 129, 64)),
    ("scores 1e4", _large_scores(PREFILL)),
)
ATTENTION = "RedFuser A.2.1; Neptune 4.4"

_ATTENTIONS = (
    Case("attention", f.attention, PREFILL, ATTENTION, hostile=SHORT),
    Case("attention, cross", f.attention, _qkv(2, 3, 33, 130, 64), ATTENTION),
    Case("attention, decode", f.attention, DECODE, ATTENTION),
    Case("attention, head 80", f.attention, _qkv(2, 2, 70, 70, 80), "RedFuser table 2a, H6"),
    Case("attention, head 128", f.attention, _qkv(1, 2, 70, 70, 128), "RedFuser table 2a, H7"),
    Case("attention, bf16", f.attention, _qkv(2, 3, 70, 70, 64, dtype=torch.bfloat16), ATTENTION),
    Case("attention, fp16", f.attention, _qkv(2, 3, 70, 70, 64, dtype=torch.float16), ATTENTION),
    Case("attention, sdpa call", f.attention_sdpa, PREFILL, ATTENTION),
    Case("attention, causal", f.attention_causal, PREFILL, "Neptune table 1", hostile=SHORT),
    Case("attention, causal decode", f.attention_causal, DECODE, "Neptune table 1"),
    Case("attention, ALiBi", f.attention_alibi, _with_slopes(PREFILL, 3), "Neptune table 1"),
    Case("attention, ALiBi decode", f.attention_alibi, _with_slopes(DECODE, 3), "Neptune table 1"),
    Case("attention, GQA", f.attention_gqa, _qkv(1, 6, 70, 70, 64, hkv=2), "Neptune table 1"),
    Case("attention, GQA decode", f.attention_gqa, _qkv(1, 6, 1, 301, 64, hkv=2), "Neptune table 1"),
    Case("attention, soft-cap", f.attention_softcap, PREFILL, "Neptune table 1"),
    Case("attention, soft-cap decode", f.attention_softcap, DECODE, "Neptune table 1"),
    Case("attention, window", f.attention_window, PREFILL, "Neptune table 1", hostile=SHORT),
    Case("MLA", f.mla, together(normal(2, 16, 72), normal(2, 201, 72)), "RedFuser table 2b"),
)

_ROWS = (
    Case("softmax", f.softmax, together(normal(R, C)), "RedFuser 2.1", hostile=_rows()),
    Case("softmax, by hand", f.softmax_by_hand, together(normal(R, C)), "RedFuser 2.1", hostile=_rows()),
    Case("log_softmax", f.log_softmax, together(normal(R, C)), "RedFuser 2.1", hostile=_rows()),
    Case("logsumexp", f.logsumexp, together(normal(R, C)), "RedFuser 2.1", hostile=_rows()),
    Case(
        "cross-entropy",
        f.cross_entropy,
        together(normal(R, C), labels(R, classes=C)),
        "CODA",
        hostile=_rows(lambda gen: (torch.randint(0, C, (R,), generator=gen),)),
    ),
    Case("L2 norm", f.l2_norm, together(normal(R, C)), "Neptune 4.4", hostile=_rows()),
    Case("sum + sum", f.sum_sum, together(normal(R, C), normal(R, C)), "RedFuser A.2.3"),
    Case("variance", f.variance, together(normal(R, C)), "RedFuser eq. 44", hostile=_rows()),
    Case("variance, by hand", f.variance_by_hand, together(normal(R, C)), "RedFuser eq. 44", hostile=_rows()),
    Case("std", f.std, together(normal(R, C)), "RedFuser eq. 44", hostile=_rows()),
    Case("third moment", f.third_moment, together(normal(R, C)), "DESIGN: linear repair"),
    Case("fourth moment", f.fourth_moment, together(normal(R, C)), "DESIGN: linear repair"),
    Case("inertia", f.inertia, together(uniform(7, 301, low=0.1), normal(7, 301, 3)), "RedFuser eq. 45"),
    Case("weighted mean", f.weighted_mean, together(uniform(R, C, low=0.1), normal(R, C)), "DESIGN: linear repair"),
    Case(
        "weighted covariance",
        f.weighted_covariance,
        together(uniform(R, C, low=0.1), normal(R, C), normal(R, C)),
        "DESIGN: linear repair",
    ),
    Case("argmax", f.argmax, together(normal(R, C)), "DESIGN: monotone repair", hostile=_rows()),
    Case("argmin", f.argmin, together(normal(R, C)), "DESIGN: monotone repair", hostile=_rows()),
    Case("prod", f.prod, together(uniform(R, C, low=0.9, high=1.1)), "DESIGN: products", hostile=_rows()),
)

_GEMMS = (
    Case("MoE routing", f.moe_routing, together(normal(37, 48), normal(48, 40)), "RedFuser A.2.2"),
    Case(
        "quantise + GEMM",
        f.quant_gemm,
        together(normal(37, 130, dtype=torch.bfloat16), normal(40, 130, dtype=torch.float8_e4m3fn)),
        "RedFuser 3.4",
        expect="refused",
    ),
    Case("RMSNorm", f.rms_norm, together(normal(R, C), normal(C)), "Blockbuster 5"),
    Case("LayerNorm", f.layer_norm, together(normal(R, C), normal(C), normal(C)), "Blockbuster 5"),
    Case("RMSNorm + GEMM", f.rms_norm_gemm, together(normal(37, 130), normal(130), normal(130, 72)), "Blockbuster 5"),
    Case(
        "LayerNorm + GEMM",
        f.layer_norm_gemm,
        together(normal(37, 130), normal(130), normal(130), normal(130, 72)),
        "Blockbuster 5",
    ),
    Case("RMSNorm + max", f.rms_norm_max, together(normal(R, C)), "Neptune 4.4", hostile=_rows()),
    Case(
        "Performer",
        f.performer,
        lambda gen: (*_qkv(1, 2, 70, 70, 16)(gen), f.projection(24, 16, gen)),
        "Neptune appendix C",
        kernels=2,
    ),
    Case("sum of exp(x / rms)", f.exp_over_rms, together(normal(R, C)), "DESIGN", kernels=2, expect="refused"),
)

CASCADES: tuple[Case, ...] = (*_ROWS, *_ATTENTIONS, *_GEMMS)
