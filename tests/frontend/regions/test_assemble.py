"""What becomes a region, and what stays PyTorch's because no kernel could run it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilefold.frontend.regions.assemble import constant_elsewhere
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
