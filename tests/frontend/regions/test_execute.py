"""The interpreter as what runs a region."""

from __future__ import annotations

import torch

from tilefold.frontend.regions.execute import interpreted
from tilefold.tensor.text import parse


def test_results_are_never_the_arguments():
    p = parse("program p()\n  input x: f32[3]\n  dim i = 3\n  y[i]: f32 = x[i]\n  return y\n")
    x = torch.ones(3)
    interpreted(p)({"x": x}, {})["y"].zero_()
    assert torch.equal(x, torch.ones(3))
