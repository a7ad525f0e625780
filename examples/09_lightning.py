"""A compiled model under Lightning's Trainer: the network is compiled, the LightningModule stays plain Python."""

import copy
import logging
import warnings

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning
except ImportError:
    lightning = None


class Net(nn.Module):
    """A classifier of vectors, [N, 16] -> logits [N, 4]."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.gelu(self.norm(self.first(x))))


def training(net: nn.Module) -> "lightning.LightningModule":
    """The network with its loss and optimizer, as Lightning wants them."""

    class Training(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = net, []

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Training()


def main() -> None:
    if lightning is None:
        print("lightning is not installed: pip install lightning")
        return
    warnings.filterwarnings("ignore", module="lightning")  # of workers and progress bars
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    data, net = TensorDataset(x, x[:, :4].argmax(1)), Net()
    eager, fused = training(copy.deepcopy(net)), training(torch.compile(net, backend="tilefold"))
    for module in (eager, fused):
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = lightning.Trainer(max_epochs=2, accelerator="auto", devices=1, gradient_clip_val=1.0, **quiet)
        trainer.fit(module, DataLoader(data, batch_size=32))
    print("losses in eager mode ", *(f"{x:.5f}" for x in eager.losses[::4]))
    print("losses with Tilefold ", *(f"{x:.5f}" for x in fused.losses[::4]))
    assert max(abs(a - b) for a, b in zip(eager.losses, fused.losses, strict=True)) < 1e-3
    assert fused.losses[-1] < fused.losses[0]


if __name__ == "__main__":
    main()
