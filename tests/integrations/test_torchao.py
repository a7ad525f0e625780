"""Linears whose weights are int8 or fp8 (weight-only quantisation), as torchao stores them: fused, and right.

torchao multiplies by the narrow weights, then by a scale of each output (int8), or widens and scales the weights first
(fp8). Where it is not installed, the same is written out.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from tilefold.explanation.report import explain


class Net(nn.Module):
    """A norm, two linears with an activation between them, a residual; [N, 64] -> [N, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x + self.down(functional.silu(self.up(n)))


class Written(nn.Module):
    """A linear of narrow weights [O, I] and scales [O, 1], as torchao's tensors compute it."""

    def __init__(self, of: nn.Linear, narrow: torch.dtype):
        super().__init__()
        w = of.weight.detach().float()
        top = 127.0 if narrow is torch.int8 else torch.finfo(narrow).max
        scale = w.abs().amax(1, keepdim=True) / top
        held = (w / scale).round() if narrow is torch.int8 else w / scale
        self.register_buffer("held", held.to(narrow))
        self.register_buffer("scale", scale.to(of.weight.dtype))
        self.bias = of.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.held.dtype is torch.int8:
            y = x @ self.held.to(x.dtype).t() * self.scale.t()
        else:
            y = x @ (self.held.to(x.dtype) * self.scale).t()
        return y + self.bias


def written(model: Net, narrow: torch.dtype) -> Net:
    model.up, model.down = Written(model.up, narrow), Written(model.down, narrow)  # type: ignore[assignment]
    return model


def exact(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In float64, with the weights that the narrow ones stand for."""
    wide = Net().double()
    for mine, other in ((wide.up, model.up), (wide.down, model.down)):
        if isinstance(other, Written):
            weight = other.held.double() * other.scale.double()
        else:
            weight = other.weight.dequantize(torch.float32)  # exact: 8 bits by 8
        mine.weight.data, mine.bias.data = weight.double(), other.bias.double()
    return wide(x.double())


def agrees(model: nn.Module, dtype: torch.dtype) -> None:
    """As right as in eager mode, and nothing left to run there."""
    x = torch.randn(7, 64, dtype=dtype)
    fused = torch.compile(model, backend="tilefold", fullgraph=True)
    with torch.no_grad():
        want, eager, got = exact(model, x), model(x), fused(x)
    own = (eager.double() - want).abs().max()
    assert (got.double() - want).abs().max() <= 2 * own + 1e-6 * want.abs().max()
    assert own < (0.05 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("narrow", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights_as_torchao_computes_with_them(narrow, dtype):
    torch.manual_seed(0)
    model = written(Net().to(dtype), narrow).eval()
    agrees(model, dtype)


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_models_that_torchao_quantised(config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of extensions that were built for others
        quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16).eval()
    quantization.quantize_(model, getattr(quantization, config)())
    assert type(model.up.weight) is not nn.Parameter
    agrees(model, torch.bfloat16)


def test_narrow_weights_are_widened_in_the_kernel():
    """No wide weights are written or read: the kernel moves less than they alone would."""
    torch.manual_seed(0)
    layer = Written(nn.Linear(64, 128), torch.int8)
    with torch.no_grad():
        report = explain(layer, torch.randn(7, 64))
        wide = explain(nn.Linear(64, 128), torch.randn(7, 64))
    assert len(report.kernels) == 1
    assert report.traffic.after < 4 * 64 * 128 < wide.traffic.after
