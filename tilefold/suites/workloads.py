"""The benchmark's programs, with the shapes of the papers, what each must reach, and its floor.

RedFuser's tables 2c (routing), 3a (variance) and 3b (inertia) give R1, V4 and I4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilefold.suites import functions as f
from tilefold.suites.case import Maker, normal, together, uniform

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """`targets`: peer -> least ratio of its time to ours. `peers`: functions beside eager and torch.compile.

    `flops` and `nbytes` are what any implementation must do, each byte counted once; `peak` names
    the matrix product rate that bounds the flops ("f32", "bf16"), "" where none does.
    `fresh`: outputs are new memory on each call (see `suites.timing`). `planned`: compiled as
    torch.compile(backend="tilefold") does, which leaves products to the library where that is faster.
    """

    name: str
    fn: Function
    make: Maker
    targets: tuple[tuple[str, float], ...] = ()
    peers: tuple[tuple[str, Function], ...] = ()
    flops: float = 0.0
    nbytes: float = 0.0
    peak: str = ""
    fresh: bool = False
    planned: bool = False


def routing_1(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of x @ w and the best expert of each token. x: [T, D], w: [D, E]."""
    best = torch.topk(torch.softmax(x @ w, -1), 1, dim=-1)
    return best.values, best.indices


def swiglu_ffn(x: Tensor, weight: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(swish(RMSNorm(x) gate) * (RMSNorm(x) up)) down (Blockbuster 5.3).

    x: [T, D], weight: [D], gate and up: [D, F], down: [F, D].
    """
    y = f.rms_norm(x, weight)
    return (functional.silu(y @ gate) * (y @ up)) @ down


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


HEADS, LENGTH, DIM = 12, 1024, 64
_FLOPS = 4.0 * HEADS * LENGTH * LENGTH * DIM


def _qkv(dtype: torch.dtype) -> Maker:
    one = normal(1, HEADS, LENGTH, DIM, dtype=dtype)
    return together(one, one, one)


def _with_slopes(make: Maker, dtype: torch.dtype) -> Maker:
    return lambda gen: (*make(gen), f.alibi_slopes(HEADS).to(dtype))


def _attention(dtype: torch.dtype, name: str, target: float) -> tuple[Workload, ...]:
    """Plain attention next to SDPA, soft-cap and ALiBi (causal: half the work) next to torch.compile."""
    make, nbytes = _qkv(dtype), 4.0 * HEADS * LENGTH * DIM * dtype.itemsize
    size = f"{HEADS} x {LENGTH} x {DIM}"
    sdpa = (("sdpa", _sdpa),)
    variant = (("compile", 1.5),)
    return (
        Workload(f"{name} attention {size}", f.attention, make, (("sdpa", target),), sdpa, _FLOPS, nbytes, name),
        Workload(f"{name} soft-cap attention {size}", f.attention_softcap, make, variant, (), _FLOPS / 2, nbytes, name),
        Workload(
            f"{name} ALiBi attention {size}",
            f.attention_alibi,
            _with_slopes(make, dtype),
            variant,
            (),
            _FLOPS / 2,
            nbytes,
            name,
        ),
    )


_SOFTMAX = 1024 * 8192
_ROUTING = (2048, 768, 128)
_FFN = (512, 1024, 2816)

WORKLOADS: tuple[Workload, ...] = (
    *_attention(torch.bfloat16, "bf16", 1.4),
    *_attention(torch.float32, "f32", 1.0),
    Workload(
        "inertia I4, 128 x 32768 x 3",
        f.inertia,
        together(uniform(128, 32768, low=0.1), normal(128, 32768, 3)),
        targets=(("compile", 3.0),),
        nbytes=128 * 32768 * 4 * 4.0,
    ),
    Workload(
        "variance V4, 128 x 32768",
        f.variance,
        together(normal(128, 32768)),
        targets=(("compile", 1.0),),
        nbytes=128 * 32768 * 4.0,
    ),
    Workload(
        "softmax 1024 x 8192",
        f.softmax,
        together(normal(1024, 8192)),
        targets=(("eager", 1.3),),
        nbytes=_SOFTMAX * 8.0,
    ),
    Workload(
        "softmax 1024 x 8192, fresh output",
        f.softmax,
        together(normal(1024, 8192)),
        nbytes=_SOFTMAX * 8.0,
        fresh=True,
    ),
    Workload(
        "MoE routing R1, 2048 x 768 x 128, top 1",
        routing_1,
        together(normal(2048, 768), normal(768, 128, scale=768**-0.5)),
        targets=(("compile", 1.5), ("eager", 1.0)),
        flops=2.0 * _ROUTING[0] * _ROUTING[1] * _ROUTING[2],
        nbytes=4.0 * (_ROUTING[0] * _ROUTING[1] + _ROUTING[1] * _ROUTING[2] + 3 * _ROUTING[0]),
        peak="f32",
    ),
    Workload(
        "RMSNorm + SwiGLU FFN, 512 x 1024 x 2816",
        swiglu_ffn,
        together(
            normal(512, 1024),
            normal(1024),
            normal(1024, 2816, scale=1024**-0.5),
            normal(1024, 2816, scale=1024**-0.5),
            normal(2816, 1024, scale=2816**-0.5),
        ),
        targets=(("compile", 1.0),),
        flops=6.0 * _FFN[0] * _FFN[1] * _FFN[2],
        nbytes=4.0 * (2 * _FFN[0] * _FFN[1] + 3 * _FFN[1] * _FFN[2]),
        planned=True,
        peak="f32",
    ),
)
