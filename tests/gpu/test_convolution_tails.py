"""Blocks of image networks in inference: batch norm, residual and activation in the library's call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tilefold.frontend.regions.assemble import compilations
from tilefold.runtime.convolution import ConvolutionStep

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    """ResNet's, with statistics that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(256, 64, 1), nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 256, 1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(n) for n in (64, 64, 256)])
        for n in self.norms:
            nn.init.uniform_(n.running_var, 0.5, 2)
            nn.init.uniform_(n.weight, 0.5, 2)
            nn.init.normal_(n.running_mean)
            nn.init.normal_(n.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.convs[0](x)))
        y = torch.relu(self.norms[1](self.convs[1](y)))
        return torch.relu(self.norms[2](self.convs[2](y)) + x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_block_is_three_calls(dtype, cuda):
    torch._dynamo.reset()
    compilations.clear()
    torch.manual_seed(0)
    block = Block().cuda().eval()
    x = torch.randn(32, 256, 56, 56, device="cuda").to(memory_format=torch.channels_last)
    narrow = copy.deepcopy(block).to(dtype)
    exact = copy.deepcopy(narrow).double()
    with torch.no_grad():
        compiled = torch.compile(narrow, backend="tilefold", dynamic=False)
        got, eager = (f(x.to(dtype)) for f in (compiled, narrow))
        want = exact(x.to(dtype).double())
        assert (got - want).norm() <= 1.5 * (eager - want).norm()
        x[3, 5, 7, 9] = torch.nan
        assert torch.equal(compiled(x.to(dtype)).isnan(), narrow(x.to(dtype)).isnan())
    steps = [s for c in compilations for r in c.regions for s in r.runner.steps]  # type: ignore[attr-defined]
    assert sum(isinstance(s, ConvolutionStep) and s.tail is not None for s in steps) == 3
