"""A compiled model in a training loop of Hugging Face's Accelerate: it is a module like any other."""

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

try:
    import accelerate
except ImportError:
    accelerate = None


class Net(nn.Module):
    """A classifier of vectors, [N, 16] -> logits [N, 4]."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.gelu(self.norm(self.first(x))))


def train(model: nn.Module, data: TensorDataset) -> list[float]:
    """The loss of each step."""
    runner = accelerate.Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches = runner.prepare(model, optimizer, DataLoader(data, batch_size=32))
    losses = []
    for x, y in batches:
        with runner.accumulate(model):
            loss = functional.cross_entropy(model(x), y)
            runner.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    if accelerate is None:
        print("accelerate is not installed: pip install accelerate")
        return
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    model = Net()
    fast = torch.compile(copy.deepcopy(model), backend="tilefold")
    eager, fused = train(model, data), train(fast, data)
    print("losses in eager mode ", *(f"{x:.5f}" for x in eager))
    print("losses with Tilefold ", *(f"{x:.5f}" for x in fused))
    assert max(abs(a - b) for a, b in zip(eager, fused, strict=True)) < 1e-4
    assert fused[-1] < fused[0]


if __name__ == "__main__":
    main()
