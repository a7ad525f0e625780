"""A second process runs the calls that the first kept, kernels and all: nothing is captured, planned or compiled."""

from __future__ import annotations

import pytest

from tests.frontend.warm.programs import MLP, NORM, runs_in

pytestmark = pytest.mark.gpu

#: A chain of two products and an attention, whose gradients are kernels of several kinds.
ATTENTION = """
class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.q = torch.nn.Linear(16, 192), torch.nn.Linear(64, 16)
    def forward(self, x):
        q, k, v = (t.view(1, 12, 1, 64).transpose(1, 2) for t in self.p(x).chunk(3, -1))
        bias = (torch.arange(12, device=x.device)[:, None] - torch.arange(12, device=x.device)).abs()
        s = (q @ k.transpose(-1, -2) / 8 - bias).softmax(-1)
        return x + self.q((s @ v).transpose(1, 2).reshape(12, 64))
m = M()
"""


@pytest.mark.parametrize("model", [MLP, NORM, ATTENTION], ids=["mlp", "norm", "attention"])
def test_a_second_process_compiles_nothing(device, tmp_path, model):
    process = runs_in(tmp_path, tolerance=5e-3)  # products of float32 may have 10 bits there
    process(model, before="native().wait()", calls=4, device=device)
    found = process(model, before="native().wait()", calls=3, device=device)
    assert found["hit"] >= 1
    if device == "cuda":
        assert found["compiled"] == []
