"""A model with torch.compile(backend="tilefold"), for inference at many lengths and for training.

In automatic use what Tilefold does not cover runs through PyTorch's own compiler, and the log says why.
"""

import copy

import torch
from torch import nn


class Block(nn.Module):
    """One pre-norm transformer layer with a gated feed-forward network. x: [B, S, width]."""

    def __init__(self, width: int = 64, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 128), nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, w))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def main() -> None:
    torch.manual_seed(0)
    model = Block()
    fast = torch.compile(copy.deepcopy(model), backend="tilefold", dynamic=True)

    with torch.no_grad():
        for length in (17, 64, 100, 255):
            x = torch.randn(2, length, 64)
            error = (fast(x) - model(x)).abs().max()
            print(f"length {length}: max difference to eager {error:.1e}")
            assert error < 1e-5

    x, target = torch.randn(2, 2, 50, 64)
    gradients = []
    for m in (model, fast):
        loss = nn.functional.mse_loss(m(x), target)
        loss.backward()
        gradients.append([p.grad for p in m.parameters()])
    worst = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*gradients, strict=True))
    print(f"training step: worst relative difference of a gradient {worst:.1e}")
    assert worst < 1e-4


if __name__ == "__main__":
    main()
