"""Attention as people write it, and decoding: one query a sequence against many keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f

from tilefold.suites.programs.program import Draw, Program, bf, bits, f32, hf, ints, weight


def _p(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"attention: {name}", "attention", large, small, fn)


def _d(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"decoding: {name}", "decoding", large, small, fn)


def _qkv(b: int, h: int, s: int, d: int, *, kv: int | None = None, keys: int | None = None) -> tuple[Draw, ...]:
    """q: [B, H, S, D]; k, v: [B, KV, keys, D]."""
    k = (b, kv or h, keys or s, d)
    return bf(b, h, s, d), bf(*k), bf(*k)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v


def float_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    return s.float().softmax(-1).to(q.dtype) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return f.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    s = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    return s.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """m: [B, keys], True where there is a token; the first always is."""
    first = torch.arange(m.shape[1], device=m.device) == 0
    return f.scaled_dot_product_attention(q, k, v, attn_mask=(m | first)[:, None, None])


def biased(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return f.scaled_dot_product_attention(q, k, v, attn_mask=b)


def relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A bias by the distance of query and key; table: [H, 2 n - 1]."""
    n = q.shape[2]
    places = torch.arange(n, device=q.device)
    bias = table[:, places[None] - places[:, None] + n - 1]
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def soft_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.tanh(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 / 30) * 30
    return s.softmax(-1) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, places = q.shape[2], torch.arange(q.shape[2], device=q.device)
    far = places[:, None] - places[None]
    seen = (far >= 0) & (far < n // 4)
    return f.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[1] // k.shape[1]
    return causal(q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1))


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 - 6.0) @ v


def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return f.scaled_dot_product_attention(f.normalize(q, dim=-1), f.normalize(k, dim=-1), v, scale=10.0)


def from_packed(x: Tensor, w: Tensor, o: Tensor) -> Tensor:
    """x: [B, S, C] through the packed projection [C, 3 C], heads of 64, and the output projection."""
    b, s, c = x.shape
    heads = max(1, c // 64)
    q, k, v = (x @ w).view(b, s, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
    return f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, c) @ o


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return f.scaled_dot_product_attention(q, k, v)


def decode_interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[1] // k.shape[1]
    return f.scaled_dot_product_attention(q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1))


def _expand(x: Tensor, n: int) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def decode_expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[1] // k.shape[1]
    s = q @ _expand(k, n).transpose(-2, -1) * q.shape[-1] ** -0.5
    return s.float().softmax(-1).to(q.dtype) @ _expand(v, n)


def decode_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """lengths: [B], of the filled part of the cache less one."""
    seen = torch.arange(k.shape[2], device=k.device) <= lengths[:, None]
    return f.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])


def decode_multi_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """k, v: [B, keys, D], shared by all heads."""
    return (torch.einsum("bhd,bkd->bhk", q, k) * q.shape[-1] ** -0.5).softmax(-1) @ v


def decode_written(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor) -> Tensor:
    """The new key and value are put behind the old ones."""
    return decode_interleaved(q, torch.cat((k, new_k), 2), torch.cat((v, new_v), 2))


_SMALL = _qkv(1, 2, 9, 8)
_GQA = _qkv(1, 4, 9, 8, kv=2)
_ONE = _qkv(2, 4, 1, 8, kv=2, keys=9)
ATTENTION = (
    _p("plain", plain, _qkv(4, 16, 1024, 64), _SMALL),
    _p("plain, softmax in float32", float_softmax, _qkv(4, 16, 1024, 64), _SMALL),
    _p("plain, short", plain, _qkv(256, 12, 64, 64), _SMALL),
    _p("plain, 197 tokens", decode, _qkv(64, 12, 197, 64), _SMALL),
    _p("plain, head size 80", decode, _qkv(4, 16, 1024, 80), _qkv(1, 2, 9, 10)),
    _p("float32", plain, (f32(2, 8, 1024, 64),) * 3, (f32(1, 2, 9, 8),) * 3),
    _p("float16, causal", causal, (hf(4, 16, 2048, 64),) * 3, (hf(1, 2, 9, 8),) * 3),
    _p("causal", causal, _qkv(4, 16, 2048, 128), _SMALL),
    _p("causal, by hand", causal_by_hand, _qkv(4, 16, 1024, 64), _SMALL),
    _p("padded keys", padded, (*_qkv(16, 12, 512, 64), bits(16, 512, share=0.8)), (*_SMALL, bits(1, 9, share=0.7))),
    _p("bias", biased, (*_qkv(8, 12, 512, 64), bf(1, 12, 512, 512)), (*_SMALL, bf(1, 2, 9, 9))),
    _p("relative bias", relative, (*_qkv(4, 16, 1024, 64), bf(16, 2047)), (*_SMALL, bf(2, 17))),
    _p("soft cap", soft_capped, _qkv(4, 16, 1024, 64), _SMALL),
    _p("window", windowed, _qkv(4, 16, 1024, 64), _SMALL),
    _p("grouped heads, causal", grouped, _qkv(4, 32, 1024, 128, kv=8), _GQA),
    _p("repeated heads, causal", repeated, _qkv(4, 32, 1024, 128, kv=8), _GQA),
    _p("crossed", decode, _qkv(8, 16, 1024, 64, keys=77), _qkv(1, 2, 9, 8, keys=5)),
    _p("sigmoid", sigmoid, _qkv(4, 16, 1024, 64), _SMALL),
    _p("normalised queries and keys", normalised, _qkv(4, 16, 1024, 64), _SMALL),
    _p("with its projections", from_packed, (bf(8, 1024, 768), weight(768, 2304), weight(768, 768)),
       (bf(2, 5, 64), weight(64, 192), weight(64, 64))),
)  # fmt: skip

DECODING = (
    _d("32 heads", decode, _qkv(8, 32, 1, 128, keys=4096), _qkv(2, 4, 1, 8, keys=9)),
    _d("32 heads, one sequence", decode, _qkv(1, 32, 1, 128, keys=16384), _qkv(1, 4, 1, 8, keys=9)),
    _d("repeat_interleave, 32 / 8", decode_interleaved, _qkv(8, 32, 1, 128, kv=8, keys=4096), _ONE),
    _d("repeat_interleave, 40 / 8", decode_interleaved, _qkv(8, 40, 1, 128, kv=8, keys=4096), _ONE),
    _d("expand, 32 / 8", decode_expanded, _qkv(8, 32, 1, 128, kv=8, keys=4096), _ONE),
    _d("expand, 40 / 8", decode_expanded, _qkv(8, 40, 1, 128, kv=8, keys=4096), _ONE),
    _d("enable_gqa, 28 / 4", lambda q, k, v: f.scaled_dot_product_attention(q, k, v, enable_gqa=True),
       _qkv(16, 28, 1, 128, kv=4, keys=2048), _ONE),
    _d("one head of keys", decode_multi_query, (bf(16, 64, 128), bf(16, 4096, 128), bf(16, 4096, 128)),
       (bf(2, 3, 8), bf(2, 9, 8), bf(2, 9, 8))),
    _d("lengths", decode_lengths, (*_qkv(16, 16, 1, 128, keys=2048), ints(16, high=2048)),
       (*_qkv(2, 4, 1, 8, keys=9), ints(2, high=9))),
    _d("8 queries", decode_interleaved, _qkv(8, 32, 8, 128, kv=8, keys=4096), _qkv(2, 4, 3, 8, kv=2, keys=9)),
    _d("new keys behind the old", decode_written, (*_qkv(8, 32, 1, 128, kv=8, keys=2047), *(2 * (bf(8, 8, 1, 128),))),
       (*_ONE, bf(2, 2, 1, 8), bf(2, 2, 1, 8))),
)  # fmt: skip
