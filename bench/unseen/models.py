"""Sixty plain PyTorch programs of language, vision, audio, tabular, optimiser and quantisation work."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

TRAIN = (
    "GroupedQueryAttention",
    "ParallelQKNormBlock",
    "squared_relu_mlp",
    "DenseMixtral",
    "gla_chunk",
    "MinGRU",
    "label_smoothing_z_loss",
    "dpo_loss",
    "ppo_loss",
    "grpo_loss",
    "kl_distill_loss",
    "DiTBlock",
    "UNetResBlock",
    "ConvNeXtV2Block",
    "SwinBlock",
    "NAFBlock",
    "clip_loss",
    "vicreg_loss",
    "WaveNetBlock",
    "CrossNetV2",
)

# ---------------------------------------------------------------------------------------------------------------------
# Language-model attention and feed-forward
# ---------------------------------------------------------------------------------------------------------------------


def partial_rotary_attention(q, k, v, cos, sin):
    """Causal attention whose first quarter of each head is rotated, as in GPT-NeoX."""
    rot = cos.shape[-1]

    def rotate_half(x):
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((-x2, x1), dim=-1)

    def apply(x):
        x_rot, x_pass = x[..., :rot], x[..., rot:]
        x_rot = x_rot * cos + rotate_half(x_rot) * sin
        return torch.cat((x_rot, x_pass), dim=-1)

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(apply(q), apply(k), v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def partial_rotary_attention_inputs():
    b, s, h, d, rot = 2, 2048, 16, 96, 24
    freqs = torch.outer(torch.arange(s).float(), 10000 ** (-torch.arange(0, rot, 2).float() / rot))
    emb = torch.cat((freqs, freqs), dim=-1)
    qkv = [torch.randn(b, s, h, d, dtype=torch.bfloat16) for _ in range(3)]
    return (*qkv, emb.cos().bfloat16(), emb.sin().bfloat16())


def ntk_rotary(q, k, position_ids):
    """Interleaved rotary embedding with an NTK-scaled base computed on the fly."""
    d = q.shape[-1]
    base = 10000.0 * 4.0 ** (d / (d - 2))
    inv_freq = 1.0 / base ** (torch.arange(0, d, 2, device=q.device, dtype=torch.float32) / d)
    angles = position_ids[:, None, :, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()

    def apply(x):
        x_even, x_odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.stack((x_even * cos - x_odd * sin, x_even * sin + x_odd * cos), dim=-1)
        return out.flatten(-2).type_as(x)

    return apply(q), apply(k)


def ntk_rotary_inputs():
    q = torch.randn(4, 32, 1000, 128, dtype=torch.bfloat16)
    k = torch.randn(4, 8, 1000, 128, dtype=torch.bfloat16)
    return q, k, torch.arange(1000).expand(4, 1000) + torch.tensor([[0], [17], [333], [4096]])


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention by hand, causal, with a key-padding mask."""

    def __init__(self, dim=2048, heads=16, kv_heads=4):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x, attention_mask):
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        causal = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        allowed = causal & attention_mask[:, None, None, :]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores.float(), dim=-1).to(q.dtype)
        out = torch.matmul(probs, v).transpose(1, 2).contiguous().view(b, s, -1)
        return self.wo(out)


def GroupedQueryAttention_inputs():
    lengths = torch.tensor([777, 512, 600, 64])
    return torch.randn(4, 777, 2048, dtype=torch.bfloat16), torch.arange(777)[None, :] < lengths[:, None]


class LatentAttention(nn.Module):
    """Multi-head latent attention with compressed queries and keys and a shared rotary key."""

    def __init__(self, dim=2048, heads=16, q_rank=512, kv_rank=384, nope=128, rope=64, v_dim=128):
        super().__init__()
        self.heads, self.nope, self.rope, self.v_dim, self.kv_rank = heads, nope, rope, v_dim, kv_rank
        self.q_down = nn.Linear(dim, q_rank, bias=False)
        self.q_norm = nn.RMSNorm(q_rank, eps=1e-6)
        self.q_up = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.kv_down = nn.Linear(dim, kv_rank + rope, bias=False)
        self.kv_norm = nn.RMSNorm(kv_rank, eps=1e-6)
        self.kv_up = nn.Linear(kv_rank, heads * (nope + v_dim), bias=False)
        self.out = nn.Linear(heads * v_dim, dim, bias=False)
        self.to(torch.bfloat16)

    @staticmethod
    def rotate(x, cos, sin):
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(b, s, self.heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        latent, k_rope = self.kv_down(x).split([self.kv_rank, self.rope], dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(b, s, self.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v_dim], dim=-1)
        q_rope = self.rotate(q_rope, cos, sin)
        k_rope = self.rotate(k_rope.unsqueeze(1), cos, sin)
        scores = q_nope @ k_nope.transpose(-1, -2) + q_rope @ k_rope.transpose(-1, -2)
        scores = scores.float() * (self.nope + self.rope) ** -0.5
        mask = torch.full((s, s), float("-inf"), device=x.device).triu(1)
        probs = (scores + mask).softmax(dim=-1).to(x.dtype)
        return self.out((probs @ v).transpose(1, 2).reshape(b, s, -1))


def LatentAttention_inputs():
    angles = torch.outer(torch.arange(1024).float(), 10000 ** (-torch.arange(32).float() / 32))
    return torch.randn(2, 1024, 2048, dtype=torch.bfloat16), angles.cos(), angles.sin()


def sliding_softcap_attention(q, k, v):
    """Sliding-window grouped attention with soft-capped logits, as in Gemma 2."""
    window, cap = 256, 50.0
    b, h, s, d = q.shape
    groups = h // k.shape[1]
    q = q.view(b, k.shape[1], groups, s, d)
    logits = torch.einsum("bkgqd,bksd->bkgqs", q * d**-0.5, k)
    logits = torch.tanh(logits / cap) * cap
    i = torch.arange(s, device=q.device)
    distance = i[:, None] - i[None, :]
    mask = (distance >= 0) & (distance < window)
    logits = torch.where(mask, logits, -2.3819763e38)
    probs = torch.softmax(logits.float(), dim=-1).to(v.dtype)
    return torch.einsum("bkgqs,bksd->bqkgd", probs, v).reshape(b, s, h * d)


def sliding_softcap_attention_inputs():
    q = torch.randn(2, 8, 1024, 256, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 4, 1024, 256, dtype=torch.bfloat16) for _ in range(2))
    return q, k, v


class T5SelfAttention(nn.Module):
    """T5 encoder self-attention: pre RMS norm, bucketed relative bias, unscaled logits, residual."""

    def __init__(self, dim=768, heads=12, buckets=32, max_distance=128):
        super().__init__()
        self.heads, self.buckets, self.max_distance = heads, buckets, max_distance
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.relative_attention_bias = nn.Embedding(buckets, heads)
        self.to(torch.bfloat16)

    def bias(self, s, device):
        pos = torch.arange(s, device=device)
        relative = pos[None, :] - pos[:, None]
        half = self.buckets // 2
        bucket = (relative > 0).long() * half
        distance = relative.abs()
        exact = half // 2
        large = torch.log(distance.float().clamp(min=1) / exact) / math.log(self.max_distance / exact)
        large = (exact + (large * (half - exact)).long()).clamp(max=half - 1)
        bucket = bucket + torch.where(distance < exact, distance, large)
        return self.relative_attention_bias(bucket).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x, mask):
        b, s, d = x.shape
        y = self.norm(x)
        q, k, v = (f(y).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        bias = self.bias(s, x.device) + (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        weights = F.softmax((torch.matmul(q, k.mT) * 0.125 + bias).float(), dim=-1).type_as(x)
        return x + self.o(torch.matmul(weights, v).transpose(1, 2).reshape(b, s, d))


def T5SelfAttention_inputs():
    mask = (torch.arange(512)[None, :] < torch.tensor([512, 333, 200, 77, 480, 500])[:, None]).long()
    return torch.randn(6, 512, 768, dtype=torch.bfloat16), mask


def alibi_attention(qkv, key_padding_mask):
    """Attention with linear biases from a packed projection, with padded keys masked."""
    b, s, _, h, d = qkv.shape
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    slopes = 2.0 ** (-8.0 * torch.arange(1, h + 1, device=qkv.device, dtype=torch.float32) / h)
    pos = torch.arange(s, device=qkv.device)
    bias = (pos[None, :] - pos[:, None]).float().clamp(max=0) * slopes[:, None, None]
    bias = bias.masked_fill(pos[None, :] > pos[:, None], float("-inf"))
    bias = bias[None].masked_fill(key_padding_mask[:, None, None, :], -1e9)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
    return out.transpose(1, 2).reshape(b, s, h * d)


def alibi_attention_inputs():
    pad = torch.arange(640)[None, :] >= torch.tensor([640, 600, 333, 128])[:, None]
    return torch.randn(4, 640, 3, 16, 64, dtype=torch.float16), pad


class ParallelQKNormBlock(nn.Module):
    """Parallel attention and MLP block (GPT-J) with per-head query and key normalisation."""

    def __init__(self, dim=1536, heads=12):
        super().__init__()
        self.heads = heads
        self.ln = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_norm = nn.LayerNorm(dim // heads)
        self.k_norm = nn.LayerNorm(dim // heads)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.fc_in = nn.Linear(dim, 4 * dim)
        self.fc_out = nn.Linear(4 * dim, dim)
        self.to(torch.bfloat16)

    def forward(self, x):
        b, s, d = x.shape
        h = self.ln(x)
        q, k, v = self.qkv(h).view(b, s, 3, self.heads, d // self.heads).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        attn = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        attn = self.proj(attn.transpose(1, 2).reshape(b, s, d))
        mlp = self.fc_out(F.gelu(self.fc_in(h), approximate="tanh"))
        return x + attn + mlp


def ParallelQKNormBlock_inputs():
    return (torch.randn(2, 1000, 1536, dtype=torch.bfloat16),)


def squared_relu_mlp(x, norm_weight, w_up, w_down):
    """RMS norm, squared-ReLU feed-forward and residual, as in Primer and Nemotron."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
    h = h.to(x.dtype) * (1 + norm_weight)
    h = F.relu(F.linear(h, w_up)).square()
    return x + F.linear(h, w_down)


def squared_relu_mlp_inputs():
    d, f = 2048, 6144
    return (
        torch.randn(2, 1024, d, dtype=torch.bfloat16),
        torch.randn(d, dtype=torch.bfloat16) * 0.1,
        torch.randn(f, d, dtype=torch.bfloat16) * d**-0.5,
        torch.randn(d, f, dtype=torch.bfloat16) * f**-0.5,
    )


class DenseMixtral(nn.Module):
    """Mixtral-like top-2 mixture of SwiGLU experts, evaluated densely and combined by one-hot weights."""

    def __init__(self, dim=768, hidden=1536, experts=8):
        super().__init__()
        self.experts = experts
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.w3 = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)
        self.to(torch.bfloat16)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        probs = F.softmax(self.gate(tokens), dim=-1, dtype=torch.float)
        weights, selected = torch.topk(probs, 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        combine = (F.one_hot(selected, self.experts) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
        up = F.silu(torch.einsum("td,edh->eth", tokens, self.w1)) * torch.einsum("td,edh->eth", tokens, self.w3)
        y = torch.einsum("eth,ehd->etd", up, self.w2)
        out = torch.einsum("te,etd->td", combine, y).view_as(x)
        load = F.one_hot(selected, self.experts).float().sum(1).mean(0)
        aux = self.experts * (load * probs.mean(0)).sum()
        return out, aux


def DenseMixtral_inputs():
    return (torch.randn(4, 333, 768, dtype=torch.bfloat16),)


def deepseek_router(x, weight, correction_bias):
    """Sigmoid routing with a selection bias and group-limited top-k, as in DeepSeek-V3."""
    n, groups, keep_groups, top_k = x.shape[0], 8, 4, 8
    scores = F.linear(x.float(), weight).sigmoid()
    choice = scores + correction_bias
    group_scores = choice.view(n, groups, -1).topk(2, dim=-1).values.sum(dim=-1)
    group_idx = group_scores.topk(keep_groups, dim=-1, sorted=False).indices
    group_mask = torch.zeros_like(group_scores).scatter(1, group_idx, 1.0)
    score_mask = group_mask.unsqueeze(-1).expand(n, groups, weight.shape[0] // groups).reshape(n, -1)
    choice = choice.masked_fill(score_mask == 0, 0.0)
    indices = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, indices)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 2.5
    return weights.type_as(x), indices


def deepseek_router_inputs():
    return (
        torch.randn(4096, 2048, dtype=torch.bfloat16),
        torch.randn(256, 2048) * 2048**-0.5,
        torch.rand(256) * 0.1,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Recurrent and linear-attention language-model blocks
# ---------------------------------------------------------------------------------------------------------------------


def rwkv_time_mix(x, shift_state, mix_r, mix_k, mix_v, w_r, w_k, w_v, decay, bonus, state):
    """RWKV time mixing over eight steps: token shift, projections, unrolled decay recurrence, per-head norm."""
    b, t, c = x.shape
    h, d = bonus.shape
    previous = torch.cat((shift_state.unsqueeze(1), x[:, :-1]), dim=1)
    delta = previous - x
    r = F.linear(x + delta * mix_r, w_r).view(b, t, h, d).float()
    k = F.linear(x + delta * mix_k, w_k).view(b, t, h, d).float()
    v = F.linear(x + delta * mix_v, w_v).view(b, t, h, d).float()
    w = torch.exp(-torch.exp(decay)).unsqueeze(-1)
    outs = []
    for i in range(t):
        kv = k[:, i].unsqueeze(-1) * v[:, i].unsqueeze(-2)
        outs.append(torch.einsum("bhk,bhkv->bhv", r[:, i], state + bonus.unsqueeze(-1) * kv))
        state = state * w + kv
    out = torch.stack(outs, dim=1)
    out = F.group_norm(out.reshape(b * t, c), h, eps=64e-5).view(b, t, c)
    return out.type_as(x), x[:, -1], state


def rwkv_time_mix_inputs():
    b, t, h, d = 16, 8, 16, 64
    c = h * d
    bf = torch.bfloat16
    mixes = [torch.rand(c, dtype=bf) for _ in range(3)]
    weights = [torch.randn(c, c, dtype=bf) * c**-0.5 for _ in range(3)]
    return (
        torch.randn(b, t, c, dtype=bf),
        torch.randn(b, c, dtype=bf),
        *mixes,
        *weights,
        torch.randn(h, d) - 3,
        torch.randn(h, d),
        torch.randn(b, h, d, d),
    )


def retention_chunk(q, k, v, gate, state):
    """One chunk of RetNet retention: decayed inner part, cross-chunk part, group norm, swish gate, new state."""
    b, h, c, dk = q.shape
    gamma = torch.log(1 - 2.0 ** (-5 - torch.arange(h, device=q.device, dtype=torch.float32)))
    i = torch.arange(c, device=q.device, dtype=torch.float32)
    distance = i[:, None] - i[None, :]
    decay = torch.where(distance >= 0, torch.exp(distance * gamma[:, None, None]), 0.0)
    k = k * dk**-0.5
    inner = (torch.matmul(q, k.transpose(-1, -2)).float() * decay).to(v.dtype) @ v
    q_decay = torch.exp((i + 1) * gamma[:, None])[None, :, :, None]
    cross = torch.matmul(q.float() * q_decay, state)
    k_decay = torch.exp((c - 1 - i) * gamma[:, None])[None, :, :, None]
    new_state = state * torch.exp(c * gamma)[None, :, None, None] + (k.float() * k_decay).mT @ v.float()
    out = inner.float() + cross
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6)
    out = out.to(v.dtype).transpose(1, 2).reshape(b, c, -1)
    return F.silu(gate) * out, new_state


def retention_chunk_inputs():
    b, h, c, dk, dv = 4, 8, 512, 128, 256
    bf = torch.bfloat16
    return (
        torch.randn(b, h, c, dk, dtype=bf),
        torch.randn(b, h, c, dk, dtype=bf),
        torch.randn(b, h, c, dv, dtype=bf),
        torch.randn(b, c, h * dv, dtype=bf),
        torch.randn(b, h, dk, dv) * 0.1,
    )


def gla_chunk(q, k, v, g):
    """Gated linear attention in chunked form with per-channel log gates and an unrolled chunk recurrence."""
    _b, _h, s, dk = q.shape
    c = 64
    q, k, v, g = (t.unflatten(2, (s // c, c)) for t in (q, k, v, g))
    log_decay = (F.logsigmoid(g) / 16).cumsum(dim=-2)
    total = log_decay[..., -1:, :]
    q_in = q * dk**-0.5 * log_decay.exp()
    k_in = k * (-log_decay).exp()
    k_out = k * (total - log_decay).exp()
    mask = torch.ones(c, c, dtype=torch.bool, device=q.device).tril()
    intra = (q_in @ k_in.transpose(-1, -2)).masked_fill(~mask, 0.0) @ v
    updates = k_out.transpose(-1, -2) @ v
    state = torch.zeros_like(updates[:, :, 0])
    inter = []
    for n in range(s // c):
        inter.append(q_in[:, :, n] @ state)
        state = state * total[:, :, n].exp().transpose(-1, -2) + updates[:, :, n]
    return (intra + torch.stack(inter, dim=2)).flatten(2, 3)


def gla_chunk_inputs():
    q, k, g = (torch.randn(4, 4, 512, 128) for _ in range(3))
    return q, k, torch.randn(4, 4, 512, 256), g


class MambaFront(nn.Module):
    """Mamba block up to the scan: input projection, causal depthwise conv, SiLU, step sizes and gate."""

    def __init__(self, dim=1024, expand=2, state=16, conv=4):
        super().__init__()
        inner = dim * expand
        self.state, self.rank = state, math.ceil(dim / 16)
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, conv, groups=inner, padding=conv - 1)
        self.x_proj = nn.Linear(inner, self.rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(self.rank, inner)
        self.d = nn.Parameter(torch.ones(inner))
        self.to(torch.bfloat16)

    def forward(self, u):
        length = u.shape[1]
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x = self.conv1d(x.transpose(1, 2))[..., :length].transpose(1, 2)
        x = F.silu(x)
        dt, b_mat, c_mat = self.x_proj(x).split([self.rank, self.state, self.state], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        return x * self.d * F.silu(z), dt, b_mat, c_mat


def MambaFront_inputs():
    return (torch.randn(2, 1000, 1024, dtype=torch.bfloat16),)


class MinGRU(nn.Module):
    """Parallel minGRU in log space by cumulative sums and logcumsumexp."""

    def __init__(self, dim=512, expand=1.5):
        super().__init__()
        inner = int(dim * expand)
        self.norm = nn.RMSNorm(dim)
        self.to_hidden_gate = nn.Linear(dim, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)

    @staticmethod
    def log_g(x):
        return torch.where(x >= 0, (F.relu(x) + 0.5).log(), -F.softplus(-x))

    def forward(self, x):
        hidden, gate = self.to_hidden_gate(self.norm(x)).chunk(2, dim=-1)
        log_coeffs = -F.softplus(gate)
        log_values = -F.softplus(-gate) + self.log_g(hidden)
        a_star = log_coeffs.cumsum(dim=1)
        log_h = a_star + (log_values - a_star).logcumsumexp(dim=1)
        return x + self.to_out(log_h.exp())


def MinGRU_inputs():
    return (torch.randn(8, 512, 512),)


# ---------------------------------------------------------------------------------------------------------------------
# Decoding and sampling
# ---------------------------------------------------------------------------------------------------------------------


def kv_decode_step(q, k_new, v_new, k_cache, v_cache, positions):
    """One decoding step of grouped attention that writes the new key and value into the cache by where."""
    b, h, _, d = q.shape
    slots = torch.arange(k_cache.shape[2], device=q.device)
    write = (slots[None, :] == positions[:, None])[:, None, :, None]
    k = torch.where(write, k_new, k_cache)
    v = torch.where(write, v_new, v_cache)
    visible = (slots[None, :] <= positions[:, None])[:, None, None, :]
    qg = q.view(b, k.shape[1], -1, d)
    scores = torch.matmul(qg, k.transpose(-1, -2)).float() * d**-0.5
    probs = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1).to(v.dtype)
    return torch.matmul(probs, v).reshape(b, 1, h * d), k, v


def kv_decode_step_inputs():
    bf = torch.bfloat16
    return (
        torch.randn(8, 32, 1, 128, dtype=bf),
        torch.randn(8, 8, 1, 128, dtype=bf),
        torch.randn(8, 8, 1, 128, dtype=bf),
        torch.randn(8, 8, 1536, 128, dtype=bf),
        torch.randn(8, 8, 1536, 128, dtype=bf),
        torch.tensor([1000, 77, 333, 1535, 0, 512, 1200, 900]),
    )


def speculative_accept(draft_logits, target_logits, draft_tokens, uniforms):
    """Speculative decoding: acceptance of drafted tokens, accepted length and residual distribution."""
    p = F.softmax(target_logits.float(), dim=-1)
    q = F.softmax(draft_logits.float(), dim=-1)
    p_tok = p.gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1)
    q_tok = q.gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1)
    accept = uniforms < (p_tok / q_tok.clamp(min=1e-10)).clamp(max=1.0)
    count = accept.int().cumprod(dim=-1).sum(dim=-1)
    residual = F.relu(p - q)
    residual = residual / residual.sum(dim=-1, keepdim=True).clamp(min=1e-10)
    at = count.clamp(max=p.shape[1] - 1).view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    return accept, count, residual.gather(1, at).squeeze(1)


def speculative_accept_inputs():
    logits = [torch.randn(8, 5, 32000, dtype=torch.bfloat16) * 2 for _ in range(2)]
    return (*logits, torch.randint(0, 32000, (8, 5)), torch.rand(8, 5))


def top_p_filter(logits, temperature):
    """Nucleus filtering by sort and cumulative sum with per-row temperature, restored to vocabulary order."""
    logits = logits / temperature[:, None]
    sorted_logits, order = torch.sort(logits, dim=-1, descending=True)
    cumulative = sorted_logits.softmax(dim=-1).cumsum(dim=-1)
    remove = cumulative > 0.9
    remove = torch.cat((torch.zeros_like(remove[:, :1]), remove[:, :-1]), dim=-1)
    remove = torch.zeros_like(remove).scatter(1, order, remove)
    return logits.masked_fill(remove, float("-inf")).softmax(dim=-1)


def top_p_filter_inputs():
    return torch.randn(32, 50257) * 3, torch.rand(32) + 0.5


def min_p_repetition_sampling(logits, previous, bad_words, noise):
    """Repetition penalty by gather and scatter, banned tokens, min-p cut and Gumbel-max choice."""
    seen = logits.gather(1, previous)
    seen = torch.where(seen < 0, seen * 1.2, seen / 1.2)
    logits = logits.scatter(1, previous, seen)
    logits = logits.masked_fill(bad_words, float("-inf"))
    probs = torch.softmax(logits.float() / 0.8, dim=-1)
    threshold = 0.05 * probs.amax(dim=-1, keepdim=True)
    kept = torch.where(probs >= threshold, probs, 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    token = (kept / noise).argmax(dim=-1)
    return token, kept.gather(1, token[:, None]).log().squeeze(1)


def min_p_repetition_sampling_inputs():
    vocab = 128256
    previous = torch.stack([torch.randperm(vocab)[:1000] for _ in range(16)])
    noise = torch.empty(16, vocab).exponential_().clamp(min=1e-8)
    return torch.randn(16, vocab, dtype=torch.float16) * 2, previous, torch.rand(vocab) < 0.01, noise


def beam_update(logits, beam_scores, finished, lengths):
    """Beam search update: finished beams may only pad, joint top-k over beams and words, reordered state."""
    b, beams, vocab = logits.shape
    log_probs = F.log_softmax(logits.float(), dim=-1)
    pad_only = torch.where(torch.arange(vocab, device=logits.device) == 0, 0.0, float("-inf"))
    log_probs = torch.where(finished.unsqueeze(-1), pad_only, log_probs)
    scores = beam_scores.unsqueeze(-1) + log_probs
    penalty = ((5.0 + lengths.float()) / 6.0) ** 0.6
    ranked = (scores / penalty.unsqueeze(-1)).view(b, -1)
    _, flat = ranked.topk(beams, dim=-1)
    source = torch.div(flat, vocab, rounding_mode="floor")
    token = flat % vocab
    new_scores = scores.view(b, -1).gather(1, flat)
    new_finished = finished.gather(1, source) | (token == 2)
    new_lengths = lengths.gather(1, source) + (~new_finished).long()
    return new_scores, token, source, new_finished, new_lengths


def beam_update_inputs():
    return (
        torch.randn(16, 5, 32128, dtype=torch.bfloat16),
        torch.randn(16, 5) - 5,
        torch.rand(16, 5) < 0.2,
        torch.randint(1, 77, (16, 5)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------------------------------------------


def label_smoothing_z_loss(logits, labels):
    """Token cross-entropy with label smoothing, ignored positions and a z-loss on the log partition."""
    logits = logits.float()
    mask = (labels != -100).float()
    safe = labels.clamp(min=0)
    log_z = torch.logsumexp(logits, dim=-1)
    nll = log_z - logits.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    smooth = log_z - logits.mean(dim=-1)
    loss = 0.9 * nll + 0.1 * smooth + 1e-4 * log_z.square()
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def label_smoothing_z_loss_inputs():
    labels = torch.randint(0, 32000, (4, 333))
    return torch.randn(4, 333, 32000, dtype=torch.bfloat16), labels.masked_fill(torch.rand(4, 333) < 0.1, -100)


def dpo_loss(logits, labels, ref_chosen, ref_rejected):
    """Direct preference optimisation on stacked chosen and rejected sequences, with implicit rewards."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    mask = labels != -100
    picked = torch.gather(logits.float().log_softmax(-1), 2, labels.masked_fill(~mask, 0).unsqueeze(2)).squeeze(2)
    logps = (picked * mask).sum(-1)
    chosen, rejected = logps.chunk(2, dim=0)
    beta = 0.1
    margin = (chosen - rejected) - (ref_chosen - ref_rejected)
    losses = -F.logsigmoid(beta * margin) * 0.95 - F.logsigmoid(-beta * margin) * 0.05
    return losses.mean(), beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)


def dpo_loss_inputs():
    labels = torch.randint(0, 32000, (4, 257))
    labels[:, :77] = -100
    refs = [torch.randn(2) * 5 - 1900 for _ in range(2)]
    return torch.randn(4, 257, 32000, dtype=torch.bfloat16), labels, *refs


def ppo_loss(logits, actions, old_logp, advantages, values, old_values, returns):
    """PPO objective with clipped ratio, clipped value loss, entropy bonus and normalised advantages."""
    logp_all = F.log_softmax(logits, dim=-1)
    logp = logp_all.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
    adv = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = torch.exp(logp - old_logp)
    policy = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    clipped = old_values + (values - old_values).clamp(-0.2, 0.2)
    value = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()
    return policy + 0.5 * value - 0.01 * entropy


def ppo_loss_inputs():
    n = 65536
    rest = [torch.randn(n) for _ in range(4)]
    return torch.randn(n, 18), torch.randint(0, 18, (n,)), torch.randn(n) * 0.2 - 2.9, *rest


def grpo_loss(logps, old_logps, ref_logps, rewards, mask):
    """Group-relative policy loss: advantages within groups of eight, clipped ratios and the k3 penalty."""
    groups = rewards.view(-1, 8)
    adv = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-4)
    adv = adv.view(-1, 1)
    ratio = torch.exp(logps - old_logps)
    objective = torch.min(ratio * adv, torch.clamp(ratio, 0.8, 1.28) * adv)
    delta = ref_logps - logps
    kl = delta.exp() - delta - 1
    per_token = (-objective + 0.04 * kl) * mask
    return (per_token.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean(), (kl * mask).sum() / mask.sum()


def grpo_loss_inputs():
    logps = -torch.rand(256, 2048)
    mask = torch.arange(2048)[None, :] < torch.randint(64, 2048, (256, 1))
    return logps, logps + 0.1 * torch.randn_like(logps), logps + 0.1 * torch.randn_like(logps), torch.rand(256), mask


def kl_distill_loss(student, teacher, labels):
    """Knowledge distillation: temperature-scaled KL divergence to the teacher mixed with cross-entropy."""
    t = 2.0
    kl = F.kl_div(
        F.log_softmax(student.float() / t, dim=-1),
        F.log_softmax(teacher.float() / t, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    return 0.7 * t * t * kl + 0.3 * F.cross_entropy(student.float(), labels)


def kl_distill_loss_inputs():
    logits = [torch.randn(1000, 32000, dtype=torch.bfloat16) for _ in range(2)]
    return *logits, torch.randint(0, 32000, (1000,))


def clip_loss(image, text, logit_scale):
    """CLIP symmetric contrastive loss with normalised features and a learned scale."""
    image = image / image.norm(dim=-1, keepdim=True)
    text = text / text.norm(dim=-1, keepdim=True)
    logits = logit_scale.exp().clamp(max=100) * image @ text.t()
    labels = torch.arange(image.shape[0], device=image.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def clip_loss_inputs():
    return torch.randn(2048, 768), torch.randn(2048, 768), torch.tensor(2.6592)


def vicreg_loss(x, y):
    """VICReg: invariance, variance hinge and off-diagonal covariance terms of two views."""
    n, d = x.shape
    invariance = F.mse_loss(x, y)
    x = x - x.mean(dim=0)
    y = y - y.mean(dim=0)
    std_x, std_y = torch.sqrt(x.var(dim=0) + 1e-4), torch.sqrt(y.var(dim=0) + 1e-4)
    variance = F.relu(1 - std_x).mean() / 2 + F.relu(1 - std_y).mean() / 2
    off = ~torch.eye(d, dtype=torch.bool, device=x.device)
    cov_x, cov_y = (x.T @ x) / (n - 1), (y.T @ y) / (n - 1)
    covariance = (cov_x * off).pow(2).sum() / d + (cov_y * off).pow(2).sum() / d
    return 25.0 * invariance + 25.0 * variance + covariance


def vicreg_loss_inputs():
    x = torch.randn(1024, 2048)
    return x, x + 0.3 * torch.randn_like(x)


def dino_loss(student, teacher, center):
    """DINO loss over two global and eight local crops with teacher centring, and the updated centre."""
    n_crops, b = 10, teacher.shape[0] // 2
    s = F.log_softmax(student.float() / 0.1, dim=-1).view(n_crops, b, -1)
    t = F.softmax((teacher.float() - center) / 0.04, dim=-1).view(2, b, -1)
    total = 0.0
    for i in range(2):
        for j in range(n_crops):
            if i != j:
                total = total - (t[i] * s[j]).sum(dim=-1).mean()
    new_center = center * 0.9 + teacher.float().mean(dim=0, keepdim=True) * 0.1
    return total / (2 * n_crops - 2), new_center


def dino_loss_inputs():
    return (
        torch.randn(160, 65536, dtype=torch.bfloat16),
        torch.randn(32, 65536, dtype=torch.bfloat16),
        torch.zeros(1, 65536),
    )


def mae_loss(images, pred, mask):
    """Masked-autoencoder loss on per-patch normalised pixels, with the prediction folded back to an image."""
    b, c, h, w = images.shape
    p = 16
    target = images.reshape(b, c, h // p, p, w // p, p)
    target = torch.einsum("nchpwq->nhwpqc", target).reshape(b, -1, p * p * c)
    mean, var = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
    loss = ((pred - (target - mean) / (var + 1e-6) ** 0.5) ** 2).mean(dim=-1)
    loss = (loss * mask).sum() / mask.sum()
    filled = torch.where(mask.bool().unsqueeze(-1), pred * (var + 1e-6).sqrt() + mean, target)
    filled = filled.reshape(b, h // p, w // p, p, p, c)
    return loss, torch.einsum("nhwpqc->nchpwq", filled).reshape(b, c, h, w)


def mae_loss_inputs():
    return torch.randn(64, 3, 224, 224), torch.randn(64, 196, 768), (torch.rand(64, 196) < 0.75).float()


# ---------------------------------------------------------------------------------------------------------------------
# Diffusion and vision
# ---------------------------------------------------------------------------------------------------------------------


class DiTBlock(nn.Module):
    """Diffusion transformer block with adaLN-zero conditioning."""

    def __init__(self, dim=1152, heads=16):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.adaln = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.to(torch.bfloat16)

    @staticmethod
    def modulate(x, shift, scale):
        return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)

    def attention(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaln(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attention(self.modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(self.modulate(self.norm2(x), shift2, scale2))


def DiTBlock_inputs():
    return torch.randn(8, 256, 1152, dtype=torch.bfloat16), torch.randn(8, 1152, dtype=torch.bfloat16)


class UNetResBlock(nn.Module):
    """Diffusion U-Net residual block with scale-shift time embedding and a 1x1 skip."""

    def __init__(self, cin=320, cout=640, emb=1280):
        super().__init__()
        self.norm1 = nn.GroupNorm(32, cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.emb = nn.Sequential(nn.SiLU(), nn.Linear(emb, 2 * cout))
        self.norm2 = nn.GroupNorm(32, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1)
        self.to(torch.bfloat16)

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.emb(t)[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        h = self.conv2(F.silu(h))
        return (self.skip(x) + h) / math.sqrt(2)


def UNetResBlock_inputs():
    return torch.randn(2, 320, 32, 32, dtype=torch.bfloat16), torch.randn(2, 1280, dtype=torch.bfloat16)


class TextCrossAttention(nn.Module):
    """Stable-diffusion cross attention to 77 text tokens followed by a GEGLU feed-forward, on a feature map."""

    def __init__(self, dim=640, context=768, heads=8):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(context, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.ff_in = nn.Linear(dim, 8 * dim)
        self.ff_out = nn.Linear(4 * dim, dim)
        self.to(torch.float16)

    def forward(self, x, context):
        b, c, h, w = x.shape
        y = x.flatten(2).transpose(1, 2)
        q = self.to_q(self.norm1(y)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.to_kv(context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attn = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        out = torch.einsum("bhij,bhjd->bhid", attn.softmax(dim=-1), v)
        y = y + self.to_out(out.transpose(1, 2).flatten(2))
        value, gate = self.ff_in(self.norm2(y)).chunk(2, dim=-1)
        y = y + self.ff_out(value * F.gelu(gate))
        return y.transpose(1, 2).reshape(b, c, h, w)


def TextCrossAttention_inputs():
    return torch.randn(4, 640, 32, 32, dtype=torch.float16), torch.randn(4, 77, 768, dtype=torch.float16)


class ConvNeXtV2Block(nn.Module):
    """ConvNeXt V2 block with global response normalisation."""

    def __init__(self, dim=192):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pw1 = nn.Linear(dim, 4 * dim)
        self.gamma = nn.Parameter(torch.randn(1, 1, 1, 4 * dim) * 0.1)
        self.beta = nn.Parameter(torch.zeros(1, 1, 1, 4 * dim))
        self.pw2 = nn.Linear(4 * dim, dim)
        self.to(torch.bfloat16)

    def forward(self, x):
        h = self.dwconv(x).permute(0, 2, 3, 1)
        h = F.gelu(self.pw1(self.norm(h)))
        gx = torch.norm(h, p=2, dim=(1, 2), keepdim=True)
        nx = gx / (gx.mean(dim=-1, keepdim=True) + 1e-6)
        h = self.gamma * (h * nx) + self.beta + h
        return x + self.pw2(h).permute(0, 3, 1, 2)


def ConvNeXtV2Block_inputs():
    return (torch.randn(32, 192, 28, 28, dtype=torch.bfloat16),)


class SwinBlock(nn.Module):
    """Swin block with cyclic shift by roll, window partition, relative bias and shifted-window mask."""

    def __init__(self, dim=192, heads=6, size=28, window=7, shift=3):
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = coords[:, :, None] - coords[:, None, :] + window - 1
        self.register_buffer("index", relative[0] * (2 * window - 1) + relative[1])
        region = torch.zeros(size, size)
        bounds = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
        for i, rows in enumerate(bounds):
            for j, cols in enumerate(bounds):
                region[rows, cols] = 3 * i + j
        region = self.partition(region[None, :, :, None]).squeeze(-1)
        self.register_buffer("mask", (region[:, None, :] != region[:, :, None]).float() * -100.0)
        self.to(torch.bfloat16)

    def partition(self, x):
        b, h, w, c = x.shape
        m = self.window
        return x.view(b, h // m, m, w // m, m, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, m * m, c)

    def forward(self, x):
        b, h, w, c = x.shape
        m, n = self.window, self.window**2
        y = torch.roll(self.norm1(x), shifts=(-self.shift, -self.shift), dims=(1, 2))
        y = self.partition(y)
        qkv = self.qkv(y).reshape(-1, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        attn = attn + self.bias_table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).unsqueeze(0)
        attn = attn.view(b, -1, self.heads, n, n) + self.mask[None, :, None]
        attn = attn.view(-1, self.heads, n, n).softmax(dim=-1)
        y = self.proj((attn @ v).transpose(1, 2).reshape(-1, n, c))
        y = y.view(b, h // m, w // m, m, m, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + torch.roll(y, shifts=(self.shift, self.shift), dims=(1, 2))
        return x + self.mlp(self.norm2(x))


def SwinBlock_inputs():
    return (torch.randn(32, 28, 28, 192, dtype=torch.bfloat16),)


class MaxViTGridAttention(nn.Module):
    """MaxViT grid attention on channels-first maps: strided grid partition, attention, inverse, residual."""

    def __init__(self, dim=128, heads=4, grid=7):
        super().__init__()
        self.heads, self.grid = heads, grid
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.bias = nn.Parameter(torch.randn(heads, grid**2, grid**2) * 0.02)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x):
        b, c, h, w = x.shape
        g = self.grid
        y = x.view(b, c, g, h // g, g, w // g).permute(0, 3, 5, 2, 4, 1).reshape(-1, g * g, c)
        q, k, v = self.qkv(self.norm(y)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        out = self.proj(out.transpose(1, 2).flatten(2))
        out = out.view(b, h // g, w // g, g, g, c).permute(0, 5, 3, 1, 4, 2).reshape(b, c, h, w)
        return x + out


def MaxViTGridAttention_inputs():
    return (torch.randn(16, 128, 56, 56, dtype=torch.bfloat16),)


class CoordinateAttention(nn.Module):
    """Coordinate attention: directional pooling, shared 1x1 conv with hard-swish, two gates."""

    def __init__(self, dim=96, reduction=32):
        super().__init__()
        mid = max(8, dim // reduction)
        self.conv1 = nn.Conv2d(dim, mid, 1)
        self.bn1 = nn.BatchNorm2d(mid)
        self.conv_h = nn.Conv2d(mid, dim, 1)
        self.conv_w = nn.Conv2d(mid, dim, 1)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        h, w = x.shape[2:]
        x_h = x.mean(dim=3, keepdim=True)
        x_w = x.mean(dim=2, keepdim=True).permute(0, 1, 3, 2)
        y = F.hardswish(self.bn1(self.conv1(torch.cat((x_h, x_w), dim=2))))
        y_h, y_w = torch.split(y, [h, w], dim=2)
        return x * self.conv_w(y_w.permute(0, 1, 3, 2)).sigmoid() * self.conv_h(y_h).sigmoid()


def CoordinateAttention_inputs():
    return (torch.randn(32, 96, 56, 48, dtype=torch.bfloat16),)


class DenseBlock(nn.Module):
    """DenseNet block of four bottleneck layers with concatenated features and a transition."""

    def __init__(self, cin=64, growth=32, layers=4):
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(layers):
            c = cin + i * growth
            self.layers.append(
                nn.Sequential(
                    nn.BatchNorm2d(c),
                    nn.ReLU(),
                    nn.Conv2d(c, 4 * growth, 1, bias=False),
                    nn.BatchNorm2d(4 * growth),
                    nn.ReLU(),
                    nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
                )
            )
        c = cin + layers * growth
        self.transition = nn.Sequential(
            nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, c // 2, 1, bias=False), nn.AvgPool2d(2, 2)
        )
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, dim=1)))
        return self.transition(torch.cat(features, dim=1))


def DenseBlock_inputs():
    return (torch.randn(16, 64, 56, 56, dtype=torch.bfloat16),)


class FPNTopDown(nn.Module):
    """Feature pyramid: lateral 1x1 convs, nearest upsampling to odd sizes, smoothing and an extra level."""

    def __init__(self, channels=(256, 512, 1024), dim=256):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(c, dim, 1) for c in channels)
        self.smooth = nn.ModuleList(nn.Conv2d(dim, dim, 3, padding=1) for _ in channels)
        self.to(torch.bfloat16)

    def forward(self, c3, c4, c5):
        p5 = self.lateral[2](c5)
        p4 = self.lateral[1](c4) + F.interpolate(p5, size=c4.shape[-2:], mode="nearest")
        p3 = self.lateral[0](c3) + F.interpolate(p4, size=c3.shape[-2:], mode="nearest")
        outs = [conv(p) for conv, p in zip(self.smooth, (p3, p4, p5), strict=True)]
        return (*outs, F.max_pool2d(outs[-1], kernel_size=1, stride=2))


def FPNTopDown_inputs():
    bf = torch.bfloat16
    return (
        torch.randn(2, 256, 75, 99, dtype=bf),
        torch.randn(2, 512, 38, 50, dtype=bf),
        torch.randn(2, 1024, 19, 25, dtype=bf),
    )


class NAFBlock(nn.Module):
    """NAFNet block: channel layer norm, depthwise conv, simple gate and simplified channel attention."""

    def __init__(self, c=64):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c, eps=1e-6), nn.LayerNorm(c, eps=1e-6)
        self.conv1 = nn.Conv2d(c, 2 * c, 1)
        self.conv2 = nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c)
        self.sca = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, c, 1))
        self.conv3 = nn.Conv2d(c, c, 1)
        self.conv4 = nn.Conv2d(c, 2 * c, 1)
        self.conv5 = nn.Conv2d(c, c, 1)
        self.beta = nn.Parameter(torch.full((1, c, 1, 1), 0.1))
        self.gamma = nn.Parameter(torch.full((1, c, 1, 1), 0.1))

    @staticmethod
    def gate(x):
        a, b = x.chunk(2, dim=1)
        return a * b

    @staticmethod
    def norm2d(norm, x):
        return norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(self, x):
        h = self.gate(self.conv2(self.conv1(self.norm2d(self.norm1, x))))
        x = x + self.conv3(h * self.sca(h)) * self.beta
        h = self.conv5(self.gate(self.conv4(self.norm2d(self.norm2, x))))
        return x + h * self.gamma


def NAFBlock_inputs():
    return (torch.randn(2, 64, 128, 128),)


def modulated_conv(x, weight, style, noise, bias):
    """StyleGAN2 modulated and demodulated convolution as one grouped convolution, with noise and leaky ReLU."""
    b, c, h, w = x.shape
    out = weight.shape[0]
    wt = weight.unsqueeze(0) * (style[:, None, :, None, None] + 1)
    demod = torch.rsqrt(wt.float().pow(2).sum(dim=(2, 3, 4), keepdim=True) + 1e-8).to(wt.dtype)
    wt = (wt * demod).reshape(b * out, c, 3, 3)
    y = F.conv2d(x.reshape(1, b * c, h, w), wt, padding=1, groups=b).view(b, out, h, w)
    y = y + noise + bias.view(1, -1, 1, 1)
    return F.leaky_relu(y, 0.2) * math.sqrt(2)


def modulated_conv_inputs():
    half = torch.float16
    return (
        torch.randn(4, 256, 32, 32, dtype=half),
        torch.randn(256, 256, 3, 3, dtype=half) * 0.05,
        torch.randn(4, 256, dtype=half) * 0.5,
        torch.randn(4, 1, 32, 32, dtype=half) * 0.1,
        torch.randn(256, dtype=half),
    )


class SPADE(nn.Module):
    """Spatially adaptive instance normalisation driven by a resized label map, with leaky ReLU."""

    def __init__(self, dim=128, labels=19, hidden=64):
        super().__init__()
        self.shared = nn.Conv2d(labels, hidden, 3, padding=1)
        self.gamma = nn.Conv2d(hidden, dim, 3, padding=1)
        self.beta = nn.Conv2d(hidden, dim, 3, padding=1)
        self.to(torch.bfloat16)

    def forward(self, x, segmap):
        one_hot = F.one_hot(segmap, 19).permute(0, 3, 1, 2).to(x.dtype)
        one_hot = F.interpolate(one_hot, size=x.shape[2:], mode="nearest")
        h = F.relu(self.shared(one_hot))
        return F.leaky_relu(F.instance_norm(x) * (1 + self.gamma(h)) + self.beta(h), 0.2)


def SPADE_inputs():
    return torch.randn(2, 128, 64, 96, dtype=torch.bfloat16), torch.randint(0, 19, (2, 256, 384))


class SlotAttention(nn.Module):
    """Slot attention: three iterations of competitive attention with a GRU cell and residual MLP."""

    def __init__(self, dim=64, hidden=128):
        super().__init__()
        self.norm_in, self.norm_slots, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.gru = nn.GRUCell(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, inputs, slots):
        b, s, d = slots.shape
        inputs = self.norm_in(inputs)
        k, v = self.to_k(inputs), self.to_v(inputs)
        for _ in range(3):
            previous = slots
            q = self.to_q(self.norm_slots(slots)) * d**-0.5
            attn = torch.einsum("bid,bjd->bij", q, k).softmax(dim=1) + 1e-8
            attn = attn / attn.sum(dim=-1, keepdim=True)
            updates = torch.einsum("bij,bjd->bid", attn, v)
            slots = self.gru(updates.reshape(-1, d), previous.reshape(-1, d)).reshape(b, s, d)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots, attn


def SlotAttention_inputs():
    return torch.randn(64, 1024, 64), torch.randn(64, 7, 64)


class DETRDecoderLayer(nn.Module):
    """DETR decoder layer: positional queries, self attention, cross attention with padding mask, feed-forward."""

    def __init__(self, dim=256, heads=8, ff=2048):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, dropout=0.0, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(dim, heads, dropout=0.0, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(dim, ff), nn.Linear(ff, dim)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to(torch.bfloat16)

    def forward(self, tgt, memory, pos, query_pos, padding):
        q = k = tgt + query_pos
        tgt = self.norm1(tgt + self.self_attn(q, k, tgt, need_weights=False)[0])
        attended, weights = self.cross_attn(tgt + query_pos, memory + pos, memory, key_padding_mask=padding)
        tgt = self.norm2(tgt + attended)
        tgt = self.norm3(tgt + self.linear2(F.relu(self.linear1(tgt))))
        return tgt, weights


def DETRDecoderLayer_inputs():
    bf = torch.bfloat16
    padding = torch.arange(1050)[None, :] >= torch.tensor([1050, 950, 800, 1000])[:, None]
    return (
        torch.randn(4, 100, 256, dtype=bf),
        torch.randn(4, 1050, 256, dtype=bf),
        torch.randn(4, 1050, 256, dtype=bf),
        torch.randn(4, 100, 256, dtype=bf),
        padding,
    )


def query_mask_head(queries, pixels, class_logits):
    """MaskFormer semantic inference: mask logits from queries and pixels, upsampled and mixed by class."""
    masks = torch.einsum("bqc,bchw->bqhw", queries, pixels)
    masks = F.interpolate(masks, scale_factor=2.0, mode="bilinear", align_corners=False)
    probs = class_logits.softmax(dim=-1)[..., :-1]
    semantic = torch.einsum("bqk,bqhw->bkhw", probs, masks.sigmoid())
    return semantic, semantic.argmax(dim=1), (masks > 0).flatten(2).sum(dim=-1)


def query_mask_head_inputs():
    bf = torch.bfloat16
    return (
        torch.randn(2, 100, 256, dtype=bf) * 0.1,
        torch.randn(2, 256, 100, 136, dtype=bf),
        torch.randn(2, 100, 134, dtype=bf),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Audio and time series
# ---------------------------------------------------------------------------------------------------------------------


class WaveNetBlock(nn.Module):
    """Three dilated WaveNet layers with gated activations, local conditioning, residuals and summed skips."""

    def __init__(self, channels=64, skip=128, cond=80, dilations=(1, 2, 4)):
        super().__init__()
        self.dilations = dilations
        self.filters = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 2, dilation=d) for d in dilations)
        self.conds = nn.ModuleList(nn.Conv1d(cond, 2 * channels, 1, bias=False) for _ in dilations)
        self.residuals = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in dilations)
        self.skips = nn.ModuleList(nn.Conv1d(channels, skip, 1) for _ in dilations)

    def forward(self, x, c):
        total = 0
        for i, d in enumerate(self.dilations):
            h = self.filters[i](F.pad(x, (d, 0))) + self.conds[i](c)
            a, b = h.chunk(2, dim=1)
            h = torch.tanh(a) * torch.sigmoid(b)
            total = total + self.skips[i](h)
            x = (x + self.residuals[i](h)) * math.sqrt(0.5)
        return x, F.relu(total)


def WaveNetBlock_inputs():
    return torch.randn(4, 64, 8000), torch.randn(4, 80, 8000)


class ConformerConv(nn.Module):
    """Conformer convolution module: pointwise GLU, depthwise conv, batch norm, swish, masked padding."""

    def __init__(self, dim=512, kernel=31):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.pw1 = nn.Conv1d(dim, 2 * dim, 1)
        self.dw = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.bn = nn.BatchNorm1d(dim)
        self.pw2 = nn.Conv1d(dim, dim, 1)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x, pad):
        h = self.norm(x).transpose(1, 2)
        h = F.glu(self.pw1(h), dim=1).masked_fill(pad.unsqueeze(1), 0.0)
        h = self.pw2(F.silu(self.bn(self.dw(h)))).transpose(1, 2)
        return x + h.masked_fill(pad.unsqueeze(-1), 0.0)


def ConformerConv_inputs():
    pad = torch.arange(333)[None, :] >= torch.randint(100, 334, (16, 1))
    return torch.randn(16, 333, 512, dtype=torch.bfloat16), pad


class LocationAttentionLSTM(nn.Module):
    """Tacotron 2 decoder for four steps: LSTM cell, location-sensitive attention, context and mel frame."""

    def __init__(self, enc=512, rnn=512, attn=128, mels=80):
        super().__init__()
        self.cell = nn.LSTMCell(mels + enc, rnn)
        self.query = nn.Linear(rnn, attn, bias=False)
        self.memory = nn.Linear(enc, attn, bias=False)
        self.location_conv = nn.Conv1d(2, 32, 31, padding=15, bias=False)
        self.location = nn.Linear(32, attn, bias=False)
        self.v = nn.Linear(attn, 1, bias=False)
        self.frame = nn.Linear(rnn + enc, mels)

    def forward(self, encoded, frame, h, c, pad):
        processed = self.memory(encoded)
        weights = torch.zeros_like(encoded[:, :, 0])
        cumulative = torch.zeros_like(weights)
        context = torch.zeros_like(encoded[:, 0])
        frames, alignments = [], []
        for _ in range(4):
            h, c = self.cell(torch.cat((frame, context), dim=-1), (h, c))
            loc = self.location_conv(torch.stack((weights, cumulative), dim=1)).transpose(1, 2)
            energy = self.v(torch.tanh(self.query(h).unsqueeze(1) + processed + self.location(loc))).squeeze(-1)
            weights = F.softmax(energy.masked_fill(pad, float("-inf")), dim=-1)
            cumulative = cumulative + weights
            context = torch.bmm(weights.unsqueeze(1), encoded).squeeze(1)
            frame = self.frame(torch.cat((h, context), dim=-1))
            frames.append(frame)
            alignments.append(weights)
        return torch.stack(frames, dim=1), torch.stack(alignments, dim=1), h, c


def LocationAttentionLSTM_inputs():
    pad = torch.arange(197)[None, :] >= torch.randint(50, 198, (32, 1))
    return torch.randn(32, 197, 512), torch.randn(32, 80), torch.zeros(32, 512), torch.zeros(32, 512), pad


# ---------------------------------------------------------------------------------------------------------------------
# Tabular and recommendation
# ---------------------------------------------------------------------------------------------------------------------


class FTTransformer(nn.Module):
    """FT-Transformer: numeric and categorical tokens, class token, one encoder layer and a head."""

    def __init__(self, numeric=36, categories=40, cardinality=100, dim=192):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numeric, dim) * 0.1)
        self.bias = nn.Parameter(torch.randn(numeric, dim) * 0.1)
        self.embedding = nn.Embedding(categories * cardinality, dim)
        self.register_buffer("offsets", torch.arange(categories) * cardinality)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.encoder = nn.TransformerEncoderLayer(
            dim, 8, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.ReLU(), nn.Linear(dim, 2))
        self.to(torch.bfloat16)

    def forward(self, x_num, x_cat):
        num = x_num.unsqueeze(-1) * self.weight + self.bias
        cat = self.embedding(x_cat + self.offsets)
        tokens = torch.cat((self.cls.expand(x_num.shape[0], -1, -1), num, cat), dim=1)
        return self.head(self.encoder(tokens)[:, 0])


def FTTransformer_inputs():
    return torch.randn(512, 36, dtype=torch.bfloat16), torch.randint(0, 100, (512, 40))


class CrossNetV2(nn.Module):
    """DCN V2: three low-rank cross layers beside a deep tower, joined into a click probability."""

    def __init__(self, dim=429, rank=64, layers=3):
        super().__init__()
        self.u = nn.ModuleList(nn.Linear(rank, dim) for _ in range(layers))
        self.v = nn.ModuleList(nn.Linear(dim, rank, bias=False) for _ in range(layers))
        self.deep = nn.Sequential(nn.Linear(dim, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.head = nn.Linear(dim + 256, 1)

    def forward(self, x0):
        x = x0
        for u, v in zip(self.u, self.v, strict=True):
            x = x0 * u(v(x)) + x
        return torch.sigmoid(self.head(torch.cat((x, self.deep(x0)), dim=-1))).squeeze(-1)


def CrossNetV2_inputs():
    return (torch.randn(8192, 429),)


def sparsemax(x, prior):
    """TabNet attentive step: prior-scaled sparsemax by sort and cumulative sum, with updated prior and entropy."""
    z = x * prior
    z = z - z.max(dim=-1, keepdim=True).values
    z_sorted, _ = torch.sort(z, dim=-1, descending=True)
    k = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    cumulative = z_sorted.cumsum(dim=-1)
    support = (1 + k * z_sorted) > cumulative
    size = support.sum(dim=-1, keepdim=True)
    tau = (cumulative.gather(-1, size - 1) - 1) / size.to(z.dtype)
    mask = torch.clamp(z - tau, min=0)
    entropy = -(mask * torch.log(mask + 1e-15)).sum(dim=-1).mean()
    return mask, prior * (1.3 - mask), entropy


def sparsemax_inputs():
    return torch.randn(16384, 333), torch.rand(16384, 333)


def sinkhorn(scores, alpha):
    """SuperGlue matching: dustbin augmentation and eight log-domain Sinkhorn iterations."""
    b, m, n = scores.shape
    bins0 = alpha.expand(b, m, 1)
    bins1 = alpha.expand(b, 1, n)
    couplings = torch.cat((torch.cat((scores, bins0), -1), torch.cat((bins1, alpha.expand(b, 1, 1)), -1)), 1)
    norm = -math.log(m + n)
    ones_m, ones_n = torch.zeros_like(couplings[:, :-1, 0]), torch.zeros_like(couplings[:, 0, :-1])
    log_mu = torch.cat((ones_m + norm, ones_m[:, :1] + math.log(n) + norm), dim=1)
    log_nu = torch.cat((ones_n + norm, ones_n[:, :1] + math.log(m) + norm), dim=1)
    u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
    for _ in range(8):
        u = log_mu - torch.logsumexp(couplings + v.unsqueeze(1), dim=2)
        v = log_nu - torch.logsumexp(couplings + u.unsqueeze(2), dim=1)
    return couplings + u.unsqueeze(2) + v.unsqueeze(1) - norm


def sinkhorn_inputs():
    return torch.randn(8, 512, 500), torch.tensor(1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Optimisers
# ---------------------------------------------------------------------------------------------------------------------


def adamw_step(param, grad, exp_avg, exp_avg_sq, step):
    """AdamW with float32 master weights and bfloat16 gradients, returning the new state and a bfloat16 copy."""
    beta1, beta2, lr, eps, decay = 0.9, 0.95, 3e-4, 1e-8, 0.1
    g = grad.float()
    exp_avg = exp_avg.lerp(g, 1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + g * g * (1 - beta2)
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    denom = exp_avg_sq.sqrt() / bias2.sqrt() + eps
    param = param * (1 - lr * decay) - (lr / bias1) * exp_avg / denom
    return param, exp_avg, exp_avg_sq, param.to(torch.bfloat16)


def adamw_step_inputs():
    shape = (4096, 2752)
    grad = torch.randn(shape, dtype=torch.bfloat16)
    return torch.randn(shape), grad, torch.randn(shape) * 0.1, torch.rand(shape) * 0.1, torch.tensor(100.0)


def adafactor_step(param, grad, row, col):
    """Adafactor with factored second moments, update clipping by RMS and relative step size."""
    beta2 = 0.999
    sq = grad.square() + 1e-30
    row = beta2 * row + (1 - beta2) * sq.mean(dim=-1)
    col = beta2 * col + (1 - beta2) * sq.mean(dim=-2)
    r = (row / row.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1)
    update = grad * r * col.rsqrt().unsqueeze(-2)
    rms = update.norm(2) / update.numel() ** 0.5
    update = update / torch.clamp(rms / 1.0, min=1.0)
    lr = 1e-2 * torch.clamp(param.norm(2) / param.numel() ** 0.5, min=1e-3)
    return param - lr * update, row, col


def adafactor_step_inputs():
    return torch.randn(3072, 4096) * 0.02, torch.randn(3072, 4096), torch.rand(3072) + 0.5, torch.rand(4096) + 0.5


def muon_step(param, grad, momentum):
    """Muon: Nesterov momentum orthogonalised by five quintic Newton-Schulz iterations."""
    momentum = momentum.lerp(grad, 0.05)
    g = grad.lerp(momentum, 0.95)
    x = g.bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        b = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    scale = 0.02 * max(1.0, param.shape[0] / param.shape[1]) ** 0.5
    return param * (1 - 0.02 * 0.01) - scale * x.to(param.dtype), momentum


def muon_step_inputs():
    return torch.randn(1024, 3000) * 0.02, torch.randn(1024, 3000), torch.randn(1024, 3000)


def clip_grads(g0, g1, g2, g3, g4, g5):
    """Clip a list of gradients by their joint norm, skipping to zero when it is not finite."""
    grads = [g0, g1, g2, g3, g4, g5]
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads])
    total = torch.linalg.vector_norm(norms)
    coef = torch.clamp(1.0 / (total + 1e-6), max=1.0)
    coef = torch.where(torch.isfinite(total), coef, 0.0)
    return *[g * coef.to(g.dtype) for g in grads], total


def clip_grads_inputs():
    shapes = ((4096, 1024), (1024, 4096), (1024,), (3072, 1024), (333, 1000), (77, 768))
    return tuple(torch.randn(s, dtype=torch.bfloat16) for s in shapes)


# ---------------------------------------------------------------------------------------------------------------------
# Quantisation
# ---------------------------------------------------------------------------------------------------------------------


def smoothquant_linear(x, smooth, weight_q, weight_scale, bias):
    """SmoothQuant linear: smoothed activations quantised per token to int8, simulated integer product, dequantised."""
    xs = x.float() / smooth
    scale = xs.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5) / 127.0
    xq = torch.round(xs / scale).clamp(-128, 127).to(torch.int8)
    acc = torch.matmul(xq.to(torch.bfloat16), weight_q.to(torch.bfloat16).t())
    return (acc.float() * scale * weight_scale + bias).to(x.dtype), xq


def smoothquant_linear_inputs():
    return (
        torch.randn(2048, 2048, dtype=torch.bfloat16),
        torch.rand(2048) + 0.5,
        torch.randint(-127, 128, (3072, 2048), dtype=torch.int8),
        torch.rand(3072) * 1e-3 + 1e-4,
        torch.randn(3072),
    )


def fp8_block_cast(x, gate):
    """SwiGLU activation cast to float8 e4m3 in blocks of 128, with scales and the dequantised copy."""
    y = F.silu(gate.float()) * x.float()
    blocks = y.unflatten(-1, (-1, 128))
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
    scale = amax / 448.0
    q = (blocks / scale).to(torch.float8_e4m3fn)
    return q.flatten(-2), scale.squeeze(-1), (q.float() * scale).flatten(-2).to(x.dtype)


def fp8_block_cast_inputs():
    return torch.randn(4096, 2304, dtype=torch.bfloat16), torch.randn(4096, 2304, dtype=torch.bfloat16)


def int4_linear(x, qweight, qzeros, scales):
    """GPTQ-style linear: int4 weights unpacked by shifts, zero points and scales per group of 128."""
    shifts = torch.arange(0, 32, 4, device=x.device, dtype=torch.int32)
    w = (qweight.unsqueeze(1) >> shifts.view(1, 8, 1)) & 0xF
    w = w.reshape(-1, qweight.shape[1])
    z = ((qzeros.unsqueeze(2) >> shifts) & 0xF).flatten(1)
    group = 128
    w = w.view(-1, group, w.shape[1])
    w = (w - z.unsqueeze(1)).to(x.dtype) * scales.unsqueeze(1)
    return torch.matmul(x, w.flatten(0, 1))


def int4_linear_inputs():
    k, n, group = 4096, 4096, 128
    lo, hi = -(2**31), 2**31
    return (
        torch.randn(77, k, dtype=torch.float16),
        torch.randint(lo, hi, (k // 8, n), dtype=torch.int32),
        torch.randint(lo, hi, (k // group, n // 8), dtype=torch.int32),
        torch.rand(k // group, n, dtype=torch.float16) * 0.01,
    )


def nf4_lora_linear(x, packed, absmax_q, absmax_scale, table, lora_a, lora_b):
    """QLoRA linear: NF4 lookup with double-quantised block scales, plus a low-rank adapter."""
    high, low = packed >> 4, packed & 0xF
    codes = torch.stack((high, low), dim=-1).flatten()
    absmax = (absmax_q.float().view(-1, 256) * absmax_scale[:, None]).view(-1, 1)
    w = (table[codes.long()].view(-1, 64) * absmax).to(x.dtype).view(-1, x.shape[-1])
    return F.linear(x, w) + F.linear(F.linear(x, lora_a), lora_b) * 2.0


def nf4_lora_linear_inputs():
    d, o, r = 2048, 4096, 16
    table = torch.tensor(
        [
            -1.0,
            -0.6962,
            -0.5251,
            -0.3949,
            -0.2844,
            -0.1848,
            -0.0911,
            0.0,
            0.0796,
            0.1609,
            0.2461,
            0.3379,
            0.4407,
            0.5626,
            0.723,
            1.0,
        ]
    )
    return (
        torch.randn(333, d, dtype=torch.bfloat16),
        torch.randint(0, 256, (o * d // 2,), dtype=torch.uint8),
        torch.randint(1, 128, (o * d // 64,), dtype=torch.int8),
        torch.rand(o * d // 64 // 256) * 1e-3,
        table,
        torch.randn(r, d, dtype=torch.bfloat16) * 0.02,
        torch.randn(o, r, dtype=torch.bfloat16) * 0.02,
    )
