"""A small decoder of bytes and the text that it learns: RMSNorm, rotary positions, causal attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilefold.errors import TilefoldError

VOCABULARY = 256
_PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Sizes:
    """`layers` layers of `heads` heads over `width` columns; batches of `batch` windows of `length` bytes."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int


#: For CPUs, and for GPUs.
SMALL, BIG = Sizes(2, 64, 4, 8, 96), Sizes(4, 512, 8, 16, 512)


class Layer(nn.Module):
    """x: [batch, length, width] -> the same."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width, self.heads = sizes.width, sizes.heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.joint, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        joint = self.joint(self.before(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3)
        q, k, v = joint.unbind(2)
        scores = _turned(q, cos, sin) @ _turned(k, cos, sin).transpose(-1, -2) / q.shape[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        seen = torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ v
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """tokens: [batch, length + 1] of bytes -> the mean cross-entropy of each byte after those before it, in nats."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, VOCABULARY, bias=False)
        half = sizes.width // sizes.heads // 2
        angles = torch.outer(torch.arange(sizes.length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): x [.., length, d] by angles [length, d / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def text(folder: Path = _PACKAGE) -> Tensor:
    """The bytes of all Python files below a folder, [N] of int64: without one given those of this package, which are
    there wherever it runs. TilefoldError if there is nothing."""
    files = sorted(folder.rglob("*.py"))
    joint = b"\n".join(path.read_bytes() for path in files)
    if not joint:
        raise TilefoldError(f"there is no text to train on in {folder}", hint="a folder with Python files in it")
    return torch.frombuffer(bytearray(joint), dtype=torch.uint8).long()


def batches(joint: Tensor, sizes: Sizes, steps: int, seed: int = 0) -> Tensor:
    """Windows of a text drawn at random: [steps, batch, length + 1]."""
    drawn = torch.Generator().manual_seed(seed)
    first = torch.randint(len(joint) - sizes.length, (steps, sizes.batch, 1), generator=drawn)
    return joint[first + torch.arange(sizes.length + 1)]
