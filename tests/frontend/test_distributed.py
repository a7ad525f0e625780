"""Two processes train one model, wrapped by DDP or FSDP2 in every order: its parameters are those of one process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tilefold.errors import UnsupportedError
from tilefold.frontend.fuse import fuse

PROCESSES, STEPS, WIDTH = 2, 3, 8
#: Kernels do not know of processes; two ways have them all the same.
slow = functools.partial(fuse, runner="interpreter")
SLOW = {"runner": "interpreter", "leftover": "eager"}


@slow
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


class Block(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], wrap: Callable[[nn.Module], nn.Module]):
        super().__init__()
        self.attention, self.qkv = function, nn.Linear(WIDTH, 3 * WIDTH)
        self.last = wrap(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.attention(*self.qkv(x).chunk(3, -1)))


def model(function: Callable[..., torch.Tensor] = attention.fn, wrap: Callable[[nn.Module], nn.Module] = lambda m: m):
    """With parts that are fused, if such are given."""
    torch.manual_seed(0)
    return nn.Sequential(Block(function, wrap), Block(function, wrap), nn.Linear(WIDTH, WIDTH))


def in_parts() -> nn.Module:
    return model(attention, slow)


def compiled(m: nn.Module) -> nn.Module:
    return torch.compile(m, backend="tilefold", options=SLOW)


def ddp(m: nn.Module) -> nn.Module:
    """With several buckets of gradients, at which Dynamo cuts graphs."""
    return DistributedDataParallel(m, bucket_cap_mb=0.001)


def sharded(m: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for k in (0, 1):
        fully_shard(m[k], mesh=mesh)
    return fully_shard(m, mesh=mesh)


def blocks_compiled(m: nn.Module, **how: Any) -> nn.Module:
    for k in (0, 1):
        m[k].compile(backend="tilefold", **how)
    return m


WAYS: Mapping[str, Callable[[DeviceMesh], nn.Module]] = {
    "ddp(fused parts)": lambda mesh: ddp(in_parts()),
    "ddp(fused)": lambda mesh: ddp(slow(model())),
    "ddp(compiled)": lambda mesh: ddp(compiled(model())),
    "compiled(ddp)": lambda mesh: compiled(ddp(model())),
    "compiled(ddp(fused parts))": lambda mesh: compiled(ddp(in_parts())),
    "fsdp(fused parts)": lambda mesh: sharded(in_parts(), mesh),
    "fsdp(fused)": lambda mesh: fully_shard(slow(model()), mesh=mesh),
    "fused(fsdp)": lambda mesh: slow(fully_shard(model(), mesh=mesh)),
    "fsdp(compiled)": lambda mesh: fully_shard(compiled(model()), mesh=mesh),
    "compiled(fsdp)": lambda mesh: compiled(sharded(model(), mesh)),
    "compiled(fsdp(fused parts))": lambda mesh: compiled(sharded(in_parts(), mesh)),
    "fsdp(blocks compiled)": lambda mesh: sharded(blocks_compiled(model(), options=SLOW), mesh),
    "ddp(fused), kernels": lambda mesh: ddp(fuse(model())),
    "fsdp(fused parts), kernels": lambda mesh: sharded(model(fuse(attention.fn), fuse), mesh),
    "compiled blocks(fsdp)": lambda mesh: blocks_compiled(sharded(model(), mesh), options=SLOW),
    "fused(fsdp in parts)": lambda mesh: slow(sharded(model(), mesh)),
}
REFUSED = {
    "fused(fsdp in parts)": "part 0 is sharded by fully_shard, and what gathers its parameters cannot be captured"
}


def trained(m: nn.Module, ranks: range) -> list[torch.Tensor]:
    """Parameters after some steps on the batches of processes."""
    optimiser = torch.optim.SGD(m.parameters(), 0.1)
    for step in range(STEPS):
        for rank in ranks:
            x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            (m(x).square().mean() / len(ranks)).backward()
        optimiser.step()
        optimiser.zero_grad()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in m.parameters()]


def work(rank: int, folder: str) -> None:
    """One process: how far each way is from one process, or its error."""
    torch.set_num_threads(1)
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1000  # else Dynamo cuts models of a MB and more
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    want = trained(model(), range(PROCESSES))
    found: dict[str, object] = {}
    for name, way in WAYS.items():
        torch._dynamo.reset()
        try:
            got = trained(way(mesh), range(rank, rank + 1))
            found[name] = max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))
        except UnsupportedError as err:  # in every process, or the others would wait for this one
            found[name] = str(err)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, object]]:
    """What each process found."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=PROCESSES)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.slow
@pytest.mark.parametrize("way", [w for w in WAYS if w not in REFUSED])
def test_processes_train_as_one_does(way, found):
    for each in found:
        assert isinstance(each[way], float) and each[way] < 1e-5, each[way]


@pytest.mark.slow
@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_be_captured_is_said(way, found):
    for each in found:
        assert REFUSED[way] in str(each[way]) and "hint: fuse what is sharded" in str(each[way])


def test_the_comparison_can_fail():
    one, both = trained(model(), range(1)), trained(model(), range(PROCESSES))
    assert max(float((a - b).abs().max()) for a, b in zip(one, both, strict=True)) > 1e-3
