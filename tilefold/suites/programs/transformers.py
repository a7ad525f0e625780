"""Blocks of transformers, as their papers' code has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from tilefold.suites.programs.pointwise import rotary
from tilefold.suites.programs.program import Draw, Program, bf, f32, ints

BF16 = torch.bfloat16


class Rms(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    """Self-attention of [B, S, C]; `groups`: heads of keys; `turned`: rotary positions."""

    def __init__(self, width: int, heads: int, groups: int, *, causal: bool, turned: bool):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.causal, self.turned = causal, turned
        self.q = nn.Linear(width, width, bias=not turned)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=not turned)
        self.out = nn.Linear(width, width, bias=not turned)

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q = self.q(x).view(b, s, self.heads, self.size)
        k, v = self.kv(x).view(b, s, 2, self.groups, self.size).unbind(2)
        if self.turned:
            places = torch.arange(s, device=x.device, dtype=torch.float32)
            rate = 1e4 ** (-torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size)
            angles = (places[:, None] * rate).repeat(1, 2)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        n = self.heads // self.groups
        y = f.scaled_dot_product_attention(
            q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1), is_causal=self.causal
        )
        return self.out(y.transpose(1, 2).reshape(b, s, c))


class Swiglu(nn.Module):
    """Gated perceptron."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(f.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    """RMS norms, rotary grouped attention, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int, inner: int):
        super().__init__()
        self.first, self.second = Rms(width), Rms(width)
        self.attention = Attention(width, heads, groups, causal=True, turned=True)
        self.mlp = Swiglu(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Pre(nn.Module):
    """Layer norm before attention and perceptron, as GPT-2 and ViT; `after`: behind them, as BERT."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, after: bool = False):
        super().__init__()
        self.first, self.second, self.after = nn.LayerNorm(width), nn.LayerNorm(width), after
        self.attention = Attention(width, heads, heads, causal=causal, turned=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.after:
            x = self.first(x + self.attention(x))
            return self.second(x + self.mlp(x))
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Parallel(nn.Module):
    """Attention and perceptron from one norm, as GPT-J."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, heads, causal=True, turned=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attention(h) + self.mlp(h)


class Conditioned(nn.Module):
    """Norms scaled and shifted by a condition, as diffusion transformers have them."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = Attention(width, heads, heads, causal=False, turned=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, g, d, e, h = self.condition(f.silu(c))[:, None].chunk(6, -1)
        n = x.shape[-1:]
        x = x + g * self.attention(f.layer_norm(x, n) * (1 + a) + b)
        return x + h * self.mlp(f.layer_norm(x, n) * (1 + d) + e)


class Experts(nn.Module):
    """Two of several experts a token, every expert on every token."""

    def __init__(self, width: int, inner: int, experts: int):
        super().__init__()
        self.norm, self.gate = Rms(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Swiglu(width, inner) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        z, chosen = self.gate(h).float().topk(2, -1)
        gates = torch.zeros_like(self.gate(h).float()).scatter(-1, chosen, z.softmax(-1)).to(x.dtype)
        for n, expert in enumerate(self.experts):
            x = x + gates[..., n : n + 1] * expert(h)
        return x


class Decoder(nn.Module):
    """Tokens in, logits out: two blocks."""

    def __init__(self, vocabulary: int, width: int, heads: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Llama(width, heads, heads // 2, 2 * width) for _ in range(2)))
        self.norm, self.head = Rms(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


def _p(name: str, module: object, large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"transformer: {name}", "transformers", large, small, module=module)  # type: ignore[arg-type]


_ROWS, _FEW = (bf(4, 1024, 1024),), (bf(2, 5, 16),)
PROGRAMS = (
    _p("Llama block", lambda big: Llama(*((1024, 16, 4, 2816) if big else (16, 4, 2, 24))).to(BF16), _ROWS, _FEW),
    _p("Llama block, 2,048 wide", lambda big: Llama(*((2048, 16, 16, 5632) if big else (16, 2, 2, 24))).to(BF16),
       (bf(2, 1024, 2048),), _FEW),
    _p("GPT-2 block", lambda big: Pre(*((768, 12) if big else (16, 2)), causal=True).to(BF16), (bf(8, 1024, 768),),
       _FEW),
    _p("GPT-2 block, float32", lambda big: Pre(*((768, 12) if big else (16, 2)), causal=True), (f32(4, 512, 768),),
       (f32(2, 5, 16),)),
    _p("BERT block", lambda big: Pre(*((768, 12) if big else (16, 2)), after=True).to(BF16), (bf(16, 512, 768),), _FEW),
    _p("ViT block", lambda big: Pre(*((768, 12) if big else (16, 2))).to(BF16), (bf(32, 197, 768),), _FEW),
    _p("parallel block", lambda big: Parallel(*((1024, 16) if big else (16, 2))).to(BF16), _ROWS, _FEW),
    _p("conditioned block", lambda big: Conditioned(*((1152, 16) if big else (16, 2))).to(BF16),
       (bf(8, 256, 1152), bf(8, 1152)), (bf(2, 5, 16), bf(2, 16))),
    _p("experts", lambda big: Experts(*((1024, 1024, 4) if big else (16, 8, 3))).to(BF16), _ROWS, _FEW),
    _p("decoder of two layers", lambda big: Decoder(*((32000, 512, 8) if big else (20, 16, 4))).to(BF16),
       (ints(4, 512, high=32000),), (ints(2, 5, high=20),)),
    _p("encoder layer of torch", lambda big: nn.TransformerEncoderLayer(*((512, 8, 2048) if big else (16, 2, 24)),
       batch_first=True, norm_first=True).to(BF16), (bf(16, 512, 512),), _FEW),
)  # fmt: skip
