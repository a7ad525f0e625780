"""What becomes a region, and what stays PyTorch's because no kernel could run it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilefold.errors import UnsupportedError
from tilefold.frontend.regions.devices import constant_elsewhere, device_of, numbers_elsewhere
from tilefold.frontend.regions.partition import Extracted


def part(device: str, *, reads: bool) -> Extracted:
    """A graph of one operator: a ramp, added to a tensor if it reads one."""
    g = torch.fx.Graph()
    with FakeTensorMode():
        made = torch.empty(4, device=device)
    x = g.placeholder("x")
    x.meta["val"] = made
    y = g.call_function(torch.ops.aten.exp.default, (x,))
    y.meta["val"] = made
    g.output((y,))
    return Extracted(torch.fx.GraphModule({}, g), (x,) if reads else (), (y,))


@pytest.mark.parametrize(
    ("device", "reads", "left"), [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_constants_of_another_device_are_no_region(device, reads, left):
    assert constant_elsewhere(part(device, reads=reads)) is left


def mixed(shape: tuple[int, ...], result: str) -> Extracted:
    """A graph that adds a tensor of the CPU to one of a GPU."""
    g = torch.fx.Graph()
    with FakeTensorMode():
        x, s, y = g.placeholder("x"), g.placeholder("s"), None
        x.meta["val"], s.meta["val"] = torch.empty(4, device="cuda"), torch.empty(shape, dtype=torch.float64)
        y = g.call_function(torch.ops.aten.add.Tensor, (x, s))
        y.meta["val"] = torch.empty(4, device=result)
    g.output((y,))
    return Extracted(torch.fx.GraphModule({}, g), (x, s), (y,))


def test_numbers_of_the_host_move_to_the_device_of_a_region():
    part = mixed((), "cuda")
    assert {n.name: d.type for n, d in numbers_elsewhere(part).items()} == {"s": "cuda"}
    assert device_of(part) == "cuda"


@pytest.mark.parametrize(("shape", "result"), [((4,), "cuda"), ((), "cpu")])
def test_tensors_of_two_devices_are_no_region(shape, result):
    with pytest.raises(UnsupportedError, match="in one region"):
        device_of(mixed(shape, result))
