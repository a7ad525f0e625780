"""Networks of images in float32: blocks of known architectures, and convolutions with chains of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from tilefold.suites.programs.program import Draw, Program, f32


def _n(name: str, module: Callable[[bool], nn.Module], large: Draw, small: Draw) -> Program:
    return Program(f"cnns: {name}", "cnns", (large,), (small,), module=module)


def _c(name: str, fn: Callable[..., Any], large: tuple[Draw, ...], small: tuple[Draw, ...]) -> Program:
    return Program(f"convolution: {name}", "convolutions", large, small, fn)


def _conv(a: int, b: int, k: int, stride: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(b), act())


class Bottleneck(nn.Module):
    """ResNet's: a 3x3 convolution between two of one tap."""

    def __init__(self, wide: int, narrow: int):
        super().__init__()
        self.body = nn.Sequential(
            _conv(wide, narrow, 1), _conv(narrow, narrow, 3), _conv(narrow, wide, 1, act=nn.Identity)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + x)


class Shuffled(nn.Module):
    """ShuffleNet's: channels in groups, shuffled between two convolutions of them."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        narrow = width // 2
        self.groups, self.first = groups, _conv(width, narrow, 1, groups=groups)
        self.deep = _conv(narrow, narrow, 3, groups=narrow, act=nn.Identity)
        self.last = _conv(narrow, width, 1, groups=groups, act=nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)
        return torch.relu(self.last(self.deep(y)) + x)


class Excited(nn.Module):
    """EfficientNet's: a wide depthwise convolution, squeezed, excited and swished."""

    def __init__(self, width: int, kernel: int):
        super().__init__()
        wide = 6 * width
        self.grow, self.deep = _conv(width, wide, 1, act=nn.SiLU), _conv(wide, wide, kernel, groups=wide, act=nn.SiLU)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, width // 4, 1), nn.SiLU(), nn.Conv2d(width // 4, wide, 1)
        )
        self.shrink = _conv(wide, width, 1, act=nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(self.grow(x))
        return x + self.shrink(y * torch.sigmoid(self.gate(y)))


class Branches(nn.Module):
    """Inception's: four ways side by side."""

    def __init__(self, width: int, part: int):
        super().__init__()
        self.one = nn.Conv2d(width, part, 1)
        self.three = nn.Sequential(nn.Conv2d(width, part, 1), nn.Conv2d(part, 2 * part, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(width, part // 2, 1), nn.Conv2d(part // 2, part, 5, padding=2))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(width, part, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


class Upward(nn.Module):
    """A U-Net's last level: blocks of a transposed convolution beside what they came from."""

    def __init__(self, width: int):
        super().__init__()
        self.enter, self.low = _conv(3, width, 3), _conv(width, 2 * width, 3)
        self.up, self.leave = nn.ConvTranspose2d(2 * width, width, 2, 2), _conv(2 * width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        out: Tensor = self.leave(torch.cat([self.up(self.low(f.max_pool2d(y, 2))), y], 1))
        return out


def generator(width: int) -> nn.Module:
    """DCGAN's: transposed convolutions whose windows overlap."""
    layers: list[nn.Module] = []
    for a in (8 * width, 4 * width, 2 * width):
        layers += [nn.ConvTranspose2d(a, a // 2, 4, 2, 1, bias=False), nn.BatchNorm2d(a // 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())


def flattened(width: int, inner: int) -> nn.Module:
    """A convolution, and layers that read its image as one row."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(49 * width, inner), nn.ReLU(), nn.Linear(inner, 100),
    )  # fmt: skip


def _turned(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return f.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1)


NETWORKS = (
    _n("bottlenecks", lambda big: nn.Sequential(*(Bottleneck(*((512, 128) if big else (8, 4))) for _ in range(2))),
       f32(16, 512, 28, 28), f32(2, 8, 5, 6)),
    _n("shuffled groups", lambda big: Shuffled(*((240, 3) if big else (12, 3))), f32(16, 240, 56, 56),
       f32(2, 12, 5, 6)),
    _n("swished and excited", lambda big: Excited(*((40, 5) if big else (4, 3))), f32(16, 40, 56, 56), f32(2, 4, 5, 6)),
    _n("four branches", lambda big: Branches(*((256, 64) if big else (4, 4))), f32(16, 256, 28, 28), f32(2, 4, 5, 6)),
    _n("blocks beside their source", lambda big: Upward(32 if big else 4), f32(8, 3, 128, 128), f32(1, 3, 8, 6)),
    _n("generator", lambda big: generator(64 if big else 2), f32(32, 512, 4, 4), f32(2, 16, 2, 2)),
    _n("image as a row", lambda big: flattened(*((256, 2048) if big else (4, 6))), f32(8, 3, 56, 56),
       f32(2, 3, 56, 56)),
)  # fmt: skip

CHAINS = (
    _c("transposed, clamped, scaled", lambda x, w, b: torch.clamp(torch.clamp(_turned(x, w, b), 0, 1) * 2, 0, 1) / 2,
       (f32(16, 64, 64, 64), f32(64, 64, 3, 3, scale=0.04), f32(64)), (f32(2, 4, 5, 6), f32(4, 6, 3, 3), f32(6))),
    _c("transposed, softmax of channels", lambda x, w, b: torch.sigmoid(2 * f.softmax(_turned(x, w, b), 1)),
       (f32(16, 64, 64, 64), f32(64, 64, 3, 3, scale=0.04), f32(64)), (f32(2, 4, 5, 6), f32(4, 6, 3, 3), f32(6))),
    _c("transposed, mean, log-sum-exp", lambda x, w, b: torch.logsumexp(_turned(x, w, b).mean((2, 3)), 1),
       (f32(16, 64, 64, 64), f32(64, 64, 3, 3, scale=0.04), f32(64)), (f32(2, 4, 5, 6), f32(4, 6, 3, 3), f32(6))),
    _c("3x3 in groups, Mish", lambda x, w, b: f.mish(f.conv2d(x, w, b, padding=1, groups=4)),
       (f32(16, 64, 64, 64), f32(128, 16, 3, 3, scale=0.08), f32(128)), (f32(2, 8, 5, 6), f32(12, 2, 3, 3), f32(12))),
)  # fmt: skip
