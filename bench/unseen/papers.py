"""Sixty plain PyTorch programs of published models: vision, sequences, losses, optimisers, graphs, time series."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

TRAIN = (
    "PoolFormerBlock",
    "MobileViTBlock",
    "SplitAttention",
    "Gemma3Block",
    "CohereParallelBlock",
    "mlstm_parallel",
    "RWKVChannelMix",
    "GatedAttentionUnit",
    "TalkingHeadsAttention",
    "DoraLinear",
    "moco_infonce_loss",
    "arcface_loss",
    "circle_loss",
    "supcon_loss",
    "TransducerJoint",
    "Dlrm",
    "DinAttention",
    "NBeats",
    "GatV2Dense",
    "SchNetInteraction",
)

# ---------------------------------------------------------------------------------------------------------------------
# Vision, detection, segmentation and generation
# ---------------------------------------------------------------------------------------------------------------------


class PoolFormerBlock(nn.Module):
    """MetaFormer block whose token mixer is average pooling, with layer scales and a convolutional perceptron."""

    def __init__(self, dim=128, ratio=4):
        super().__init__()
        self.norm1 = nn.GroupNorm(1, dim)
        self.pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        self.norm2 = nn.GroupNorm(1, dim)
        self.fc1 = nn.Conv2d(dim, ratio * dim, 1)
        self.fc2 = nn.Conv2d(ratio * dim, dim, 1)
        self.scale1 = nn.Parameter(0.1 * torch.ones(dim))
        self.scale2 = nn.Parameter(0.1 * torch.ones(dim))
        self.to(torch.bfloat16)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.scale1[:, None, None] * (self.pool(y) - y)
        y = self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return x + self.scale2[:, None, None] * y


def PoolFormerBlock_inputs():
    return (torch.randn(64, 128, 28, 28, dtype=torch.bfloat16),)


class MobileViTBlock(nn.Module):
    """MobileViT: local convolution, attention among pixels of equal place in 2x2 patches, fusion with the input."""

    def __init__(self, cin=96, dim=144, heads=4, depth=2):
        super().__init__()
        self.heads = heads
        self.local = nn.Sequential(
            nn.Conv2d(cin, cin, 3, padding=1, bias=False), nn.BatchNorm2d(cin), nn.SiLU(), nn.Conv2d(cin, dim, 1)
        )
        self.norm1 = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(depth))
        self.proj = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.norm2 = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.back = nn.Sequential(nn.Conv2d(dim, cin, 1, bias=False), nn.BatchNorm2d(cin), nn.SiLU())
        self.fuse = nn.Sequential(nn.Conv2d(2 * cin, cin, 3, padding=1, bias=False), nn.BatchNorm2d(cin), nn.SiLU())
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        b, _, h, w = x.shape
        y = self.local(x)
        d = y.shape[1]
        y = y.view(b, d, h // 2, 2, w // 2, 2).permute(0, 3, 5, 2, 4, 1).reshape(b * 4, h * w // 4, d)
        for norm1, qkv, proj, norm2, mlp in zip(self.norm1, self.qkv, self.proj, self.norm2, self.mlp, strict=True):
            q, k, v = qkv(norm1(y)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            a = F.scaled_dot_product_attention(q, k, v)
            y = y + proj(a.transpose(1, 2).flatten(2))
            y = y + mlp(norm2(y))
        y = self.norm(y)
        y = y.view(b, 2, 2, h // 2, w // 2, d).permute(0, 5, 3, 1, 4, 2).reshape(b, d, h, w)
        return self.fuse(torch.cat((x, self.back(y)), dim=1))


def MobileViTBlock_inputs():
    return (torch.randn(16, 96, 32, 32, dtype=torch.bfloat16),)


class RegNetYBlock(nn.Module):
    """RegNetY bottleneck: grouped 3x3 convolution, squeeze and excitation, residual."""

    def __init__(self, dim=448, group_width=56):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(dim, dim, 1, bias=False), nn.BatchNorm2d(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim // group_width, bias=False)
        self.bn2 = nn.BatchNorm2d(dim)
        self.reduce, self.expand = nn.Conv2d(dim, dim // 4, 1), nn.Conv2d(dim // 4, dim, 1)
        self.conv3, self.bn3 = nn.Conv2d(dim, dim, 1, bias=False), nn.BatchNorm2d(dim)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        gate = F.adaptive_avg_pool2d(y, 1)
        y = y * torch.sigmoid(self.expand(F.relu(self.reduce(gate))))
        return F.relu(x + self.bn3(self.conv3(y)))


def RegNetYBlock_inputs():
    return (torch.randn(16, 448, 28, 28, dtype=torch.bfloat16),)


class HRNetFusion(nn.Module):
    """HRNet exchange of three resolutions: strided convolutions downwards, 1x1 and bilinear upwards, sums and ReLU."""

    def __init__(self, channels=(32, 64, 128)):
        super().__init__()
        self.paths = nn.ModuleList()
        for i, cout in enumerate(channels):
            row = nn.ModuleList()
            for j, cin in enumerate(channels):
                layers = []
                if j > i:
                    layers = [nn.Conv2d(cin, cout, 1, bias=False), nn.BatchNorm2d(cout)]
                for step in range(i - j):
                    last = step == i - j - 1
                    out = cout if last else cin
                    layers += [nn.Conv2d(cin, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out)]
                    if not last:
                        layers.append(nn.ReLU())
                row.append(nn.Sequential(*layers))
            self.paths.append(row)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x0, x1, x2):
        xs = (x0, x1, x2)
        outs = []
        for i, row in enumerate(self.paths):
            total = xs[i]
            for j, path in enumerate(row):
                if j == i:
                    continue
                y = path(xs[j])
                if j > i:
                    y = F.interpolate(y, size=xs[i].shape[-2:], mode="bilinear", align_corners=True)
                total = total + y
            outs.append(F.relu(total))
        return tuple(outs)


def HRNetFusion_inputs():
    return (
        torch.randn(16, 32, 96, 72, dtype=torch.bfloat16),
        torch.randn(16, 64, 48, 36, dtype=torch.bfloat16),
        torch.randn(16, 128, 24, 18, dtype=torch.bfloat16),
    )


class FCOSHead(nn.Module):
    """FCOS: two towers shared by three pyramid levels, with classes, scaled distances to sides and centredness."""

    def __init__(self, dim=256, classes=80, depth=2):
        super().__init__()

        def tower():
            layers = []
            for _ in range(depth):
                layers += [nn.Conv2d(dim, dim, 3, padding=1), nn.GroupNorm(32, dim), nn.ReLU()]
            return nn.Sequential(*layers)

        self.cls_tower, self.box_tower = tower(), tower()
        self.cls = nn.Conv2d(dim, classes, 3, padding=1)
        self.box = nn.Conv2d(dim, 4, 3, padding=1)
        self.centre = nn.Conv2d(dim, 1, 3, padding=1)
        self.scales = nn.Parameter(torch.tensor([1.0, 1.1, 0.9]))
        self.to(torch.bfloat16)

    def forward(self, p3, p4, p5):
        scores, boxes = [], []
        for i, (p, stride) in enumerate(zip((p3, p4, p5), (8, 16, 32), strict=True)):
            c, r = self.cls_tower(p), self.box_tower(p)
            prob = torch.sqrt(torch.sigmoid(self.cls(c).float()) * torch.sigmoid(self.centre(r).float()))
            side = F.relu(self.box(r).float() * self.scales[i]) * stride
            h, w = p.shape[-2:]
            cx = (torch.arange(w, device=p.device) + 0.5) * stride
            cy = (torch.arange(h, device=p.device)[:, None] + 0.5) * stride
            left, top, right, bottom = side.unbind(dim=1)
            box = torch.stack((cx - left, cy - top, cx + right, cy + bottom), dim=-1)
            scores.append(prob.flatten(2).transpose(1, 2))
            boxes.append(box.flatten(1, 2))
        return torch.cat(scores, dim=1), torch.cat(boxes, dim=1)


def FCOSHead_inputs():
    return (
        torch.randn(2, 256, 100, 136, dtype=torch.bfloat16),
        torch.randn(2, 256, 50, 68, dtype=torch.bfloat16),
        torch.randn(2, 256, 25, 34, dtype=torch.bfloat16),
    )


class UNetAttentionGate(nn.Module):
    """Attention U-Net: a skip connection weighted by additive attention with the coarser gating signal."""

    def __init__(self, skip=128, gating=256, mid=64):
        super().__init__()
        self.theta = nn.Conv2d(skip, mid, 2, stride=2, bias=False)
        self.phi = nn.Conv2d(gating, mid, 1)
        self.psi = nn.Conv2d(mid, 1, 1)
        self.out = nn.Conv2d(skip, skip, 1)
        self.bn = nn.BatchNorm2d(skip)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x, g):
        a = F.relu(self.theta(x) + self.phi(g))
        a = torch.sigmoid(self.psi(a))
        a = F.interpolate(a, scale_factor=2, mode="bilinear", align_corners=False)
        return self.bn(self.out(x * a)), a


def UNetAttentionGate_inputs():
    return torch.randn(8, 128, 96, 96, dtype=torch.bfloat16), torch.randn(8, 256, 48, 48, dtype=torch.bfloat16)


class DiscriminatorEnd(nn.Module):
    """StyleGAN2 discriminator's end: blurred residual downsampling, minibatch deviation, convolution and logits."""

    def __init__(self, dim=256, group=4):
        super().__init__()
        self.group = group
        self.conv0 = nn.Parameter(torch.randn(dim, dim, 3, 3))
        self.conv1 = nn.Parameter(torch.randn(dim, dim, 3, 3))
        self.skip = nn.Parameter(torch.randn(dim, dim, 1, 1))
        self.conv2 = nn.Parameter(torch.randn(dim, dim + 1, 3, 3))
        self.fc = nn.Parameter(torch.randn(dim, dim * 16))
        self.out = nn.Parameter(torch.randn(1, dim))
        self.bias = nn.Parameter(torch.zeros(4, dim))
        k = torch.tensor([1.0, 3.0, 3.0, 1.0])
        k = torch.outer(k, k)
        self.register_buffer("blur", (k / k.sum()).expand(dim, 1, 4, 4).clone())

    @staticmethod
    def equalised(w):
        return w / math.sqrt(w[0].numel())

    def activate(self, x, i):
        bias = self.bias[i] if x.ndim == 2 else self.bias[i][:, None, None]
        return F.leaky_relu(x + bias, 0.2) * math.sqrt(2)

    def forward(self, x):
        c = x.shape[1]
        y = self.activate(F.conv2d(x, self.equalised(self.conv0), padding=1), 0)
        y = F.conv2d(F.pad(y, (2, 2, 2, 2)), self.blur, groups=c)
        y = self.activate(F.conv2d(y, self.equalised(self.conv1), stride=2), 1)
        s = F.conv2d(F.pad(x, (1, 1, 1, 1)), self.blur, stride=2, groups=c)
        y = (y + F.conv2d(s, self.equalised(self.skip))) / math.sqrt(2)
        n, _, h, w = y.shape
        g = y.reshape(self.group, n // self.group, c, h, w)
        g = g - g.mean(dim=0)
        std = (g.square().mean(dim=0) + 1e-8).sqrt().mean(dim=(1, 2, 3))
        std = std.view(1, -1, 1, 1, 1).expand(self.group, -1, 1, h, w).reshape(n, 1, h, w)
        y = self.activate(F.conv2d(torch.cat((y, std), dim=1), self.equalised(self.conv2), padding=1), 2)
        y = self.activate(F.linear(y.flatten(1), self.equalised(self.fc)), 3)
        return F.linear(y, self.equalised(self.out))


def DiscriminatorEnd_inputs():
    return (torch.randn(64, 256, 8, 8),)


class VectorQuantiser(nn.Module):
    """VQ-VAE: nearest code of each place, straight-through output, commitment loss and perplexity."""

    def __init__(self, codes=1024, dim=256):
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(codes, dim))

    def forward(self, z):
        b, c, h, w = z.shape
        flat = z.permute(0, 2, 3, 1).reshape(-1, c)
        dist = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codebook.t() + self.codebook.pow(2).sum(1)
        index = dist.argmin(dim=1)
        q = F.embedding(index, self.codebook)
        loss = F.mse_loss(q, flat.detach()) + 0.25 * F.mse_loss(flat, q.detach())
        used = F.one_hot(index, self.codebook.shape[0]).float().mean(dim=0)
        perplexity = torch.exp(-(used * torch.log(used + 1e-10)).sum())
        q = flat + (q - flat).detach()
        return q.view(b, h, w, c).permute(0, 3, 1, 2), loss, perplexity


def VectorQuantiser_inputs():
    return (torch.randn(8, 256, 32, 32),)


def flow_guidance_step(x, v_cond, v_uncond, t, t_next):
    """Rectified-flow Euler step with classifier-free guidance in an interval and its deviation rescaled."""
    scale, phi = 4.5, 0.7
    t, t_next = t.float().view(-1, 1, 1, 1), t_next.float().view(-1, 1, 1, 1)
    cond, uncond = v_cond.float(), v_uncond.float()
    guided = uncond + scale * (cond - uncond)
    ratio = cond.std(dim=(1, 2, 3), keepdim=True) / guided.std(dim=(1, 2, 3), keepdim=True)
    guided = phi * guided * ratio + (1 - phi) * guided
    v = torch.where((t > 0.1) & (t < 0.9), guided, cond)
    clean = x.float() - t * v
    return (x.float() + (t_next - t) * v).to(x.dtype), clean.clamp(-4, 4).to(x.dtype)


def flow_guidance_step_inputs():
    t = torch.linspace(1.0, 0.05, 16)
    x, c, u = (torch.randn(16, 16, 128, 128, dtype=torch.bfloat16) for _ in range(3))
    return x, c, u, t, t - 0.04


class EdmHeunStep(nn.Module):
    """Second-order EDM sampler step around a preconditioned convolutional denoiser."""

    def __init__(self, width=64, sigma_data=0.5):
        super().__init__()
        self.sigma_data = sigma_data
        self.embed = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.conv_in = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.GroupNorm(8, width)
        self.conv_mid = nn.Conv2d(width, width, 3, padding=1)
        self.conv_out = nn.Conv2d(width, 3, 3, padding=1)
        self.register_buffer("freqs", torch.linspace(0, 4, width // 2).exp())
        self.to(torch.bfloat16)

    def denoise(self, x, sigma):
        dtype = self.conv_in.weight.dtype
        s = sigma.view(-1, 1, 1, 1)
        total = s**2 + self.sigma_data**2
        c_skip = self.sigma_data**2 / total
        c_out = s * self.sigma_data / total.sqrt()
        angle = (sigma.log() / 4)[:, None] * self.freqs.float()
        emb = self.embed(torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype))
        h = self.conv_in((x / total.sqrt()).to(dtype)) + emb[:, :, None, None]
        h = h + self.conv_mid(F.silu(self.norm(h)))
        return c_skip * x + c_out * self.conv_out(F.silu(h)).float()

    def forward(self, x, sigma, sigma_next):
        dt = (sigma_next - sigma).view(-1, 1, 1, 1)
        d = (x - self.denoise(x, sigma)) / sigma.view(-1, 1, 1, 1)
        euler = x + dt * d
        d_next = (euler - self.denoise(euler, sigma_next)) / sigma_next.view(-1, 1, 1, 1)
        return x + dt * 0.5 * (d + d_next)


def EdmHeunStep_inputs():
    sigma = torch.linspace(0.1, 10.0, 16)
    return torch.randn(16, 3, 64, 64) * sigma.view(-1, 1, 1, 1), sigma, sigma * 0.8


class LpipsDistance(nn.Module):
    """LPIPS: squared differences of unit-normalised convolutional features, weighted by channel and averaged."""

    def __init__(self, widths=(64, 128, 256)):
        super().__init__()
        self.stages, self.heads = nn.ModuleList(), nn.ParameterList()
        cin = 3
        for i, c in enumerate(widths):
            pool = [nn.MaxPool2d(2)] if i else []
            convs = [nn.Conv2d(cin, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1), nn.ReLU()]
            self.stages.append(nn.Sequential(*pool, *convs))
            self.heads.append(nn.Parameter(torch.rand(c)))
            cin = c
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1))
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1))
        self.to(torch.bfloat16)

    @staticmethod
    def unit(x):
        x = x.float()
        return x / (x.square().sum(dim=1, keepdim=True).sqrt() + 1e-6)

    def forward(self, a, b):
        a, b = (a - self.shift) / self.scale, (b - self.shift) / self.scale
        total = 0.0
        for stage, head in zip(self.stages, self.heads, strict=True):
            a, b = stage(a), stage(b)
            diff = (self.unit(a) - self.unit(b)).square()
            total = total + (diff * head.float()[:, None, None]).sum(dim=1).mean(dim=(1, 2))
        return total


def LpipsDistance_inputs():
    a = torch.rand(8, 3, 128, 128, dtype=torch.bfloat16) * 2 - 1
    return a, (a + 0.1 * torch.randn_like(a)).clamp(-1, 1)


class StyleMapping(nn.Module):
    """StyleGAN mapping network with class embedding, normalised inputs, slow learning rates and truncation."""

    def __init__(self, dim=512, classes=1000, layers=8, outputs=18):
        super().__init__()
        self.outputs, self.gain = outputs, 0.01
        self.embed = nn.Embedding(classes, dim)
        widths = [2 * dim] + [dim] * layers
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(o, i) / self.gain) for i, o in itertools.pairwise(widths)
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(dim)) for _ in range(layers))
        self.register_buffer("w_avg", torch.randn(dim) * 0.1)

    @staticmethod
    def pixel_norm(x):
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-8)

    def forward(self, z, label):
        x = torch.cat((self.pixel_norm(z), self.pixel_norm(self.embed(label))), dim=-1)
        for w, b in zip(self.weights, self.biases, strict=True):
            x = F.leaky_relu(F.linear(x, w * (self.gain / math.sqrt(w.shape[1])), b * self.gain), 0.2) * math.sqrt(2)
        x = x.unsqueeze(1).repeat(1, self.outputs, 1)
        cut = (torch.arange(self.outputs, device=z.device) < 8)[None, :, None]
        return torch.where(cut, self.w_avg.lerp(x, 0.7), x)


def StyleMapping_inputs():
    return torch.randn(1000, 512), torch.randint(0, 1000, (1000,))


class SplitAttention(nn.Module):
    """ResNeSt split attention: two splits of a grouped convolution weighted per channel by a softmax between them."""

    def __init__(self, dim=128, radix=2, reduction=4):
        super().__init__()
        self.radix = radix
        self.conv = nn.Conv2d(dim, dim * radix, 3, padding=1, groups=radix, bias=False)
        self.bn0 = nn.BatchNorm2d(dim * radix)
        self.fc1 = nn.Conv2d(dim, dim * radix // reduction, 1)
        self.bn1 = nn.BatchNorm2d(dim * radix // reduction)
        self.fc2 = nn.Conv2d(dim * radix // reduction, dim * radix, 1)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        b, c, h, w = x.shape
        y = F.relu(self.bn0(self.conv(x))).view(b, self.radix, c, h, w)
        gap = y.sum(dim=1).mean(dim=(2, 3), keepdim=True)
        a = self.fc2(F.relu(self.bn1(self.fc1(gap)))).view(b, self.radix, c, 1, 1)
        return (F.softmax(a, dim=1) * y).sum(dim=1)


def SplitAttention_inputs():
    return (torch.randn(32, 128, 56, 56, dtype=torch.bfloat16),)


class Involution(nn.Module):
    """Involution: a 7x7 kernel of each place made from its features, shared by the channels of a group."""

    def __init__(self, dim=128, kernel=7, group_width=16, reduction=4):
        super().__init__()
        self.kernel, self.groups = kernel, dim // group_width
        self.reduce = nn.Conv2d(dim, dim // reduction, 1, bias=False)
        self.bn = nn.BatchNorm2d(dim // reduction)
        self.span = nn.Conv2d(dim // reduction, kernel**2 * self.groups, 1)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        b, c, h, w = x.shape
        k2 = self.kernel**2
        weight = self.span(F.relu(self.bn(self.reduce(x)))).view(b, self.groups, 1, k2, h, w)
        patches = F.unfold(x, self.kernel, padding=self.kernel // 2)
        patches = patches.view(b, self.groups, c // self.groups, k2, h, w)
        return (weight * patches).sum(dim=3).view(b, c, h, w)


def Involution_inputs():
    return (torch.randn(8, 128, 56, 56, dtype=torch.bfloat16),)


class Cbam(nn.Module):
    """Convolutional block attention: channel gate from mean and maximum, then a spatial gate of the same."""

    def __init__(self, dim=256, reduction=16):
        super().__init__()
        self.fc1 = nn.Linear(dim, dim // reduction)
        self.fc2 = nn.Linear(dim // reduction, dim)
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)
        self.bn = nn.BatchNorm2d(1)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        mean, peak = x.mean(dim=(2, 3)), x.amax(dim=(2, 3))
        gate = self.fc2(F.relu(self.fc1(mean))) + self.fc2(F.relu(self.fc1(peak)))
        x = x * torch.sigmoid(gate)[:, :, None, None]
        pooled = torch.stack((x.amax(dim=1), x.mean(dim=1)), dim=1)
        return x * torch.sigmoid(self.bn(self.conv(pooled)))


def Cbam_inputs():
    return (torch.randn(32, 256, 56, 56, dtype=torch.bfloat16),)


# ---------------------------------------------------------------------------------------------------------------------
# Language and sequences
# ---------------------------------------------------------------------------------------------------------------------


class Gemma3Block(nn.Module):
    """Gemma 3 local layer: norms before and after, normalised queries and keys, rotary, a window, gated GELU."""

    def __init__(self, dim=1152, heads=4, kv_heads=1, head_dim=256, hidden=6912, window=512):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.window = heads, kv_heads, head_dim, window
        self.wq = nn.Linear(dim, heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, dim, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.q_norm = nn.Parameter(torch.zeros(head_dim))
        self.k_norm = nn.Parameter(torch.zeros(head_dim))
        self.pre_attn, self.post_attn = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.pre_mlp, self.post_mlp = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.to(torch.bfloat16)

    @staticmethod
    def norm(x, weight):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
        return (y * (1.0 + weight.float())).type_as(x)

    @staticmethod
    def rotate(x, cos, sin):
        x1, x2 = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-x2, x1), dim=-1) * sin

    def forward(self, x):
        b, s, _ = x.shape
        h = self.norm(x, self.pre_attn)
        q = self.norm(self.wq(h).view(b, s, self.heads, self.head_dim), self.q_norm).transpose(1, 2)
        k = self.norm(self.wk(h).view(b, s, self.kv_heads, self.head_dim), self.k_norm).transpose(1, 2)
        v = self.wv(h).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        pos = torch.arange(s, device=x.device)
        inv = 10000.0 ** (-torch.arange(0, self.head_dim, 2, device=x.device).float() / self.head_dim)
        angle = torch.outer(pos.float(), inv)
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        reach = pos[:, None] - pos[None, :]
        allowed = (reach >= 0) & (reach < self.window)
        k = k.expand(b, self.heads, s, self.head_dim)
        v = v.expand(b, self.heads, s, self.head_dim)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.head_dim**-0.5)
        x = x + self.norm(self.wo(a.transpose(1, 2).reshape(b, s, -1)), self.post_attn)
        h = self.norm(x, self.pre_mlp)
        h = self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))
        return x + self.norm(h, self.post_mlp)


def Gemma3Block_inputs():
    return (torch.randn(2, 1000, 1152, dtype=torch.bfloat16),)


class Phi3MLP(nn.Module):
    """Phi-3 feed-forward: RMS norm, one product for gate and value, SiLU, residual."""

    def __init__(self, dim=3072, hidden=8192):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        gate, up = self.gate_up(self.weight * h.to(x.dtype)).chunk(2, dim=-1)
        return x + self.down(up * F.silu(gate))


def Phi3MLP_inputs():
    return (torch.randn(2, 333, 3072, dtype=torch.bfloat16),)


class CohereParallelBlock(nn.Module):
    """Cohere block: one bias-free layer norm, interleaved rotary grouped attention beside a SwiGLU, one residual."""

    def __init__(self, dim=2048, heads=16, kv_heads=4, hidden=5632):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.weight = nn.Parameter(torch.ones(dim))
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.to(torch.bfloat16)

    @staticmethod
    def rotate(x, cos, sin):
        y = x.float()
        turned = torch.stack((-y[..., 1::2], y[..., ::2]), dim=-1).flatten(-2)
        return (y * cos + turned * sin).to(x.dtype)

    def forward(self, x, cos, sin):
        b, s, d = x.shape
        h = x.float()
        mean = h.mean(dim=-1, keepdim=True)
        var = (h - mean).pow(2).mean(dim=-1, keepdim=True)
        h = ((h - mean) * torch.rsqrt(var + 1e-5) * self.weight.float()).to(x.dtype)
        q = self.wq(h).view(b, s, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(h).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(h).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        a = self.wo(a.transpose(1, 2).reshape(b, s, d))
        return x + a + self.down(F.silu(self.gate(h)) * self.up(h))


def CohereParallelBlock_inputs():
    s, d = 777, 128
    angle = torch.outer(torch.arange(s).float(), 10000.0 ** (-torch.arange(0, d, 2).float() / d))
    angle = angle.repeat_interleave(2, dim=-1)
    return torch.randn(2, s, 2048, dtype=torch.bfloat16), angle.cos(), angle.sin()


class Mamba2GatedNorm(nn.Module):
    """Mamba 2's end: skip by head, SiLU gate, RMS norm over groups of channels and the output product."""

    def __init__(self, dim=2048, heads=64, head_dim=64, groups=8):
        super().__init__()
        self.groups = groups
        self.skip = nn.Parameter(torch.ones(heads))
        self.weight = nn.Parameter(torch.ones(heads * head_dim))
        self.out = nn.Linear(heads * head_dim, dim, bias=False)
        self.to(torch.bfloat16)

    def forward(self, y, x, z):
        y = y.float() + self.skip.float()[:, None] * x.float()
        y = y.flatten(2) * F.silu(z.float())
        y = y.unflatten(-1, (self.groups, -1))
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + 1e-5)
        y = y.flatten(2) * self.weight.float()
        return self.out(y.to(z.dtype))


def Mamba2GatedNorm_inputs():
    y, x = (torch.randn(2, 2048, 64, 64, dtype=torch.bfloat16) for _ in range(2))
    return y, x, torch.randn(2, 2048, 4096, dtype=torch.bfloat16)


def mlstm_parallel(q, k, v, i_pre, f_pre, norm_weight):
    """xLSTM's matrix memory in parallel form: stabilised exponential gates, normaliser and a norm for each head."""
    s, d = q.shape[-2:]
    log_f = F.logsigmoid(f_pre.float()).cumsum(dim=-1)
    decay = log_f[..., :, None] - log_f[..., None, :] + i_pre.float()[..., None, :]
    causal = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    decay = decay.masked_fill(~causal, float("-inf"))
    peak = decay.amax(dim=-1, keepdim=True)
    weight = torch.exp(decay - peak)
    scores = (q @ (k * d**-0.5).transpose(-1, -2)).float() * weight
    norm = torch.maximum(scores.sum(dim=-1, keepdim=True).abs(), torch.exp(-peak))
    h = (scores / (norm + 1e-6)).to(v.dtype) @ v
    h = F.layer_norm(h.float(), (d,), eps=1e-5).to(v.dtype)
    return h.transpose(1, 2).flatten(2) * norm_weight


def mlstm_parallel_inputs():
    b, h, s, d = 2, 4, 1024, 256
    q, k, v = (torch.randn(b, h, s, d, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v, torch.randn(b, h, s), torch.randn(b, h, s) + 3.0, torch.ones(h * d, dtype=torch.bfloat16)


class RWKVChannelMix(nn.Module):
    """RWKV channel mixing: token shift, learned mixes, squared ReLU, receptance gate."""

    def __init__(self, dim=2048, hidden=7168):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix_k = nn.Parameter(torch.rand(1, 1, dim))
        self.mix_r = nn.Parameter(torch.rand(1, 1, dim))
        self.key = nn.Linear(dim, hidden, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(hidden, dim, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x):
        h = self.norm(x)
        delta = F.pad(h, (0, 0, 1, -1)) - h
        k = torch.relu(self.key(h + delta * self.mix_k)).square()
        r = torch.sigmoid(self.receptance(h + delta * self.mix_r))
        return x + r * self.value(k)


def RWKVChannelMix_inputs():
    return (torch.randn(2, 1000, 2048, dtype=torch.bfloat16),)


class HyenaOperator(nn.Module):
    """Hyena of order two with an implicit filter of 128 taps, applied by a direct causal convolution."""

    def __init__(self, dim=512, taps=128, width=64):
        super().__init__()
        self.proj = nn.Linear(dim, 3 * dim)
        self.short = nn.Conv1d(3 * dim, 3 * dim, 3, padding=2, groups=3 * dim)
        self.mlp1, self.mlp2 = nn.Linear(5, width), nn.Linear(width, width)
        self.mlp3 = nn.Linear(width, dim, bias=False)
        self.skip = nn.Parameter(torch.randn(dim))
        self.out = nn.Linear(dim, dim)
        t = torch.linspace(0, 1, taps)[:, None]
        self.register_buffer("features", torch.cat((t, (6.28 * t).sin(), (6.28 * t).cos(), t.sin(), t.cos()), dim=-1))
        self.register_buffer("decay", torch.exp(-t * torch.linspace(1.0, 15.0, dim)))
        self.to(torch.bfloat16)

    def forward(self, x):
        s = x.shape[1]
        u = self.short(self.proj(x).transpose(1, 2))[..., :s]
        x1, x2, v = u.chunk(3, dim=1)
        f = torch.sin(self.mlp2(torch.sin(self.mlp1(self.features))))
        kernel = (self.mlp3(f) * self.decay).t()
        v = v * x2
        taps = kernel.shape[-1]
        y = F.conv1d(F.pad(v, (taps - 1, 0)), kernel.flip(-1).unsqueeze(1), groups=v.shape[1])
        y = (y + v * self.skip[:, None]) * x1
        return self.out(y.transpose(1, 2))


def HyenaOperator_inputs():
    return (torch.randn(4, 1000, 512, dtype=torch.bfloat16),)


class GatedAttentionUnit(nn.Module):
    """Gated attention unit of FLASH: shared queries and keys, squared ReLU attention, gate and residual."""

    def __init__(self, dim=768, expand=1536, key=128):
        super().__init__()
        self.expand, self.key = expand, key
        self.norm = nn.LayerNorm(dim)
        self.uv = nn.Linear(dim, 2 * expand + key)
        self.gamma = nn.Parameter(torch.randn(2, key) * 0.02 + 1.0)
        self.beta = nn.Parameter(torch.zeros(2, key))
        self.out = nn.Linear(expand, dim)
        self.to(torch.bfloat16)

    def forward(self, x):
        u, v, z = F.silu(self.uv(self.norm(x))).split([self.expand, self.expand, self.key], dim=-1)
        q, k = (z.unsqueeze(-2) * self.gamma + self.beta).unbind(dim=-2)
        a = torch.relu(torch.einsum("bnd,bmd->bnm", q, k) / math.sqrt(self.key)).square() / x.shape[1]
        return x + self.out(u * torch.einsum("bnm,bme->bne", a, v))


def GatedAttentionUnit_inputs():
    return (torch.randn(8, 1000, 768, dtype=torch.bfloat16),)


class PerceiverCross(nn.Module):
    """Perceiver: learned latents attend with one head to pixels with Fourier positions (261 channels), then a MLP."""

    def __init__(self, latents=512, dim=1024, channels=261):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, dim) * 0.02)
        self.norm_q, self.norm_kv, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(channels), nn.LayerNorm(dim)
        self.wq = nn.Linear(dim, channels)
        self.wk = nn.Linear(channels, channels)
        self.wv = nn.Linear(channels, channels)
        self.wo = nn.Linear(channels, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.to(torch.bfloat16)

    def forward(self, inputs):
        kv = self.norm_kv(inputs)
        latents = self.latents.expand(inputs.shape[0], -1, -1)
        q, k, v = self.wq(self.norm_q(latents)), self.wk(kv), self.wv(kv)
        a = torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
        x = latents + self.wo(torch.bmm(a.softmax(dim=-1), v))
        return x + self.mlp(self.norm_mlp(x))


def PerceiverCross_inputs():
    return (torch.randn(4, 3136, 261, dtype=torch.bfloat16),)


def longformer_attention(q, k, v, padded):
    """Longformer: chunked attention within 256 tokens either side, plus a first token that all attend to."""
    b, h, s, d = q.shape
    w = 256
    n = s // w
    qc = (q * d**-0.5).view(b, h, n, w, d)
    kc = F.pad(k, (0, 0, w, w)).unfold(2, 3 * w, w)
    vc = F.pad(v, (0, 0, w, w)).unfold(2, 3 * w, w)
    scores = torch.einsum("bhnqd,bhndk->bhnqk", qc, kc).float()
    row = torch.arange(w, device=q.device)[:, None]
    col = torch.arange(3 * w, device=q.device)[None, :] - w
    band = (col - row).abs() <= w
    place = torch.arange(n, device=q.device)[:, None, None] * w + col
    inside = (place > 0) & (place < s)
    keys = F.pad(padded, (w, w), value=True).unfold(1, 3 * w, w)
    allowed = (band & inside)[None, None] & ~keys[:, None, :, None, :]
    scores = scores.masked_fill(~allowed, float("-inf"))
    first = torch.einsum("bhnqd,bhd->bhnq", qc, k[:, :, 0]).float().unsqueeze(-1)
    probs = torch.cat((first, scores), dim=-1).softmax(dim=-1).to(v.dtype)
    out = probs[..., :1] * v[:, :, :1].unsqueeze(2) + torch.einsum("bhnqk,bhndk->bhnqd", probs[..., 1:], vc)
    return out.reshape(b, h, s, d).transpose(1, 2).flatten(2)


def longformer_attention_inputs():
    q, k, v = (torch.randn(2, 12, 2048, 64, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v, torch.arange(2048)[None, :] >= torch.tensor([[2048], [1777]])


class TalkingHeadsAttention(nn.Module):
    """CaiT attention on 197 tokens: heads mixed before and after the softmax, with layer scale."""

    def __init__(self, dim=384, heads=8):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mix_before = nn.Linear(heads, heads)
        self.mix_after = nn.Linear(heads, heads)
        self.proj = nn.Linear(dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 0.1))
        self.to(torch.bfloat16)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(self.norm(x)).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * (c // self.heads) ** -0.5, qkv[1], qkv[2]
        a = q @ k.transpose(-2, -1)
        a = self.mix_before(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        a = a.softmax(dim=-1)
        a = self.mix_after(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.gamma * self.proj((a @ v).transpose(1, 2).reshape(b, n, c))


def TalkingHeadsAttention_inputs():
    return (torch.randn(32, 197, 384, dtype=torch.bfloat16),)


def cosformer_attention(q, k, v):
    """cosFormer: linear attention of ReLU features reweighted by the cosine of the distance."""
    s = q.shape[-2]
    q, k = F.relu(q), F.relu(k)
    angle = (math.pi / 2) * torch.arange(1, s + 1, device=q.device, dtype=torch.float32)[:, None] / s
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    q_ = torch.cat((q * cos, q * sin), dim=-1)
    k_ = torch.cat((k * cos, k * sin), dim=-1)
    kv = torch.einsum("bhsd,bhsm->bhdm", k_, v)
    z = 1 / torch.einsum("bhsd,bhd->bhs", q_.float(), k_.float().sum(dim=2)).clamp(min=1e-6)
    out = torch.einsum("bhsd,bhdm->bhsm", q_, kv).float() * z.unsqueeze(-1)
    return out.to(v.dtype).transpose(1, 2).flatten(2)


def cosformer_attention_inputs():
    return tuple(torch.randn(4, 12, 2048, 64, dtype=torch.bfloat16) for _ in range(3))


class AlbertMlmHead(nn.Module):
    """ALBERT masked-language head: factorised to 128, GELU, layer norm, 30000 words tied, cross-entropy."""

    def __init__(self, hidden=768, embedding=128, vocab=30000):
        super().__init__()
        self.dense = nn.Linear(hidden, embedding)
        self.norm = nn.LayerNorm(embedding, eps=1e-12)
        self.words = nn.Embedding(vocab, embedding)
        self.bias = nn.Parameter(torch.zeros(vocab))
        nn.init.normal_(self.words.weight, std=0.02)
        self.to(torch.bfloat16)

    def forward(self, x, labels):
        h = self.norm(F.gelu(self.dense(x), approximate="tanh"))
        logits = F.linear(h, self.words.weight, self.bias).float()
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)
        return loss, torch.logsumexp(logits, dim=-1)


def AlbertMlmHead_inputs():
    labels = torch.randint(0, 30000, (4, 512))
    labels = torch.where(torch.rand(4, 512) < 0.15, labels, -100)
    labels[0, 0] = 7
    return torch.randn(4, 512, 768, dtype=torch.bfloat16), labels


def deberta_attention(q, k, v, pos_q, pos_k, mask):
    """DeBERTa: scores of content to content, content to position and position to content, by gathered distances."""
    b, h, s, d = q.shape
    span = pos_q.shape[-2] // 2
    scale = 1.0 / math.sqrt(3 * d)
    place = torch.arange(s, device=q.device)
    rel = place[:, None] - place[None, :]
    c2p_index = (rel + span).clamp(0, 2 * span - 1).expand(b, h, s, s)
    p2c_index = (span - rel).clamp(0, 2 * span - 1).expand(b, h, s, s)
    scores = q @ (k * scale).transpose(-1, -2)
    c2p = torch.gather(q @ (pos_k * scale).transpose(-1, -2), -1, c2p_index)
    p2c = torch.gather(k @ (pos_q * scale).transpose(-1, -2), -1, p2c_index).transpose(-1, -2)
    scores = (scores + c2p + p2c).float()
    allowed = mask[:, None, None, :] & mask[:, None, :, None]
    probs = scores.masked_fill(~allowed, torch.finfo(torch.float32).min).softmax(dim=-1)
    probs = probs.masked_fill(~allowed, 0.0).to(v.dtype)
    return (probs @ v).transpose(1, 2).flatten(2)


def deberta_attention_inputs():
    q, k, v = (torch.randn(4, 12, 512, 64, dtype=torch.bfloat16) for _ in range(3))
    pos_q, pos_k = (torch.randn(12, 512, 64, dtype=torch.bfloat16) for _ in range(2))
    return q, k, v, pos_q, pos_k, torch.arange(512)[None, :] < torch.tensor([[512], [333], [77], [500]])


class DoraLinear(nn.Module):
    """DoRA: a frozen weight with a low-rank change, its rows rescaled from their norm to a learned magnitude."""

    def __init__(self, cin=2048, cout=2048, rank=16, alpha=32):
        super().__init__()
        self.scaling = alpha / rank
        self.base = nn.Linear(cin, cout)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, cin) / math.sqrt(cin))
        self.lora_b = nn.Parameter(torch.randn(cout, rank) * 0.02)
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1) * 1.05)
        self.to(torch.bfloat16)

    def forward(self, x):
        delta = self.lora_b @ self.lora_a
        norm = torch.linalg.vector_norm(self.base.weight + self.scaling * delta, dim=1).detach()
        ratio = self.magnitude / norm
        low = F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scaling
        return ratio * (F.linear(x, self.base.weight) + low) + self.base.bias


def DoraLinear_inputs():
    return (torch.randn(2, 512, 2048, dtype=torch.bfloat16),)


# ---------------------------------------------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------------------------------------------


def moco_infonce_loss(query, key, queue):
    """MoCo: a positive pair against a queue of 65536 negatives, 65537 classes by cross-entropy."""
    q, k = F.normalize(query, dim=1), F.normalize(key, dim=1)
    positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
    negative = torch.einsum("nc,kc->nk", q, F.normalize(queue, dim=1))
    logits = torch.cat((positive, negative), dim=1) / 0.2
    labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, labels)


def moco_infonce_loss_inputs():
    q = torch.randn(256, 128)
    return q, q + 0.5 * torch.randn_like(q), torch.randn(65536, 128)


def arcface_loss(features, weight, labels):
    """ArcFace: an angle added to that of the target class, scaled by 64, over 10575 identities."""
    margin, scale = 0.5, 64.0
    cosine = F.linear(F.normalize(features), F.normalize(weight)).clamp(-1 + 1e-7, 1 - 1e-7)
    target = cosine.gather(1, labels[:, None])
    sine = torch.sqrt(1.0 - target.square())
    turned = target * math.cos(margin) - sine * math.sin(margin)
    turned = torch.where(target > math.cos(math.pi - margin), turned, target - margin * math.sin(margin))
    hot = torch.arange(weight.shape[0], device=labels.device)[None, :] == labels[:, None]
    return F.cross_entropy(torch.where(hot, turned, cosine) * scale, labels)


def arcface_loss_inputs():
    return torch.randn(512, 512), torch.randn(10575, 512), torch.randint(0, 10575, (512,))


def circle_loss(features, labels):
    """Circle loss over all pairs of a batch with self-paced weights, by log-sum-exp for each anchor."""
    m, gamma = 0.4, 80.0
    x = F.normalize(features, dim=-1)
    sim = x @ x.t()
    same = labels[:, None] == labels[None, :]
    itself = torch.eye(x.shape[0], dtype=torch.bool, device=x.device)
    weight_p = torch.clamp_min(1 + m - sim.detach(), 0.0)
    weight_n = torch.clamp_min(sim.detach() + m, 0.0)
    logit_p = -weight_p * (sim - (1 - m)) * gamma
    logit_n = weight_n * (sim - m) * gamma
    lse_p = torch.logsumexp(logit_p.masked_fill(~same | itself, float("-inf")), dim=1)
    lse_n = torch.logsumexp(logit_n.masked_fill(same, float("-inf")), dim=1)
    return F.softplus(lse_p + lse_n).mean()


def circle_loss_inputs():
    return torch.randn(1000, 128), torch.arange(1000) % 125


def barlow_twins_loss(z1, z2):
    """Barlow Twins: the cross-correlation of two views standardised over the batch against the identity."""
    n, d = z1.shape
    a = (z1 - z1.mean(dim=0)) / (z1.std(dim=0) + 1e-5)
    b = (z2 - z2.mean(dim=0)) / (z2.std(dim=0) + 1e-5)
    c = a.t() @ b / n
    eye = torch.eye(d, device=c.device, dtype=c.dtype)
    diff = (c - eye).pow(2)
    return (diff * eye).sum() + 0.0051 * (diff * (1 - eye)).sum()


def barlow_twins_loss_inputs():
    z = torch.randn(512, 4096)
    return z, z + 0.3 * torch.randn_like(z)


def supcon_loss(features, labels):
    """Supervised contrastive loss of two views each, log-probabilities averaged over the positives."""
    n = features.shape[0]
    x = F.normalize(features, dim=-1).transpose(0, 1).reshape(2 * n, -1)
    labels = labels.repeat(2)
    logits = x @ x.t() / 0.07
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    other = 1.0 - torch.eye(2 * n, device=x.device, dtype=x.dtype)
    positive = (labels[:, None] == labels[None, :]).to(x.dtype) * other
    log_prob = logits - torch.log((torch.exp(logits) * other).sum(dim=1, keepdim=True))
    return -((positive * log_prob).sum(dim=1) / positive.sum(dim=1)).mean()


def supcon_loss_inputs():
    return torch.randn(1024, 2, 128), torch.randint(0, 1000, (1024,))


def koleo_loss(tokens):
    """DINOv2's KoLeo regulariser: the log distance to the nearest neighbour in a batch of class tokens."""
    x = F.normalize(tokens, eps=1e-8, p=2, dim=-1)
    dots = x @ x.t()
    itself = torch.eye(x.shape[0], dtype=torch.bool, device=x.device)
    nearest = dots.masked_fill(itself, -1.0).argmax(dim=1)
    distance = F.pairwise_distance(x, x[nearest], p=2, eps=1e-8)
    return -torch.log(distance + 1e-8).mean()


def koleo_loss_inputs():
    return (torch.randn(2048, 768),)


class TransducerJoint(nn.Module):
    """Transducer joiner: frames plus label states through tanh to 1025 symbols, with those of blank and label."""

    def __init__(self, encoder=512, predictor=640, joint=512, vocab=1025):
        super().__init__()
        self.encoder = nn.Linear(encoder, joint)
        self.predictor = nn.Linear(predictor, joint)
        self.out = nn.Linear(joint, vocab)
        self.to(torch.bfloat16)

    def forward(self, frames, states, labels):
        h = torch.tanh(self.encoder(frames).unsqueeze(2) + self.predictor(states).unsqueeze(1))
        log_p = F.log_softmax(self.out(h).float(), dim=-1)
        index = labels[:, None, :, None].expand(-1, frames.shape[1], -1, 1)
        return log_p[..., 0], log_p[:, :, :-1].gather(-1, index).squeeze(-1)


def TransducerJoint_inputs():
    return (
        torch.randn(4, 197, 512, dtype=torch.bfloat16),
        torch.randn(4, 33, 640, dtype=torch.bfloat16),
        torch.randint(1, 1025, (4, 32)),
    )


def qr_dqn_loss(quantiles, actions, next_quantiles, reward, done):
    """QR-DQN: Huber quantile regression of all pairs to the target of the greedy next action, with priorities."""
    b, _, n = quantiles.shape
    best = next_quantiles.mean(dim=-1).argmax(dim=-1)
    picked = next_quantiles.gather(1, best.view(b, 1, 1).expand(b, 1, n)).squeeze(1)
    target = (reward[:, None] + 0.99 * (1 - done[:, None]) * picked).detach()
    current = quantiles.gather(1, actions.view(b, 1, 1).expand(b, 1, n)).squeeze(1)
    error = target[:, None, :] - current[:, :, None]
    tau = (torch.arange(n, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / n
    huber = torch.where(error.abs() <= 1.0, 0.5 * error.pow(2), error.abs() - 0.5)
    loss = (tau[:, None] - (error.detach() < 0).to(error.dtype)).abs() * huber
    each = loss.mean(dim=2).sum(dim=1)
    return each.mean(), error.detach().abs().mean(dim=(1, 2))


def qr_dqn_loss_inputs():
    b, a, n = 512, 6, 200
    done = (torch.rand(b) < 0.1).float()
    return torch.randn(b, a, n), torch.randint(0, a, (b,)), torch.randn(b, a, n), torch.randn(b), done


def c51_loss(logits, actions, next_logits, reward, discount):
    """C51: the greedy next distribution of 51 atoms shifted, projected onto the support, and cross-entropy to it."""
    b, _, n = logits.shape
    support = torch.linspace(-10.0, 10.0, n, device=logits.device)
    gap = 20.0 / (n - 1)
    probs = next_logits.softmax(dim=-1)
    best = (probs * support).sum(dim=-1).argmax(dim=-1)
    probs = probs.gather(1, best.view(b, 1, 1).expand(b, 1, n)).squeeze(1)
    moved = (reward[:, None] + discount[:, None] * support).clamp(-10.0, 10.0)
    share = (1 - (moved[:, None, :] - support[None, :, None]).abs() / gap).clamp(0.0, 1.0)
    target = (share * probs[:, None, :]).sum(dim=-1).detach()
    log_p = F.log_softmax(logits, dim=-1).gather(1, actions.view(b, 1, 1).expand(b, 1, n)).squeeze(1)
    each = -(target * log_p).sum(dim=-1)
    return each.mean(), each.detach(), target


def c51_loss_inputs():
    b, a, n = 4096, 18, 51
    discount = 0.99 * (torch.rand(b) > 0.05).float()
    return torch.randn(b, a, n), torch.randint(0, a, (b,)), torch.randn(b, a, n), torch.randn(b), discount


def evidential_regression_loss(outputs, y):
    """Deep evidential regression: normal inverse-gamma likelihood by log-gamma, and evidence where it errs."""
    gamma, nu, alpha, beta = outputs.unbind(dim=-1)
    nu, alpha, beta = F.softplus(nu) + 1e-6, F.softplus(alpha) + 1 + 1e-6, F.softplus(beta) + 1e-6
    omega = 2 * beta * (1 + nu)
    nll = 0.5 * torch.log(math.pi / nu) - alpha * torch.log(omega)
    nll = nll + (alpha + 0.5) * torch.log((y - gamma) ** 2 * nu + omega)
    nll = nll + torch.lgamma(alpha) - torch.lgamma(alpha + 0.5)
    penalty = (y - gamma).abs() * (2 * nu + alpha)
    aleatoric, epistemic = beta / (alpha - 1), beta / (nu * (alpha - 1))
    return (nll + 0.01 * penalty).mean(), aleatoric.mean(), epistemic.mean()


def evidential_regression_loss_inputs():
    return torch.randn(262144, 4), torch.randn(262144)


# ---------------------------------------------------------------------------------------------------------------------
# Optimisers, quantisation and numerics
# ---------------------------------------------------------------------------------------------------------------------


def lion_step(param, grad, exp_avg):
    """Lion: the sign of an interpolated momentum with decoupled decay, and a cautious mask by the gradient's sign."""
    lr, beta1, beta2, decay = 1e-4, 0.9, 0.99, 0.1
    g = grad.float()
    update = torch.sign(exp_avg * beta1 + g * (1 - beta1))
    agree = (update * g > 0).float()
    update = update * agree / agree.mean().clamp(min=1e-3)
    return param * (1 - lr * decay) - lr * update, exp_avg * beta2 + g * (1 - beta2)


def lion_step_inputs():
    shape = (2048, 2752)
    return torch.randn(shape) * 0.02, torch.randn(shape, dtype=torch.bfloat16), torch.randn(shape) * 0.1


def lamb_step(param, grad, exp_avg, exp_avg_sq, step):
    """LAMB: Adam's update with decay, scaled by the ratio of the norms of weights and update."""
    beta1, beta2, lr, decay = 0.9, 0.999, 2e-3, 0.01
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    m, v = exp_avg / (1 - beta1**step), exp_avg_sq / (1 - beta2**step)
    update = m / (v.sqrt() + 1e-6) + decay * param
    w_norm, u_norm = param.norm().clamp(max=10.0), update.norm()
    trust = torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, torch.ones_like(w_norm))
    return param - lr * trust * update, exp_avg, exp_avg_sq


def lamb_step_inputs():
    shape = (4096, 1024)
    return (
        torch.randn(shape) * 0.02,
        torch.randn(shape),
        torch.randn(shape) * 0.1,
        torch.rand(shape),
        torch.tensor(333.0),
    )


def soap_step(param, grad, exp_avg, exp_avg_sq, left, right, gg_left, gg_right):
    """SOAP: Adam in the eigenbasis of Shampoo's factors, whose running sums are updated as well."""
    beta1, beta2, lr = 0.95, 0.95, 3e-3
    exp_avg = exp_avg.lerp(grad, 1 - beta1)
    turned = left.t() @ grad @ right
    exp_avg_sq = exp_avg_sq.lerp(turned.square(), 1 - beta2)
    update = (left.t() @ exp_avg @ right) / (exp_avg_sq.sqrt() + 1e-8)
    update = left @ update @ right.t()
    gg_left = gg_left.lerp(grad @ grad.t(), 1 - beta2)
    gg_right = gg_right.lerp(grad.t() @ grad, 1 - beta2)
    return param * (1 - lr * 0.01) - lr * update, exp_avg, exp_avg_sq, gg_left, gg_right


def soap_step_inputs():
    m, n = 1024, 768
    left, right = torch.linalg.qr(torch.randn(m, m))[0], torch.linalg.qr(torch.randn(n, n))[0]
    param, grad, exp_avg = torch.randn(m, n) * 0.02, torch.randn(m, n), torch.randn(m, n) * 0.1
    return param, grad, exp_avg, torch.rand(m, n) + 0.1, left, right, torch.eye(m), torch.eye(n)


def adam_mini_step(param, grad, exp_avg, head_sq, step):
    """Adam-mini for a query projection: one second moment for each of 24 heads."""
    beta1, beta2, lr, decay = 0.9, 0.95, 1e-3, 0.1
    heads = head_sq.shape[0]
    g = grad.float()
    head_sq = head_sq * beta2 + (1 - beta2) * g.view(heads, -1).square().mean(dim=1)
    exp_avg = exp_avg * beta1 + g * (1 - beta1)
    rate = lr / (1 - beta1**step) / ((head_sq / (1 - beta2**step)).sqrt() + 1e-8)
    update = exp_avg.view(heads, -1) * rate[:, None]
    return param * (1 - lr * decay) - update.view_as(param), exp_avg, head_sq


def adam_mini_step_inputs():
    shape = (3072, 2048)
    return (
        torch.randn(shape) * 0.02,
        torch.randn(shape, dtype=torch.bfloat16),
        torch.randn(shape) * 0.1,
        torch.rand(24) + 0.5,
        torch.tensor(77.0),
    )


def ema_swa_update(p0, p1, p2, e0, e1, e2, s0, s1, s2, step):
    """Exponential moving average with a warmed-up decay beside a stochastic weight average, over three tensors."""
    decay = torch.clamp((1 + step) / (10 + step), max=0.9999)
    count = torch.floor(step / 100)
    params, emas, swas = (p0, p1, p2), (e0, e1, e2), (s0, s1, s2)
    emas = [e * decay + p.float() * (1 - decay) for p, e in zip(params, emas, strict=True)]
    swas = [s + (p.float() - s) / (count + 1) for p, s in zip(params, swas, strict=True)]
    drift = torch.stack([(e - s).square().mean() for e, s in zip(emas, swas, strict=True)]).mean().sqrt()
    return *emas, *swas, drift


def ema_swa_update_inputs():
    shapes = ((3072, 768), (50257, 77), (2304, 768))
    params = [torch.randn(s, dtype=torch.bfloat16) for s in shapes]
    return *params, *[torch.randn(s) for s in shapes * 2], torch.tensor(1000.0)


def fp8_blockwise_matmul(x, weight, weight_scale):
    """Activations cast to e4m3 in tiles of 1x128 times e4m3 weights in blocks of 128x128, each block rescaled."""
    m, k = x.shape
    n = weight.shape[0]
    tiles = x.float().view(m, k // 128, 128)
    scale = tiles.abs().amax(dim=-1).clamp(min=1e-4) / 448.0
    quantised = (tiles / scale[..., None]).to(torch.float8_e4m3fn)
    partial = torch.bmm(quantised.float().transpose(0, 1), weight.float().view(n, k // 128, 128).permute(1, 2, 0))
    columns = weight_scale.repeat_interleave(128, dim=0)
    out = (partial * scale.t()[:, :, None] * columns.t()[:, None, :]).sum(dim=0)
    return out.to(x.dtype), quantised.flatten(1), scale


def fp8_blockwise_matmul_inputs():
    m, k, n = 512, 2048, 1536
    weight = (torch.randn(n, k) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.randn(m, k, dtype=torch.bfloat16), weight, torch.rand(n // 128, k // 128) * 1e-3 + 1e-4


def int8_conv_requantise(x, weight, weight_scale, bias, in_scale, in_zero, out_scale, out_zero):
    """Quantised 3x3 convolution: uint8 activations, int8 weights by channel, ReLU and requantisation."""
    xf = x.float() - in_zero
    acc = F.conv2d(xf, weight.to(xf.dtype), padding=1)
    y = acc * (in_scale * weight_scale)[:, None, None] + bias[:, None, None]
    q = torch.round(F.relu(y) / out_scale + out_zero).clamp(0, 255).to(torch.uint8)
    return q, (q.float() - out_zero) * out_scale


def int8_conv_requantise_inputs():
    return (
        torch.randint(0, 256, (16, 64, 56, 56), dtype=torch.uint8),
        torch.randint(-127, 128, (128, 64, 3, 3), dtype=torch.int8),
        torch.rand(128) * 1e-3 + 1e-4,
        torch.randn(128) * 0.1,
        torch.tensor(0.02),
        torch.tensor(114.0),
        torch.tensor(0.05),
        torch.tensor(3.0),
    )


def awq_linear(x, qweight, qzeros, scales, bias):
    """AWQ linear: int4 weights packed along outputs in the interleaved order, zeros and scales by groups of 128."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=x.device, dtype=torch.int32) * 4
    w = ((qweight.unsqueeze(-1) >> order) & 0xF).flatten(1)
    z = ((qzeros.unsqueeze(-1) >> order) & 0xF).flatten(1)
    w = (w.view(-1, 128, w.shape[1]) - z.unsqueeze(1)).to(x.dtype) * scales.unsqueeze(1)
    return x @ w.flatten(0, 1) + bias


def awq_linear_inputs():
    k, n = 4096, 4096
    lo, hi = -(2**31), 2**31
    return (
        torch.randn(1, 197, k, dtype=torch.float16),
        torch.randint(lo, hi, (k, n // 8), dtype=torch.int32),
        torch.randint(lo, hi, (k // 128, n // 8), dtype=torch.int32),
        torch.rand(k // 128, n, dtype=torch.float16) * 0.01,
        torch.randn(n, dtype=torch.float16),
    )


def stochastic_rounding_step(param, grad, momentum, noise):
    """Nesterov step on bfloat16 weights in float32, rounded back stochastically by given 16-bit noise."""
    momentum = 0.95 * momentum + grad.float()
    new = param.float() - 1e-3 * (grad.float() + 0.95 * momentum)
    bits = new.float().view(torch.int32)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return rounded.to(torch.bfloat16), momentum, (rounded - new).abs().mean()


def stochastic_rounding_step_inputs():
    shape = (4096, 1376)
    param, grad = torch.randn(shape, dtype=torch.bfloat16), torch.randn(shape, dtype=torch.bfloat16)
    return param, grad, torch.randn(shape), torch.randint(0, 65536, shape, dtype=torch.int32)


def centralised_clipped_step(weight, grad, momentum):
    """Gradient centralisation and NFNet's adaptive clipping by output unit, then momentum with decay."""
    dims = (1, 2, 3)
    w_norm = weight.square().sum(dim=dims, keepdim=True).sqrt().clamp(min=1e-3)
    g_norm = grad.square().sum(dim=dims, keepdim=True).sqrt()
    limit = 0.01 * w_norm
    grad = torch.where(g_norm > limit, grad * (limit / g_norm.clamp(min=1e-6)), grad)
    grad = grad - grad.mean(dim=dims, keepdim=True)
    momentum = 0.9 * momentum + grad + 5e-5 * weight
    return weight - 0.1 * (grad + 0.9 * momentum), momentum, g_norm.amax()


def centralised_clipped_step_inputs():
    shape = (1024, 512, 3, 3)
    return torch.randn(shape) * 0.02, torch.randn(shape) * 0.01, torch.randn(shape) * 0.01


# ---------------------------------------------------------------------------------------------------------------------
# Recommenders, graphs, time series and science
# ---------------------------------------------------------------------------------------------------------------------


class Dlrm(nn.Module):
    """DLRM: dense tower, 26 embeddings, dot products of all pairs, top tower and click logits."""

    def __init__(self, dim=64, tables=26, rows=2000):
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, dim), nn.ReLU()
        )
        self.embedding = nn.Embedding(tables * rows, dim)
        self.register_buffer("offsets", torch.arange(tables) * rows)
        pairs = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("li", pairs[0])
        self.register_buffer("lj", pairs[1])
        cross = pairs.shape[1]
        self.top = nn.Sequential(
            nn.Linear(dim + cross, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        t = torch.cat((x.unsqueeze(1), self.embedding(sparse + self.offsets)), dim=1)
        z = torch.bmm(t, t.transpose(1, 2))[:, self.li, self.lj]
        return self.top(torch.cat((x, z), dim=1)).squeeze(-1)


def Dlrm_inputs():
    return torch.rand(4096, 13).log1p(), torch.randint(0, 2000, (4096, 26))


class DinAttention(nn.Module):
    """Deep interest network: a unit scores each past item with the candidate, weighted sum and prediction."""

    def __init__(self, dim=64):
        super().__init__()
        self.unit = nn.Sequential(nn.Linear(4 * dim, 80), nn.PReLU(), nn.Linear(80, 40), nn.PReLU(), nn.Linear(40, 1))
        self.fc1, self.bn = nn.Linear(3 * dim, 200), nn.BatchNorm1d(200, affine=False)
        self.alpha = nn.Parameter(torch.full((200,), 0.1))
        self.fc2 = nn.Linear(200, 1)
        self.eval()

    def forward(self, target, history, mask):
        t = target.unsqueeze(1).expand_as(history)
        score = self.unit(torch.cat((t, history, t - history, t * history), dim=-1)).squeeze(-1)
        score = score.masked_fill(~mask, 0.0)
        interest = torch.bmm(score.unsqueeze(1), history).squeeze(1)
        h = self.fc1(torch.cat((target, interest, target * interest), dim=-1))
        gate = torch.sigmoid(self.bn(h))
        h = gate * h + (1 - gate) * self.alpha * h
        return torch.sigmoid(self.fc2(h)).squeeze(-1)


def DinAttention_inputs():
    mask = torch.arange(100)[None, :] < torch.randint(1, 101, (1024, 1))
    return torch.randn(1024, 64), torch.randn(1024, 100, 64), mask


class FourierFeaturePde(nn.Module):
    """Random Fourier features and a tanh network, with the Helmholtz residual by central differences."""

    def __init__(self, features=128, width=256, wave=4.0):
        super().__init__()
        self.wave, self.step = wave, 1.0 / 16
        self.register_buffer("basis", torch.randn(2, features))
        self.net = nn.Sequential(
            nn.Linear(2 * features, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1),
        )

    def field(self, x):
        angle = 2 * math.pi * x @ self.basis
        return self.net(torch.cat((angle.sin(), angle.cos()), dim=-1)).squeeze(-1)

    def forward(self, x, source):
        h = self.step
        shift = torch.tensor([[0.0, 0.0], [h, 0.0], [-h, 0.0], [0.0, h], [0.0, -h]], device=x.device)
        u = self.field(x.unsqueeze(0) + shift.unsqueeze(1))
        laplacian = (u[1:].sum(dim=0) - 4 * u[0]) / h**2
        residual = laplacian + self.wave**2 * u[0] - source
        return u[0], residual, residual.square().mean()


def FourierFeaturePde_inputs():
    return torch.rand(10000, 2), torch.randn(10000)


class DcnMixture(nn.Module):
    """DCN V2 with a mixture of four low-rank experts in each of three cross layers, gated by softmax."""

    def __init__(self, dim=429, rank=64, experts=4, layers=3):
        super().__init__()
        self.u = nn.Parameter(torch.randn(layers, experts, dim, rank) / rank**0.5)
        self.v = nn.Parameter(torch.randn(layers, experts, dim, rank) / dim**0.5)
        self.c = nn.Parameter(torch.randn(layers, experts, rank, rank) / rank**0.5)
        self.bias = nn.Parameter(torch.zeros(layers, dim))
        self.gates = nn.Linear(dim, experts, bias=False)
        self.head = nn.Linear(dim, 1)

    def forward(self, x0):
        x = x0
        for u, v, c, bias in zip(self.u, self.v, self.c, self.bias, strict=True):
            h = torch.tanh(torch.einsum("bd,edr->ber", x, v))
            h = torch.tanh(torch.einsum("ber,esr->bes", h, c))
            h = torch.einsum("ber,edr->bed", h, u)
            out = x0.unsqueeze(1) * (h + bias)
            gate = self.gates(x).softmax(dim=-1)
            x = torch.einsum("be,bed->bd", gate, out) + x
        return torch.sigmoid(self.head(x)).squeeze(-1)


def DcnMixture_inputs():
    return (torch.randn(4096, 429),)


class NBeats(nn.Module):
    """N-BEATS: a trend block of polynomials, a seasonal block of harmonics and a generic one, doubly residual."""

    def __init__(self, back=60, ahead=12, width=512, depth=3):
        super().__init__()
        t = torch.arange(-back, ahead).float() / ahead
        trend = torch.stack([t**p for p in range(3)]) / back
        waves = [f(2 * math.pi * i * t) for i in range(1, 7) for f in (torch.cos, torch.sin)]
        self.register_buffer("trend", trend)
        self.register_buffer("season", torch.stack(waves))
        self.back = back
        self.bodies, self.thetas = nn.ModuleList(), nn.ModuleList()
        for size in (3, 12, back + ahead):
            layers = []
            for i in range(depth):
                layers += [nn.Linear(back if i == 0 else width, width), nn.ReLU()]
            self.bodies.append(nn.Sequential(*layers))
            self.thetas.append(nn.Linear(width, size))

    def forward(self, x):
        level = x.abs().amax(dim=-1, keepdim=True).detach() + 1e-6
        rest, forecast = x / level, 0.0
        for body, theta, basis in zip(self.bodies, self.thetas, (self.trend, self.season, None), strict=True):
            out = theta(body(rest))
            out = out if basis is None else out @ basis
            rest = rest - out[:, : self.back]
            forecast = forecast + out[:, self.back :]
        return forecast * level, rest


def NBeats_inputs():
    return (torch.randn(4096, 60).cumsum(dim=-1),)


class TftVariableSelection(nn.Module):
    """Temporal fusion transformer: gated residual networks of each variable, weighted by one of all with a context."""

    def __init__(self, variables=7, dim=64):
        super().__init__()
        self.flat_in = nn.Linear(variables * dim, dim)
        self.flat_context = nn.Linear(dim, dim, bias=False)
        self.flat_mid = nn.Linear(dim, dim)
        self.flat_gate = nn.Linear(dim, 2 * variables)
        self.flat_skip = nn.Linear(variables * dim, variables)
        self.flat_norm = nn.LayerNorm(variables)
        self.w1 = nn.Parameter(torch.randn(variables, dim, dim) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(variables, dim, dim) / dim**0.5)
        self.wg = nn.Parameter(torch.randn(variables, dim, 2 * dim) / dim**0.5)
        self.b1, self.b2 = nn.Parameter(torch.zeros(variables, dim)), nn.Parameter(torch.zeros(variables, dim))
        self.bg = nn.Parameter(torch.zeros(variables, 2 * dim))
        self.norm_weight = nn.Parameter(torch.ones(variables, dim))
        self.norm_bias = nn.Parameter(torch.zeros(variables, dim))

    def forward(self, x, context):
        flat = x.flatten(2)
        h = F.elu(self.flat_in(flat) + self.flat_context(context).unsqueeze(1))
        h = F.glu(self.flat_gate(self.flat_mid(h)), dim=-1)
        weights = self.flat_norm(self.flat_skip(flat) + h).softmax(dim=-1)
        y = F.elu(torch.einsum("btvd,vde->btve", x, self.w1) + self.b1)
        y = torch.einsum("btvd,vde->btve", y, self.w2) + self.b2
        y = x + F.glu(torch.einsum("btvd,vde->btve", y, self.wg) + self.bg, dim=-1)
        y = F.layer_norm(y, y.shape[-1:]) * self.norm_weight + self.norm_bias
        return (weights.unsqueeze(-1) * y).sum(dim=2), weights


def TftVariableSelection_inputs():
    return torch.randn(64, 168, 7, 64), torch.randn(64, 64)


def prob_sparse_attention(q, k, v, sample):
    """Informer: queries measured on sampled keys, the 35 most active attend, the others take the mean value."""
    b, h, n, d = q.shape
    count = sample.shape[1]
    sampled = torch.einsum("bhqd,bhqsd->bhqs", q, k[:, :, sample])
    measure = sampled.amax(dim=-1) - sampled.sum(dim=-1) / n
    top = measure.topk(count, dim=-1).indices
    index = top.unsqueeze(-1).expand(-1, -1, -1, d)
    scores = q.gather(2, index) @ k.transpose(-1, -2) / math.sqrt(d)
    context = v.mean(dim=2, keepdim=True).expand(b, h, n, d)
    return context.scatter(2, index, scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


def prob_sparse_attention_inputs():
    q, k, v = (torch.randn(4, 8, 720, 64) for _ in range(3))
    return q, k, v, torch.randint(0, 720, (720, 35))


class GatV2Dense(nn.Module):
    """GATv2 on dense adjacency: attention applied after the nonlinearity of summed ends, four heads, residual."""

    def __init__(self, dim=64, heads=4, head_dim=32):
        super().__init__()
        self.heads = heads
        self.left = nn.Linear(dim, heads * head_dim)
        self.right = nn.Linear(dim, heads * head_dim)
        self.att = nn.Parameter(torch.randn(heads, head_dim) / head_dim**0.5)
        self.skip = nn.Linear(dim, heads * head_dim)
        self.to(torch.bfloat16)

    def forward(self, x, adj):
        source = self.left(x).unflatten(-1, (self.heads, -1))
        target = self.right(x).unflatten(-1, (self.heads, -1))
        pair = F.leaky_relu(target.unsqueeze(2) + source.unsqueeze(1), 0.2)
        score = (pair * self.att).sum(dim=-1).float()
        score = score.masked_fill(~adj.unsqueeze(-1), float("-inf"))
        alpha = score.softmax(dim=2).to(x.dtype)
        out = torch.einsum("bijh,bjhd->bihd", alpha, source)
        return F.elu(out.flatten(2) + self.skip(x))


def GatV2Dense_inputs():
    adj = (torch.rand(4, 250, 250) < 0.05) | torch.eye(250, dtype=torch.bool)
    return torch.randn(4, 250, 64, dtype=torch.bfloat16), adj


class SchNetInteraction(nn.Module):
    """SchNet: filters from Gaussians of distances with a cosine cutoff, convolution over atoms, shifted softplus."""

    def __init__(self, dim=128, gaussians=50, cutoff=6.0):
        super().__init__()
        self.cutoff = cutoff
        self.register_buffer("centres", torch.linspace(0.0, cutoff, gaussians))
        self.filter1, self.filter2 = nn.Linear(gaussians, dim), nn.Linear(dim, dim)
        self.inner = nn.Linear(dim, dim, bias=False)
        self.out1, self.out2 = nn.Linear(dim, dim), nn.Linear(dim, dim)

    @staticmethod
    def activate(x):
        return F.softplus(x) - math.log(2.0)

    def forward(self, x, pos, present):
        n = pos.shape[1]
        delta = pos.unsqueeze(2) - pos.unsqueeze(1)
        dist = torch.sqrt(delta.square().sum(dim=-1) + 1e-8)
        gap = self.cutoff / (self.centres.shape[0] - 1)
        rbf = torch.exp(-0.5 / gap**2 * (dist.unsqueeze(-1) - self.centres) ** 2)
        cut = 0.5 * (torch.cos(dist * (math.pi / self.cutoff)) + 1.0) * (dist < self.cutoff)
        other = ~torch.eye(n, dtype=torch.bool, device=x.device)
        pairs = present.unsqueeze(2) & present.unsqueeze(1) & other
        w = self.filter2(self.activate(self.filter1(rbf))) * (cut * pairs).unsqueeze(-1)
        y = (self.inner(x).unsqueeze(1) * w).sum(dim=2)
        return x + self.out2(self.activate(self.out1(y)))


def SchNetInteraction_inputs():
    present = torch.arange(60)[None, :] < torch.randint(20, 61, (16, 1))
    return torch.randn(16, 60, 128), torch.randn(16, 60, 3) * 3.0, present


class RevInDLinear(nn.Module):
    """DLinear with reversible instance norm: trend by a moving mean, two linear maps to 96 steps, denormalised."""

    def __init__(self, back=336, ahead=96, channels=321, window=25):
        super().__init__()
        self.window = window
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.seasonal, self.trend = nn.Linear(back, ahead), nn.Linear(back, ahead)

    def forward(self, x):
        mean = x.mean(dim=1, keepdim=True).detach()
        std = torch.sqrt(x.var(dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
        y = ((x - mean) / std * self.weight + self.bias).transpose(1, 2)
        half = (self.window - 1) // 2
        trend = F.avg_pool1d(F.pad(y, (half, half), mode="replicate"), self.window, stride=1)
        out = (self.seasonal(y - trend) + self.trend(trend)).transpose(1, 2)
        return (out - self.bias) / (self.weight + 1e-10) * std + mean


def RevInDLinear_inputs():
    return (torch.randn(32, 336, 321).cumsum(dim=1) * 0.1,)
