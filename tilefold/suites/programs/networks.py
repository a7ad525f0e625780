"""Networks as modules: multilayer perceptrons, recurrent cells, convolutional networks, blocks of transformers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from tilefold.suites.programs.program import Draw, Program, bf, f32, ints

BF16 = torch.bfloat16


def _p(
    family: str, name: str, module: Callable[[bool], nn.Module], large: tuple[Draw, ...], small: tuple[Draw, ...]
) -> Program:
    return Program(f"{family}: {name}", family, large, small, module=module)


def _mlp(*widths: int, act: Callable[[], nn.Module] = nn.GELU) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class NormedMlp(nn.Module):
    """Residual blocks of layer norm and two linear maps."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Mixer(nn.Module):
    """Tokens and channels mixed in turn, [B, T, C]."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = _mlp(tokens, 2 * tokens, tokens), _mlp(width, 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Recommender(nn.Module):
    """Embeddings of several tables, their pairs' products, and a perceptron."""

    def __init__(self, tables: int, entries: int, width: int):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(entries, width) for _ in range(tables))
        self.bottom, self.top = _mlp(13, 64, width, act=nn.ReLU), _mlp(width + (tables + 1) ** 2, 64, 1, act=nn.ReLU)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        d = self.bottom(x)
        e = torch.stack([d, *(t(tokens[:, n]) for n, t in enumerate(self.tables))], 1)
        return torch.sigmoid(self.top(torch.cat((d, (e @ e.transpose(1, 2)).flatten(1)), 1)))


class Steps(nn.Module):
    """A cell over a few steps of a sequence [B, T, C], unrolled."""

    def __init__(self, cell: nn.RNNCellBase):
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.cell.hidden_size)
        c = h
        for t in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(x[:, t], (h, c))
            else:
                h = self.cell(x[:, t], h)
        return h


class MinimalGated(nn.Module):
    """A gated recurrence, written out: z = sigmoid(W [x, h]), h = (1 - z) h + z tanh(V [x, z h])."""

    def __init__(self, width: int):
        super().__init__()
        self.gate, self.new = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        for t in range(x.shape[1]):
            z = torch.sigmoid(self.gate(torch.cat((x[:, t], h), -1)))
            h = (1 - z) * h + z * torch.tanh(self.new(torch.cat((x[:, t], z * h), -1)))
        return h


def _conv(a: int, b: int, k: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(a, b, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
    )


class Residual(nn.Module):
    """Two 3x3 convolutions around an identity."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = _conv(width, width, 3), nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.second(self.first(x))))


class Inverted(nn.Module):
    """A wide depthwise convolution between two narrow products, with squeeze and excitation."""

    def __init__(self, width: int, factor: int = 4):
        super().__init__()
        wide = width * factor
        self.grow, self.deep = _conv(width, wide, 1), _conv(wide, wide, 3, groups=wide)
        self.squeeze, self.excite = nn.Conv2d(wide, width // 4, 1), nn.Conv2d(width // 4, wide, 1)
        self.shrink, self.norm = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.deep(self.grow(x))
        s = torch.sigmoid(self.excite(f.silu(self.squeeze(h.mean((2, 3), keepdim=True)))))
        return x + self.norm(self.shrink(h * s))


class ConvNext(nn.Module):
    """A depthwise 7x7 convolution, layer norm of channels, and a perceptron."""

    def __init__(self, width: int):
        super().__init__()
        self.deep, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.mlp, self.scale = _mlp(width, 4 * width, width), nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.scale * self.mlp(self.norm(self.deep(x).permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)


class Unet(nn.Module):
    """One level down and up again."""

    def __init__(self, width: int):
        super().__init__()
        self.enter, self.low, self.leave = _conv(3, width, 3), _conv(width, 2 * width, 3), _conv(3 * width, width, 3)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.enter(x)
        b = f.interpolate(self.low(f.max_pool2d(a, 2)), scale_factor=2, mode="nearest")
        return self.out(self.leave(torch.cat((a, b), 1)))


def classifier(width: int) -> nn.Module:
    return nn.Sequential(
        _conv(3, width, 3, 2), Residual(width), _conv(width, 2 * width, 3, 2), Residual(2 * width),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 100),
    )  # fmt: skip


def small_vgg(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def autoencoder(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2), nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


PERCEPTRONS = (
    _p("mlps", "three layers", lambda big: _mlp(*((1024, 4096, 4096, 256) if big else (8, 16, 16, 4))).to(BF16),
       (bf(2048, 1024),), (bf(5, 8),)),
    _p("mlps", "three layers, float32", lambda big: _mlp(*((256, 512, 512, 10) if big else (8, 16, 16, 4)),
       act=nn.ReLU),
       (f32(8192, 256),), (f32(5, 8),)),
    _p("mlps", "eight narrow layers", lambda big: _mlp(*(9 * (64,) if big else 5 * (8,)), act=nn.Tanh),
       (f32(65536, 64),), (f32(5, 8),)),
    _p("mlps", "64 rows", lambda big: _mlp(*((4096, 16384, 4096) if big else (8, 16, 8))).to(BF16),
       (bf(64, 4096),), (bf(5, 8),)),
    _p("mlps", "normed blocks", lambda big: NormedMlp(1024 if big else 8, 2).to(BF16), (bf(4096, 1024),), (bf(5, 8),)),
    _p("mlps", "mixer", lambda big: Mixer(*((196, 512) if big else (6, 8))).to(BF16), (bf(64, 196, 512),), (bf(2, 6,
       8),)),
    _p("mlps", "recommender", lambda big: Recommender(*((16, 100000, 64) if big else (3, 20, 8))),
       (f32(8192, 13), ints(8192, 16, high=100000)), (f32(5, 13), ints(5, 3, high=20))),
)  # fmt: skip

RECURRENT = (
    _p("recurrent", "LSTM cell", lambda big: Steps(nn.LSTMCell(*((512, 512) if big else (6, 8)))),
       (f32(256, 8, 512),), (f32(3, 4, 6),)),
    _p("recurrent", "GRU cell", lambda big: Steps(nn.GRUCell(*((512, 512) if big else (6, 8)))),
       (f32(256, 8, 512),), (f32(3, 4, 6),)),
    _p("recurrent", "RNN cell", lambda big: Steps(nn.RNNCell(*((512, 512) if big else (6, 8)))),
       (f32(256, 8, 512),), (f32(3, 4, 6),)),
    _p("recurrent", "written out, bf16", lambda big: MinimalGated(1024 if big else 8).to(BF16),
       (bf(256, 6, 1024), bf(256, 1024)), (bf(3, 4, 8), bf(3, 8))),
    _p("recurrent", "LSTM module", lambda big: _First(nn.LSTM(*((256, 256) if big else (6, 8)), batch_first=True)),
       (f32(64, 16, 256),), (f32(3, 4, 6),)),
)  # fmt: skip


class _First(nn.Module):
    """The first of a module's results."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        first: Tensor = self.inner(*args)[0]
        return first


CONVOLUTIONAL = (
    _p("cnns", "residual classifier", lambda big: classifier(64 if big else 4), (f32(64, 3, 64, 64),), (f32(2, 3, 8,
       8),)),
    _p("cnns", "residual block, bf16", lambda big: Residual(128 if big else 4).to(BF16), (bf(32, 128, 28, 28),),
       (bf(2, 4, 6, 5),)),
    _p("cnns", "inverted bottleneck", lambda big: Inverted(64 if big else 8).to(BF16), (bf(32, 64, 28, 28),),
       (bf(2, 8, 6, 5),)),
    _p("cnns", "ConvNeXt block", lambda big: ConvNext(96 if big else 8).to(BF16), (bf(32, 96, 56, 56),), (bf(2, 8, 6,
       5),)),
    _p("cnns", "U-Net level", lambda big: Unet(32 if big else 4), (f32(8, 3, 128, 128),), (f32(1, 3, 8, 6),)),
    _p("cnns", "plain, pooled", lambda big: small_vgg(32 if big else 4), (f32(64, 3, 64, 64),), (f32(2, 3, 16, 16),)),
    _p("cnns", "autoencoder", lambda big: autoencoder(32 if big else 4), (f32(32, 3, 64, 64),), (f32(2, 3, 8, 8),)),
)  # fmt: skip
