"""Two processes train one model under FSDP2, save it in parts, and go on from what was saved. CPUs talk by gloo.

`python examples/11_two_processes.py` starts both, as does
`torchrun --nproc-per-node 2 examples/11_two_processes.py`.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun

import tilefold

WIDTH, ROWS = 32, 64


@tilefold.fuse
def gated(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """A gate and a norm of its rows, fused with each other: [rows, width] each."""
    y = torch.nn.functional.silu(g) * x
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)


class Net(nn.Module):
    """[rows, 32] -> [rows, 32]."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(gated(*self.first(x).chunk(2, -1)))


def made(mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model and its optimizer, of the same numbers in every process."""
    torch.manual_seed(0)
    model = fully_shard(Net(), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of steps, each on this process's own rows, with the mean over processes."""
    losses = []
    for step in steps:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def work() -> None:
    """One process."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    folder = os.path.join(os.environ.get("CHECKPOINTS", "checkpoints"), "step10")

    model, optimizer = made(mesh)
    train(model, optimizer, range(10))
    parameters, moments = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": moments}, checkpoint_id=folder)  # each process its shards
    through = train(model, optimizer, range(10, 20))

    again, other = made(mesh)
    parameters, moments = get_state_dict(again, other)
    dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(again, other, model_state_dict=parameters, optim_state_dict=moments)
    resumed = train(again, other, range(10, 20))
    if dist.get_rank() == 0:
        print("losses without a stop", *(f"{x:.5f}" for x in through[::3]))
        print("losses after loading ", *(f"{x:.5f}" for x in resumed[::3]))
        assert through == resumed and resumed[-1] < through[0]
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        work()
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CHECKPOINTS"] = folder
        torchrun(["--standalone", "--nproc-per-node", "2", sys.argv[0]])


if __name__ == "__main__":
    main()
