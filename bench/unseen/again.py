"""Programs that were once slower than Inductor's or wrong, to be measured again."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

TRAIN = (
    "causal_conv1d_silu",
    "conv2d_grouped_group_norm",
    "ShuffleUnits",
    "SwinBlock",
    "mamba2_ssd",
    "triplet_loss_swapped",
)


def _bf(*shape):
    return torch.randn(*shape).to(torch.bfloat16)


def causal_conv1d_silu(x, w, b):
    """A short causal depthwise convolution of a state-space model."""
    n = w.shape[-1]
    y = F.conv1d(F.pad(x, (n - 1, 0)), w, b, groups=x.shape[1])
    return F.silu(y)


def causal_conv1d_silu_inputs():
    return _bf(8, 2048, 4096), _bf(2048, 1, 4) * 0.3, _bf(2048) * 0.1


def conv2d_grouped_group_norm(x, w, g, b):
    """A convolution of groups, then group norm and ReLU."""
    return F.relu(F.group_norm(F.conv2d(x, w, padding=1, groups=32), 32, g, b))


def conv2d_grouped_group_norm_inputs():
    return _bf(32, 256, 56, 56), _bf(256, 8, 3, 3) * 0.1, _bf(256), _bf(256)


class ShuffleUnit(nn.Module):
    """Half of the channels through two products and a depthwise window, then shuffled."""

    def __init__(self, width):
        super().__init__()
        c = width // 2
        self.branch = nn.Sequential(
            nn.Conv2d(c, c, 1, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU(),
            nn.Conv2d(c, c, 3, padding=1, groups=c, bias=False),
            nn.BatchNorm2d(c),
            nn.Conv2d(c, c, 1, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU(),
        )

    def forward(self, x):
        a, b = x.chunk(2, 1)
        y = torch.cat((a, self.branch(b)), 1)
        n, c, h, w = y.shape
        return y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class ShuffleUnits(nn.Module):
    """Three units of ShuffleNet v2."""

    def __init__(self):
        super().__init__()
        self.units = nn.Sequential(*(ShuffleUnit(116) for _ in range(3)))
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.units(x)


def ShuffleUnits_inputs():
    return (_bf(64, 116, 28, 28),)


class SwinBlock(nn.Module):
    """Window attention with a shift and a relative bias, and its perceptron."""

    def __init__(self, width=192, heads=6, window=7, shift=3):
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.bias = nn.Parameter(torch.randn(heads, window * window, window * window) * 0.1)
        self.to(torch.bfloat16)

    def forward(self, x):
        b, h, w, c = x.shape
        n = self.window
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        y = y.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)
        q, k, v = self.qkv(y).reshape(-1, n * n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        p = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.bias).softmax(-1)
        y = self.proj((p @ v).transpose(1, 2).reshape(-1, n * n, c))
        y = y.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


def SwinBlock_inputs():
    return (_bf(32, 28, 28, 192),)


def _segsum(x):
    t = x.shape[-1]
    s = x.cumsum(-1)
    d = s[..., :, None] - s[..., None, :]
    keep = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
    return d.masked_fill(~keep, -torch.inf)


def mamba2_ssd(x, a, b, c):
    """Mamba2's chunks: the block form of a state-space layer."""
    n, length, h, p = x.shape
    q = 64
    x, b, c = (t.reshape(n, length // q, q, *t.shape[2:]) for t in (x, b, c))
    a = a.reshape(n, length // q, q, h).permute(0, 3, 1, 2)
    s = a.cumsum(-1)
    decay = torch.exp(_segsum(a))
    y = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, decay, x)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, torch.exp(s[..., -1:] - s), x)
    states = torch.cat((torch.zeros_like(states[:, :1]), states), 1)
    chunk = torch.exp(_segsum(F.pad(s[..., -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", chunk, states)[:, :-1]
    off = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, torch.exp(s))
    return (y + off).reshape(n, length, h, p)


def mamba2_ssd_inputs():
    return (
        torch.randn(2, 1024, 8, 64),
        -torch.rand(2, 1024, 8),
        torch.randn(2, 1024, 8, 64),
        torch.randn(2, 1024, 8, 64),
    )


def triplet_loss_swapped(a, p, n):
    """Triplets by distance with the swap of anchor and positive."""
    d_ap = (a - p + 1e-6).norm(dim=-1)
    d_an = (a - n + 1e-6).norm(dim=-1)
    d_pn = (p - n + 1e-6).norm(dim=-1)
    return F.relu(d_ap - torch.minimum(d_an, d_pn) + 1.0).mean()


def triplet_loss_swapped_inputs():
    return torch.randn(32768, 130), torch.randn(32768, 130), torch.randn(32768, 130)


def logistic_mixture(x, logits, means, scales):
    """PixelCNN++'s discretised mixture of ten logistics."""
    x = x.unsqueeze(-1)
    inv = torch.exp(-scales.clamp_min(-7.0))
    centred = x - means
    up, down = inv * (centred + 1 / 255), inv * (centred - 1 / 255)
    cdf = torch.sigmoid(up) - torch.sigmoid(down)
    mid = inv * centred
    log_mid = mid - scales - 2 * F.softplus(mid)
    inner = torch.where(cdf > 1e-5, cdf.clamp_min(1e-12).log(), log_mid - math.log(127.5))
    logp = torch.where(x < -0.999, up - F.softplus(up), torch.where(x > 0.999, -F.softplus(down), inner))
    return -torch.logsumexp(logp + F.log_softmax(logits, -1), -1).mean((1, 2))


def logistic_mixture_inputs():
    n = (16, 64, 64, 10)
    return torch.rand(16, 64, 64) * 2 - 1, torch.randn(n), torch.randn(n), torch.randn(n)


def batch_renorm(x, mean, std, w, b):
    """Batch renormalisation's corrected statistics, over channels of images."""
    m = x.mean((0, 2, 3), keepdim=True)
    s = x.std((0, 2, 3), keepdim=True, unbiased=False) + 1e-5
    r = (s / std).clamp(1 / 3, 3)
    d = ((m - mean) / std).clamp(-5, 5)
    y = ((x - m) / s * r + d) * w + b
    return y, (mean + 0.01 * (m - mean)), (std + 0.01 * (s - std))


def batch_renorm_inputs():
    c = (1, 128, 1, 1)
    return torch.randn(32, 128, 56, 56), torch.randn(c), torch.rand(c) + 0.5, torch.rand(c), torch.randn(c)


def gptq_linear(x, packed, scales, zeros):
    """Four-bit weights unpacked by shifts, scaled by groups of 128 rows, times activations."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    w = (packed[:, None, :] >> shifts[None, :, None]) & 15
    w = w.reshape(-1, packed.shape[1])
    g = w.shape[0] // scales.shape[0]
    z, s = zeros.repeat_interleave(g, 0), scales.repeat_interleave(g, 0)
    return x @ ((w - z).to(x.dtype) * s)


def gptq_linear_inputs():
    k, n = 4096, 4096
    packed = torch.randint(-(2**31), 2**31 - 1, (k // 8, n), dtype=torch.int32)
    zeros = torch.randint(0, 16, (k // 128, n), dtype=torch.int32)
    return _bf(256, k), packed, _bf(k // 128, n) * 0.01, zeros


def smooth_quant_linear(x, smooth, w, scale):
    """Smoothed activations in int8 by rows, times int8 weights, both widened."""
    h = x / smooth
    s = h.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    q = (h / s).round().clamp(-128, 127)
    return (q.to(x.dtype) @ w.to(x.dtype)) * s * scale


def smooth_quant_linear_inputs():
    w = torch.randint(-128, 128, (4096, 4096), dtype=torch.int8)
    return _bf(2048, 4096), _bf(4096).abs() + 0.5, w, _bf(4096).abs() * 0.01


def mfcc(frames, window, cos, sin, mel, dct):
    """Cepstra of mel bands from frames, the Fourier transform by products."""
    y = frames * window
    power = (y @ cos).square() + (y @ sin).square()
    return (power @ mel).clamp_min(1e-10).log() @ dct


def mfcc_inputs():
    k = torch.outer(torch.arange(400.0), torch.arange(201.0)) * (2 * math.pi / 400)
    return torch.randn(6000, 400), torch.hann_window(400), k.cos(), k.sin(), torch.rand(201, 80), torch.randn(80, 13)


def nf4_dequantise(codes, scales, table):
    """Four-bit normal floats: two a byte, looked up, scaled by blocks of 64."""
    hi, lo = (codes >> 4).long(), (codes & 15).long()
    v = torch.stack((table[hi], table[lo]), -1).reshape(-1, 64)
    return (v * scales[:, None]).to(torch.bfloat16).reshape(4096, -1)


def nf4_dequantise_inputs():
    n = 4096 * 4096
    return torch.randint(0, 256, (n // 2,), dtype=torch.uint8), torch.rand(n // 64), torch.randn(16).sort().values


def timestep_embedding(t, w1, b1, w2, b2):
    """Sines of a step, then two linear maps."""
    half = 160
    f = torch.exp(-math.log(10000) * torch.arange(half, device=t.device, dtype=torch.float32) / half)
    a = t.float()[:, None] * f
    e = torch.cat((a.cos(), a.sin()), -1).to(w1.dtype)
    return F.linear(F.silu(F.linear(e, w1, b1)), w2, b2)


def timestep_embedding_inputs():
    return torch.randint(0, 1000, (64,)), _bf(1280, 320) * 0.05, _bf(1280), _bf(1280, 1280) * 0.03, _bf(1280)


def adafactor_step(p, g, row, col):
    """Adafactor's update of a matrix: factored second moments and a clipped root mean square."""
    sq = g * g + 1e-30
    row = 0.999 * row + 0.001 * sq.mean(-1)
    col = 0.999 * col + 0.001 * sq.mean(-2)
    r = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
    u = g * r * col.rsqrt().unsqueeze(-2)
    u = u / (u.square().mean().sqrt()).clamp_min(1.0)
    return p - 1e-3 * u, row, col


def adafactor_step_inputs():
    return torch.randn(4096, 4096), torch.randn(4096, 4096), torch.rand(4096), torch.rand(4096)


def kmeans_step(x, centres):
    """Lloyd's step: nearest centres, then the mean of each."""
    d = x.square().sum(-1, keepdim=True) - 2 * x @ centres.T + centres.square().sum(-1)
    one = F.one_hot(d.argmin(-1), centres.shape[0]).to(x.dtype)
    return (one.T @ x) / one.sum(0).clamp_min(1)[:, None]


def kmeans_step_inputs():
    return torch.randn(65536, 64), torch.randn(256, 64)


def nearest_centres(x, centres):
    """The nearest of many centres, and its distance."""
    d = x.square().sum(-1, keepdim=True) - 2 * x @ centres.T + centres.square().sum(-1)
    return d.min(-1)


def nearest_centres_inputs():
    return torch.randn(16384, 64), torch.randn(512, 64)


def selective_scan(u, delta, a, b, c, d):
    """Mamba's recurrence over 16 steps."""
    h = torch.zeros(u.shape[0], u.shape[2], a.shape[1], device=u.device)
    ys = []
    for t in range(16):
        dt = F.softplus(delta[:, t])
        h = torch.exp(dt[..., None] * a) * h + (dt * u[:, t])[..., None] * b[:, t, None]
        ys.append((h * c[:, t, None]).sum(-1))
    return torch.stack(ys, 1) + u * d


def selective_scan_inputs():
    n, t, c, s = 4, 16, 1536, 16
    return (
        torch.randn(n, t, c),
        torch.randn(n, t, c),
        -torch.rand(c, s),
        torch.randn(n, t, s),
        torch.randn(n, t, s),
        torch.randn(c),
    )


class PnaLayer(nn.Module):
    """Principal neighbourhood aggregation over a fixed number of neighbours."""

    def __init__(self, width=64):
        super().__init__()
        self.out = nn.Linear(4 * width, width).to(torch.bfloat16)

    def forward(self, x, neighbours):
        h = x[neighbours]
        mean, std = h.mean(1), (h.float().var(1, unbiased=False) + 1e-5).sqrt().to(x.dtype)
        return F.relu(self.out(torch.cat((mean, h.amax(1), h.amin(1), std), -1))) + x


def PnaLayer_inputs():
    return _bf(50000, 64), torch.randint(0, 50000, (50000, 16))


class TextCrossAttention(nn.Module):
    """Image tokens that attend to 77 tokens of text."""

    def __init__(self, width=640, heads=10, text=768):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(text, width, bias=False)
        self.v, self.o = nn.Linear(text, width, bias=False), nn.Linear(width, width)
        self.to(torch.bfloat16)

    def forward(self, x, text):
        def heads(t):
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        y = F.scaled_dot_product_attention(heads(self.q(self.norm(x))), heads(self.k(text)), heads(self.v(text)))
        return x + self.o(y.transpose(1, 2).flatten(2))


def TextCrossAttention_inputs():
    return _bf(8, 1024, 640), _bf(8, 77, 768)


def cutmix(x, y, box, lam):
    """A box of each image replaced, and the labels mixed."""
    h, w = torch.arange(x.shape[2], device=x.device), torch.arange(x.shape[3], device=x.device)
    inside = (h >= box[:, 0, None]) & (h < box[:, 1, None])
    inside = inside[:, :, None] & ((w >= box[:, 2, None]) & (w < box[:, 3, None]))[:, None]
    area = inside.float().mean((1, 2))
    mixed = torch.where(inside[:, None], x.flip(0), x)
    return mixed, y * (1 - area)[:, None] + y.flip(0) * (area * lam)[:, None]


def cutmix_inputs():
    lo = torch.randint(0, 100, (128, 2))
    box = torch.stack((lo[:, 0], lo[:, 0] + 80, lo[:, 1], lo[:, 1] + 80), 1)
    return _bf(128, 3, 224, 224), torch.randn(128, 1000), box, torch.rand(128)


def cost_volume(a, b):
    """Correlation of two feature maps over 81 shifts, as in PWC-Net."""
    p = F.pad(b, (4, 4, 4, 4))
    h, w = a.shape[-2:]
    return F.leaky_relu(
        torch.stack([(a * p[:, :, i : i + h, j : j + w]).mean(1) for i in range(9) for j in range(9)], 1), 0.1
    )


def cost_volume_inputs():
    return _bf(8, 64, 64, 112), _bf(8, 64, 64, 112)


class TopTwoExperts(nn.Module):
    """Two of eight experts with a capacity, by one-hot places, all by einsum."""

    def __init__(self, width=512, hidden=1024, experts=8, capacity=320):
        super().__init__()
        self.capacity = capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, width, hidden) * 0.03)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, width) * 0.03)
        self.to(torch.bfloat16)

    def forward(self, x):
        p = self.gate(x).float().softmax(-1)
        w, e = p.topk(2, -1)
        w = w / w.sum(-1, keepdim=True)
        hot = F.one_hot(e, p.shape[-1]).float()
        place = (hot.transpose(0, 1).flatten(0, 1).cumsum(0) - 1).view(2, *p.shape).transpose(0, 1)
        place = (place * hot).sum(-1)
        keep = place < self.capacity
        slot = F.one_hot(place.clamp_max(self.capacity - 1).long(), self.capacity).float() * keep[..., None]
        combine = torch.einsum("tk,tke,tkc->tec", w, hot, slot)
        dispatch = (combine > 0).to(x.dtype)
        h = F.gelu(torch.einsum("tec,td->ecd", dispatch, x) @ self.w1) @ self.w2
        return torch.einsum("tec,ecd->td", combine.to(x.dtype), h)


def TopTwoExperts_inputs():
    return (_bf(1024, 512),)


def s4d_kernel(log_dt, a_re, a_im, c_re, c_im):
    """The kernel of a diagonal state space, real parts of exponentials summed over states."""
    dt = log_dt.exp()[:, None]
    t = torch.arange(2048, device=dt.device, dtype=torch.float32)
    re, im = -a_re.exp() * dt, a_im * dt
    mag = torch.exp(re[..., None] * t)
    ang = im[..., None] * t
    return 2 * (mag * (c_re[..., None] * ang.cos() - c_im[..., None] * ang.sin())).sum(1)


def s4d_kernel_inputs():
    h, n = 512, 32
    return (
        torch.randn(h) * 0.5 - 4,
        torch.randn(h, n) * 0.1,
        torch.randn(h, n) * 3,
        torch.randn(h, n),
        torch.randn(h, n),
    )


def cached_multi_query(q, k, v, k_new, v_new):
    """One token appended to a cache that all heads share, and attention over it."""
    k, v = torch.cat((k, k_new), 1), torch.cat((v, v_new), 1)
    s = torch.einsum("bhd,bnd->bhn", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhn,bnd->bhd", s.softmax(-1), v), k, v


def cached_multi_query_inputs():
    return _bf(16, 32, 128), _bf(16, 4095, 128), _bf(16, 4095, 128), _bf(16, 1, 128), _bf(16, 1, 128)


def transformer_xl_scores(q, k, r, u, v):
    """Relative attention's scores with their shift, then softmax."""
    ac = torch.einsum("bhid,bhjd->bhij", q + u[:, None], k)
    bd = torch.einsum("bhid,hjd->bhij", q + v[:, None], r)
    b, h, n, m = bd.shape
    bd = F.pad(bd, (1, 0)).view(b, h, m + 1, n)[:, :, 1:].reshape(b, h, n, m)
    return ((ac + bd) / math.sqrt(q.shape[-1])).softmax(-1)


def transformer_xl_scores_inputs():
    return _bf(4, 8, 512, 64), _bf(4, 8, 512, 64), _bf(8, 512, 64), _bf(8, 64), _bf(8, 64)


def criss_cross(q, k, v):
    """Attention along the row and the column of each pixel."""
    row = torch.einsum("bchw,bchv->bhwv", q, k)
    col = torch.einsum("bchw,bcgw->bhwg", q, k)
    own = torch.eye(q.shape[2], device=q.device, dtype=torch.bool)[:, None, :]
    p = torch.cat((row, col.masked_fill(own, -torch.inf)), -1).softmax(-1)
    a, c = p.split((q.shape[3], q.shape[2]), -1)
    return torch.einsum("bhwv,bchv->bchw", a, v) + torch.einsum("bhwg,bcgw->bchw", c, v)


def criss_cross_inputs():
    return _bf(4, 64, 96, 96), _bf(4, 64, 96, 96), _bf(4, 512, 96, 96)


def two_hot_symlog(x):
    """DreamerV3's targets: two neighbouring bins of a symmetric logarithm."""
    y = x.sign() * (x.abs() + 1).log()
    bins = torch.linspace(-20, 20, 255, device=x.device)
    below = (bins <= y[..., None]).sum(-1) - 1
    above = (below + 1).clamp_max(254)
    below = below.clamp(0, 254)
    lo, hi = (y - bins[below]).abs(), (bins[above] - y).abs()
    total = (lo + hi).clamp_min(1e-8)
    return F.one_hot(below, 255) * (hi / total)[..., None] + F.one_hot(above, 255) * (lo / total)[..., None]


def two_hot_symlog_inputs():
    return (torch.randn(64, 1024) * 30,)


def power_norm(x, w, b):
    """Divided by the quadratic mean over batch and length, as PowerNorm's forward."""
    s = x.float().square().mean((0, 1))
    return (x * (s + 1e-5).rsqrt().to(x.dtype)) * w + b


def power_norm_inputs():
    return _bf(32, 512, 1024), _bf(1024), _bf(1024)


def hgrn_gates(x, wi, wf, wg, lower):
    """Three linear maps and a recurrence of eight steps with a floor for its gates."""
    i, f, g = F.silu(x @ wi), torch.sigmoid(x @ wf), torch.sigmoid(x @ wg)
    f = lower + (1 - lower) * f
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = f[:, t] * h + (1 - f[:, t]) * i[:, t]
        ys.append(h)
    return torch.stack(ys, 1) * g


def hgrn_gates_inputs():
    return _bf(64, 8, 1024), _bf(1024, 1024) * 0.03, _bf(1024, 1024) * 0.03, _bf(1024, 1024) * 0.03, _bf(1024)


def filter_response_norm(x, w, b, tau):
    """Filter response normalisation and its thresholded activation."""
    nu = x.square().mean((2, 3), keepdim=True)
    return torch.maximum(x * torch.rsqrt(nu + 1e-6) * w + b, tau)


def filter_response_norm_inputs():
    c = (1, 256, 1, 1)
    return _bf(32, 256, 56, 56), _bf(*c), _bf(*c), _bf(*c)
