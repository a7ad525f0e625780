"""Every program of `programs` compiles and does what eager does, forward and backward. Run by the interpreter here."""

from __future__ import annotations

import pytest
import torch

from tests.frontend.programs.functions import FUNCTIONS
from tests.frontend.programs.layers import LAYERS, LOSSES
from tests.frontend.programs.run import difference
from tilefold.errors import BackendError
from tilefold.frontend import torch_compile
from tilefold.frontend.capture.options import RUNNERS

HOW = {"backend": torch_compile.backend, "options": {"runner": "interpreter", "leftover": "eager"}}
#: Layers that do something else in inference.
OTHERWISE = ("norm", "dropout", "encoder", "pool", "attention")
#: Programs that compute in bf16 or whose gradients are roundings apart.
COARSE = {"autocast": 2e-2}
#: Results whose strides are others than eager's whatever compiles them (`aot_eager`): torch's tracing.
RESTRIDED = ("attention with masks",)


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*LAYERS, *LOSSES])
def test_a_layer_in_training(name):
    torch.manual_seed(0)
    module, args = {**LAYERS, **LOSSES}[name]()
    assert difference(module.train(), args, backward=True, **HOW) == ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in LAYERS if any(word in n for word in OTHERWISE) and n not in RESTRIDED])
def test_a_layer_in_inference(name):
    torch.manual_seed(0)
    module, args = LAYERS[name]()
    with torch.no_grad():
        assert difference(module.eval(), args, backward=False, **HOW) == ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(name):
    torch.manual_seed(0)
    program, args = FUNCTIONS[name]
    assert difference(program, args(), backward=True, tol=COARSE.get(name, 1e-4), **HOW) == ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["layer norm", "batch norm 2d", "encoder, norm first", "conv, norm and activation"])
def test_layers_when_no_region_compiles(name, lenient, monkeypatch):
    """Everything op by op is right as well."""

    def fails(program, *, device):
        raise BackendError("no compiler today")

    monkeypatch.setitem(RUNNERS, "interpreter", fails)
    torch.manual_seed(0)
    module, args = LAYERS[name]()
    assert difference(module, args, backward=True, **HOW) == ""


def test_a_difference_is_seen():
    class Broken(torch.nn.Module):
        def forward(self, x):
            return x * 2 if torch.compiler.is_compiling() else x * 3

    x = (torch.ones(3),)
    assert "not close" in difference(Broken(), x, backward=True, **HOW)

    def raises(x):
        if torch.compiler.is_compiling():
            return x
        raise ValueError("eager alone")

    assert "does not raise" in difference(raises, x, backward=False, **HOW)
