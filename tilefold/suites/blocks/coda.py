"""Transformer blocks as products with epilogues (CODA): forward, and forward with backward.

Plain PyTorch modules, traced through AOTAutograd; the laws (`tensor.laws`) rewrite each to a fixpoint
with no pattern for any of them. A case is right where the block programs, interpreted in float64,
give what eager PyTorch gives in float64 (gradients included), their C++ gives it in float32, the
paper's kernels that belong to it are among those found, and no more passes over memory are left
than inputs without a product in front of them cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilefold.block.epilogue.cost import Target
from tilefold.block.epilogue.describe import described
from tilefold.block.epilogue.programs import block_programs, listing
from tilefold.block.epilogue.search import Rewritten, rewrite
from tilefold.block.fuse import Fused
from tilefold.block.interp import run
from tilefold.errors import TilefoldError
from tilefold.frontend.capture.joint import Captured, capture, in_float64
from tilefold.frontend.regions.execute import Runner
from tilefold.runtime.program import CompiledProgram
from tilefold.runtime.steps import KernelStep, load_all
from tilefold.suites.blocks.case import BlockCase, Outcome

#: Largest error of block programs in float64, relative to the largest element (constants of the graph are f32).
EXACT = 1e-10
#: The same of C++ in float32.
SINGLE = 1e-5
#: Rows and columns of an output tile; small, so that small sizes have several.
TILE = 16
TOKENS, DIM, INNER, HIDDEN, VOCABULARY = 128, 64, 32, 96, 192
HEADS, KV_HEADS = 4, 1


class Chain(nn.Module):
    """GEMM - residual - RMSNorm - GEMM, twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INNER, DIM, bias=False)
        self.second = nn.Linear(DIM, HIDDEN, bias=False)
        self.third = nn.Linear(HIDDEN, DIM, bias=False)
        self.norm, self.norm_2 = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)

    def forward(self, x: Tensor, residual: Tensor, residual_2: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x) + residual
        hidden = self.second(self.norm(hidden)) + residual_2
        return self.third(self.norm_2(hidden)), hidden


class Rotary(nn.Module):
    """Output projection - residual - RMSNorm - QKV - RoPE, with fewer key and value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(INNER, DIM, bias=False)
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, DIM // HEADS * KV_HEADS, bias=False)
        self.v = nn.Linear(DIM, DIM // HEADS * KV_HEADS, bias=False)

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        hidden = self.out(x) + residual
        y = self.norm(hidden)
        q, k, v = (split_heads(f(y)) for f in (self.q, self.k, self.v))
        return rotated(q, cos, sin), rotated(k, cos, sin), v, hidden


def split_heads(x: Tensor) -> Tensor:
    """[B, T, H D] -> [B, T, H, D]."""
    return x.view(*x.shape[:2], -1, DIM // HEADS)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on halves of the features; cos, sin: [T, D]."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


class Gated(nn.Module):
    """Output projection - residual - RMSNorm - SwiGLU - down projection - residual."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(INNER, DIM, bias=False)
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        hidden = self.out(x) + residual
        y = self.norm(hidden)
        return hidden + self.down(functional.silu(self.gate(y)) * self.up(y))


class Head(nn.Module):
    """Down projection - residual - RMSNorm - LM head - cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(INNER, DIM, bias=False)
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, x: Tensor, residual: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.norm(self.down(x) + residual)), target)


class Centred(nn.Module):
    """GEMM - residual - LayerNorm - GEMM: the mean is a rank-1 correction."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INNER, DIM, bias=False), nn.Linear(DIM, HIDDEN)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x) + residual
        return self.second(self.norm(hidden)), hidden


class Basic(nn.Module):
    """One projection with an epilogue and no norm: the paper's kernels 1 to 3."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.proj = nn.Linear(DIM, VOCABULARY if kind == "cross-entropy" else 2 * HIDDEN, bias=False)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        h = self.proj(x)
        if self.kind == "rope":
            return rotated(split_heads(h), *rest)
        if self.kind == "swiglu":
            gate, up = h.chunk(2, -1)
            return functional.silu(gate) * up
        return functional.cross_entropy(h, rest[0])


def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda gen: torch.randn(shape, generator=gen, requires_grad=True)


def _angles(gen: torch.Generator) -> Tensor:
    return torch.rand(TOKENS // 2, DIM // HEADS, generator=gen) * 2 - 1


def _targets(gen: torch.Generator) -> Tensor:
    out = torch.randint(0, VOCABULARY, (TOKENS,), generator=gen)
    out[::7] = -100
    return out


Maker = Callable[[torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """A module with its arguments; `kernels`: the paper's that have to be found; `passes`: most passes left."""

    name: str
    module: Callable[[], nn.Module]
    args: tuple[Maker, ...]
    training: bool
    kernels: frozenset[int]
    passes: int

    def arguments(self) -> tuple[Tensor, ...]:
        gen = torch.Generator().manual_seed(1)
        return tuple(make(gen) for make in self.args)


_X, _RESIDUAL = _normal(TOKENS, INNER), _normal(TOKENS, DIM)
_CHAIN = (_X, _RESIDUAL, _normal(TOKENS, HIDDEN))
_HEADS = (_normal(2, TOKENS // 2, INNER), _normal(2, TOKENS // 2, DIM), _angles, _angles)

#: What is left of passes: gradients that come in as arguments have to be read by one.
BLOCKS: tuple[Block, ...] = (
    Block("GEMM, RoPE", partial(Basic, "rope"), (_HEADS[1], _angles, _angles), False, frozenset({1}), 0),
    Block("GEMM, SwiGLU", partial(Basic, "swiglu"), (_RESIDUAL,), False, frozenset({2}), 0),
    Block("GEMM, cross-entropy", partial(Basic, "cross-entropy"), (_RESIDUAL, _targets), False, frozenset({3}), 0),
    Block("GEMM, residual, RMSNorm, GEMM", Chain, _CHAIN, False, frozenset({4, 5}), 0),
    Block("RMSNorm, QKV, RoPE", Rotary, _HEADS, False, frozenset({4, 7}), 0),
    Block("RMSNorm, SwiGLU", Gated, (_X, _RESIDUAL), False, frozenset({4, 6}), 0),
    Block("RMSNorm, LM head, cross-entropy", Head, (_X, _RESIDUAL, _targets), False, frozenset({4, 8}), 0),
    Block("GEMM, residual, LayerNorm, GEMM", Centred, (_X, _RESIDUAL), False, frozenset({5}), 0),
    Block("GEMM, residual, RMSNorm, GEMM: backward", Chain, _CHAIN, True, frozenset({4, 5, 9}), 1),
    Block("RMSNorm, QKV, RoPE: backward", Rotary, _HEADS, True, frozenset({4, 7, 9}), 1),
    Block("RMSNorm, SwiGLU: backward", Gated, (_X, _RESIDUAL), True, frozenset({4, 6, 9, 10}), 0),
    Block("RMSNorm, LM head, cross-entropy: backward", Head, (_X, _RESIDUAL, _targets), True, frozenset({4, 8, 9}), 1),
)


def found(block: Block) -> tuple[nn.Module, tuple[Tensor, ...], Captured, Rewritten]:
    """The block traced and rewritten."""
    torch.manual_seed(0)
    module, args = block.module(), block.arguments()
    captured = capture(module, *args, training=block.training, name="block")
    target = Target(TILE, captured.parameters, block.training, captured.late)
    return module, args, captured, rewrite(captured.lowered.program, target)


def show(name: str) -> str:
    """The listing of a block: kernels before, laws that fired, block programs after. TilefoldError: no such block."""
    for block in BLOCKS:
        if block.name == name:
            return listing(found(block)[3])
    raise TilefoldError(f"no block {name!r}", hint=f"one of: {'; '.join(b.name for b in BLOCKS)}")


def interpreted(fused: Fused) -> Runner:
    """Block programs run by the interpreter, in float64."""

    def call(inputs: Mapping[str, Tensor], syms: Mapping[str, int]) -> Mapping[str, Tensor]:
        tensors = dict(inputs)
        for k in fused.kernels:
            results = run(k.block, {i.name: tensors[i.name] for i in k.block.inputs}, syms, exact=True)
            tensors.update({r.name: results[r.name] for r in k.block.results})
        return tensors

    return call


def compiled(fused: Fused) -> CompiledProgram:
    """Every block program through C++ (no product is left to a library)."""
    steps = tuple(KernelStep(k) for k in fused.kernels)
    load_all(steps)
    return CompiledProgram(fused.program, fused, steps)


def worst(got: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """The largest error of any result, relative to its largest element; infinite where one is missing."""
    if len(got) != len(wanted) or any((a is None) != (b is None) for a, b in zip(got, wanted, strict=True)):
        return float("inf")
    errors = [
        float((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30))
        for a, b in zip(got, wanted, strict=True)
        if a is not None and b is not None
    ]
    return max(errors) if all(e == e for e in errors) else float("inf")


def check(block: Block) -> Outcome:
    """Rewrite, interpret, compile and compare one block."""
    module, args, captured, rewritten = found(block)
    exact = in_float64(module, captured, args)
    fused = block_programs(rewritten.result)
    error = worst(captured.executable(fused.program, interpreted(fused))(*exact.inputs), exact.expected)
    single = [x.float() if x.is_floating_point() else x for x in exact.inputs]
    in_cpp = worst(captured.executable(fused.program, compiled(fused))(*single), exact.expected)
    kernels = described(rewritten.result)
    papers = [k.paper for k in kernels if k.paper is not None]
    passes = [k for k in kernels if k.kind == "pass"]
    before = [k for k in described(rewritten.before) if k.kind == "pass"]
    ok = error < EXACT and in_cpp < SINGLE and block.kernels <= set(papers) and len(passes) <= block.passes
    laws = ", ".join(f"{law} x{n}" if n > 1 else law for law, n in Counter(rewritten.laws).items())
    moved = f"{rewritten.before.cost.passes:.0f} -> {rewritten.result.cost.passes:.0f} B"
    return Outcome(
        ok,
        f"CODA's kernels {' '.join(map(str, sorted(papers)))}; passes {len(before)} -> {len(passes)} ({moved}); "
        f"{laws or 'no law needed'}; error {error:.0e}, C++ {in_cpp:.0e}",
    )


def cases() -> tuple[BlockCase, ...]:
    """One case a block."""
    return tuple(BlockCase("products with epilogues (CODA)", b.name, partial(check, b)) for b in BLOCKS)
