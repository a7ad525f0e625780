"""Functions as users write them: recognised, fused by the rules, made safe, and run on CPU as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from tilefold.blockbuster.from_tensor import from_tensor
from tilefold.blockbuster.rules.algorithm import fuse
from tilefold.blockbuster.safety import make_safe, unsafe
from tilefold.frontend.fuse import trace
from tilefold.runtime.graphs import compile_graph
from tilefold.suites.blocks.case import BlockCase, Outcome
from tilefold.tensor.interp import bind_syms

Fn = Callable[..., torch.Tensor]
ROWS, KEYS, WIDTH = 80, 112, 64


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q: [B, H, M, D], k: [B, H, N, D], v: [B, H, N, L]."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, with the mask as users build it; q, k, v: [B, H, M, D]."""
    s = (q @ k.mT).masked_fill(torch.ones(q.shape[-2], k.shape[-2]).tril() == 0, -float("inf"))
    return torch.softmax(s, -1) @ v


def layernorm_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x: [M, K], w: [K, N]."""
    return functional.layer_norm(x, x.shape[-1:]) @ w


def rmsnorm_swiglu(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """x: [M, D], w and v: [D, K], u: [K, N]."""
    r = functional.rms_norm(x, x.shape[-1:])
    return (functional.silu(r @ w) * (r @ v)) @ u


def _random(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=g) for s in shapes)


def cases() -> tuple[BlockCase, ...]:
    """One for each function, and attention with scores of +-1e4."""
    q, k, v = _random((2, 3, ROWS, WIDTH), (2, 3, KEYS, WIDTH), (2, 3, KEYS, 32))
    top = float((q @ k.mT).abs().max()) * WIDTH**-0.5
    square = _random(*[(2, 3, ROWS, WIDTH)] * 3)
    x, w, v2, u = _random((ROWS, WIDTH), (WIDTH, 96), (WIDTH, 96), (96, WIDTH))
    rows: tuple[tuple[str, Fn, tuple[torch.Tensor, ...]], ...] = (
        ("attention", attention, (q, k, v)),
        ("attention, scores of +-1e4", attention, (q * (1e4 / top), k, v)),
        ("masked attention", masked_attention, square),
        ("LayerNorm + product", layernorm_product, (x, w)),
        ("RMSNorm + SwiGLU", rmsnorm_swiglu, (x, w, v2, u)),
    )
    return tuple(BlockCase("Rules on users' functions", n, partial(_show, fn, args)) for n, fn, args in rows)


def _show(fn: Fn, args: tuple[torch.Tensor, ...]) -> Outcome:
    program = trace(fn, *args, dynamic=True).program
    inputs = dict(zip(fn.__code__.co_varnames, args, strict=False))
    bridged = from_tensor(program)
    run = fuse(bridged.program)
    safe = make_safe(run.result)
    compiled = compile_graph(safe)
    (out,) = compiled({n: inputs[t] for n, t in bridged.source.items()}, bind_syms(program, inputs)).values()
    exact, eager = fn(*(a.double() for a in args)), fn(*args)
    ours, own = (float((y.double() - exact).abs().max() / exact.abs().max()) for y in (out.reshape(exact.shape), eager))
    ok = len(compiled.blocks) == 1 and not unsafe(safe) and ours <= 2 * own
    return Outcome(ok, f"{len(run.steps)} steps, {len(compiled.blocks)} kernel, error {ours:.1e}, eager {own:.1e}")
