"""The contenders: how each is made for a row. One interface, so that they can be run dry on a CPU.

"peer": computes the row's operator. "floor": only the part of it that nothing can do without (the matrix
product), reported beside the floor and never counted as a peer. "own": Tilefold in another way. On a CPU the
CUDA-only backends of SDPA are replaced by its mathematical form and FlexAttention is not compiled: arguments, masks
and score functions are then the ones that a GPU gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tilefold.errors import UnsupportedError
from tilefold.frontend.fuse import Fused, fuse, own_copy
from tilefold.frontend.hostile import Args
from tilefold.frontend.torch_compile import backend
from tilefold.plan.gpu_forms import Given
from tilefold.runtime.native.load import native
from tilefold.suites.gpu.case import Attention, GpuCase
from tilefold.suites.gpu.operators import quantise

OURS = "tilefold"
AUTOTUNED = "compile-max"
#: torch.compile with CUDA graphs (mode "reduce-overhead").
GRAPHED = "compile-cg"
#: Tilefold in the same mode.
OURS_GRAPHED = "tilefold-cg"
#: FlexAttention with its own autotuning.
FLEX_TUNED = "flex-max"
#: Tilefold with the configurations that it chooses where nothing was tuned.
UNTUNED = "untuned"
Kind = Literal["ours", "peer", "floor", "own"]
Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """`build` may compile; what it returns takes the row's arguments. `graphs`: it replays CUDA graphs of its own, in
    which it can be timed by plain calls alone. `cold`: around its first call, what no other contender's left is there
    (Inductor in one mode finds on disk what it compiled in another).
    """

    name: str
    kind: Kind
    build: Callable[[GpuCase, Args], Call]
    graphs: bool = False
    cold: Callable[[], AbstractContextManager[object]] = nullcontext


def contenders(case: GpuCase, *, only: frozenset[str] | None = None, autotune: bool = False) -> tuple[Peer, ...]:
    """Tilefold and the row's peers, `only` those named (Tilefold always); autotune adds the compilers that tune
    themselves, and Tilefold without what was tuned.
    """
    more = (UNTUNED, AUTOTUNED, *((FLEX_TUNED,) if "flex" in case.peers else ())) if autotune else ()
    names = dict.fromkeys((*case.peers, *more))
    return (PEERS[OURS], *(PEERS[n] for n in names if only is None or n in only))


def _ours(case: GpuCase, args: Args) -> Call:
    return torch.compile(own_copy(case.fn), backend=backend) if case.planned else fuse(case.fn)


def _untuned(case: GpuCase, args: Args) -> Call:
    if case.planned:
        raise UnsupportedError("torch.compile takes what was tuned")
    return Fused(case.fn, given=Given())


def _eager(case: GpuCase, args: Args) -> Call:
    return case.fn


def _compiled(mode: str | None, case: GpuCase, args: Args) -> Call:
    return torch.compile(own_copy(case.fn), dynamic=False, mode=mode)


def _graphed(case: GpuCase, args: Args) -> Call:
    return _in_steps(_compiled("reduce-overhead", case, args))


def _ours_graphed(case: GpuCase, args: Args) -> Call:
    return _in_steps(torch.compile(own_copy(case.fn), backend=backend, dynamic=False, mode="reduce-overhead"))


def _in_steps(run: Call) -> Call:
    """Every call is a step of its own: results of the one before may be overwritten."""

    def call(*given: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return run(*given)

    return call


def start_compilers(device: str) -> None:
    """Have Tilefold and Inductor compile something small, forward and backward: what a compiler imports and finds out
    once a process then counts for no row, whoever comes first. Neither does the module that calls kernels, which is
    built once a machine, beside whatever runs then."""
    native().start_building()
    ours: Any = backend
    for compiler in (ours, "inductor"):
        x = torch.ones(32, 32, device=device, requires_grad=True)
        torch.compile(own_copy(_small), dynamic=False, backend=compiler)(x).sum().backward()
    native().wait()


def _small(x: Tensor) -> Tensor:
    return torch.softmax(x, -1) * x


def _sdpa(kind: SDPBackend, case: GpuCase, args: Args) -> Call:
    spec, q, k = _attention(case), args[0], args[1]
    if not spec.plain:
        raise UnsupportedError(f"SDPA has no {case.family}")
    used = kind if q.is_cuda else SDPBackend.MATH
    # with one query a causal mask hides nothing, and SDPA's would be aligned to the first key
    causal, grouped = spec.causal and q.shape[2] > 1, q.shape[1] != k.shape[1]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(used):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return call


def _attention(case: GpuCase) -> Attention:
    if case.attention is None:
        raise UnsupportedError(f"{case.family} is not attention")
    return case.attention


def _flex(mode: str | None, case: GpuCase, args: Args) -> Call:
    spec, (q, k, _, *rest) = _attention(case), args
    queries, keys = q.shape[2], k.shape[2]
    offset = keys - queries
    score = _score_mod(spec, offset, rest[0] if rest else None)
    mask = None
    if (spec.causal and queries > 1) or spec.window is not None:
        # one mask for all heads and batches; blocks without a visible pair are skipped
        mask = create_block_mask(_mask_mod(spec, offset), None, None, queries, keys, device=q.device)
    run = torch.compile(flex_attention, dynamic=False, mode=mode) if q.is_cuda else flex_attention
    grouped = q.shape[1] != k.shape[1]

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        return run(q, k, v, score_mod=score, block_mask=mask, enable_gqa=grouped)

    return call


def _mask_mod(spec: Attention, offset: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Which keys a query sees; the last query stands at the last key."""
    window = spec.window or 0

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + offset

    def sliding(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i + offset) & (i + offset - j < window)

    return causal if spec.window is None else sliding


def _score_mod(spec: Attention, offset: int, slopes: Tensor | None) -> Callable[..., Tensor] | None:
    cap = spec.cap or 1.0

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert slopes is not None
        return score + slopes[h] * (j - i - offset)

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return alibi if spec.alibi else capped if spec.cap is not None else None


def _quack(case: GpuCase, args: Args) -> Call:
    try:
        import quack  # noqa: PLC0415 (optional: CUDA only, and pinned to a toolchain)
    except ImportError as error:
        raise UnsupportedError(f"QuACK cannot be imported: {error}") from None
    if case.family == "softmax":
        return lambda x: quack.softmax(x)
    return lambda x, weight: quack.rmsnorm(x, weight, eps=1e-6)


def _liger(case: GpuCase, args: Args) -> Call:
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # noqa: PLC0415 (optional: CUDA only)
        from liger_kernel.ops.softmax import LigerSoftmaxFunction  # noqa: PLC0415
    except ImportError as error:
        raise UnsupportedError(f"Liger cannot be imported: {error}") from None
    if case.family == "softmax":
        return lambda x: LigerSoftmaxFunction.apply(x)
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-6)


def _variance(case: GpuCase, args: Args) -> Call:
    return lambda x: torch.var(x, -1, correction=0)


def _gemm(case: GpuCase, args: Args) -> Call:
    return lambda x, w: x @ w


def _fp8_gemm(case: GpuCase, args: Args) -> Call:
    a, scale = quantise(args[0])
    return lambda _, w, w_scale: torch._scaled_mm(a, w, scale_a=scale, scale_b=w_scale, out_dtype=torch.bfloat16)


PEERS: Mapping[str, Peer] = {
    p.name: p
    for p in (
        Peer(OURS, "ours", _ours),
        Peer("eager", "peer", _eager),
        Peer("compile", "peer", partial(_compiled, None), cold=fresh_cache),
        Peer(AUTOTUNED, "peer", partial(_compiled, "max-autotune-no-cudagraphs"), cold=fresh_cache),
        Peer(GRAPHED, "peer", _graphed, graphs=True, cold=fresh_cache),
        Peer(OURS_GRAPHED, "own", _ours_graphed, graphs=True),
        Peer("cudnn", "peer", partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
        Peer("flash", "peer", partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
        Peer("flex", "peer", partial(_flex, None)),
        Peer(FLEX_TUNED, "peer", partial(_flex, "max-autotune-no-cudagraphs")),
        Peer(UNTUNED, "own", _untuned),
        Peer("torch.var", "peer", _variance),
        Peer("quack", "peer", _quack),
        Peer("liger", "peer", _liger),
        Peer("gemm", "floor", _gemm),
        Peer("fp8 gemm", "floor", _fp8_gemm),
    )
}
