"""Joint graphs: names, gradients, and agreement with eager PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilefold.errors import UnsupportedError
from tilefold.frontend.capture.joint import capture, in_float64
from tilefold.frontend.regions.execute import interpreted


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.RMSNorm(8, eps=1e-5), nn.Linear(8, 4)

    def forward(self, x, scale):
        return torch.tanh(self.proj(self.norm(x))) * scale


def arguments():
    gen = torch.Generator().manual_seed(0)
    return torch.randn(6, 8, generator=gen, requires_grad=True), torch.randn(4, generator=gen)


@pytest.mark.parametrize("training", [False, True])
def test_captured_programs_agree_with_eager(training):
    torch.manual_seed(0)
    module, args = Norm(), arguments()
    captured = capture(module, *args, training=training)
    program = captured.lowered.program
    exact = in_float64(module, captured, args)
    got = captured.executable(program, interpreted(program))(
        *(x.float() if x.is_floating_point() else x for x in exact.inputs)
    )
    assert len(got) == len(exact.expected) == (6 if training else 1)
    for a, b in zip(got, exact.expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_parameters_and_gradients_are_told_apart():
    module, args = Norm(), arguments()
    captured = capture(module, *args, training=True)
    assert captured.parameters == {"norm_weight", "proj_weight", "proj_bias"}
    assert captured.late == {"grad0"} and captured.results == 1
    assert {i.name for i in captured.lowered.program.inputs} - captured.parameters == {"x", "scale", "grad0"}
    assert not capture(module, *args).late
    # the argument that needs no gradient gets none
    assert sum(b.name is None for b in captured.lowered.outputs) == 1


def test_a_module_can_be_captured_any_number_of_times():
    module, args = nn.Linear(8, 4), arguments()[:1]
    for _ in range(10):  # more often than Dynamo compiles one code object
        captured = capture(module, *args)
    assert captured.parameters == {"weight", "bias"}


def test_what_has_no_lowering_is_refused():
    class Sorted(nn.Module):
        def forward(self, x):
            return torch.linalg.qr(x)[0]

    with pytest.raises(UnsupportedError, match="qr"):
        capture(Sorted(), torch.randn(4, 4))


def test_training_without_anything_to_differentiate_is_refused():
    class Plain(nn.Module):
        def forward(self, x):
            return x * 2

    with pytest.raises(UnsupportedError, match="differentiate"):
        capture(Plain(), torch.randn(4), training=True)
