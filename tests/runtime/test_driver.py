"""Launches by the driver from C++: parameters, tensor maps, attributes, counters, contexts, errors. The driver is a
library of the test's whose kernels are C functions."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.runtime.drivers import Counters, recorded, scaled
from tilefold.backends.triton import driver, launcher
from tilefold.backends.triton.driver import (
    Address,
    Counter,
    Handle,
    Image,
    Launched,
    TensorMap,
    function_of,
    handle_of,
    template_of,
)
from tilefold.backends.triton.launcher import Described, Launcher, Operand, Plan
from tilefold.errors import BackendError
from tilefold.runtime.tape import Op


def test_a_kernel_gets_addresses_numbers_maps_and_a_counter(module, library, monkeypatch):
    x, counters = torch.randn(33), Counters()
    plan = scaled(library, monkeypatch, 33, counters=counters)
    region, tape = recorded(module, plan, x)
    assert [i.op for i in tape.code] == [Op.START]
    for seed in range(3):
        x = torch.randn(33, generator=torch.Generator().manual_seed(seed))
        (y,) = module.run(region, (x,))
        assert torch.equal(y, 3 * x + 5)
    seen = list((ctypes.c_int64 * 12).in_dll(library, "seen"))
    assert seen[:10] == [7, 1, 1, 128, 1, 1, 2048, 0, 1, 6]
    assert counters.memory.item() == 3 and counters.streams == [0, 0, 0]


def test_what_the_driver_refuses_is_an_error_with_the_step(module, library, monkeypatch):
    region, _ = recorded(module, scaled(library, monkeypatch, 4, function=0), torch.zeros(4))
    with pytest.raises(RuntimeError, match=r"CUDA error: invalid value \(1\) in scaled") as caught:
        module.run(region, (torch.zeros(4),))
    assert caught.value.__notes__ == ["in the test"]


def test_without_a_handle_triton_s_launcher_is_called(module, library):
    calls = []
    plan = Plan(Launcher(lambda *given: calls.append(given), ("head",)), 7, (4,))
    x = torch.zeros(4)
    region, tape = recorded(module, plan, x)
    assert [i.op for i in tape.code] == [Op.LAUNCH]
    (y,) = module.run(region, (x,))
    assert calls == [(7, 1, 1, 0, "head", x.data_ptr(), y.data_ptr(), 4)]


def test_parameters_of_a_plan(monkeypatch):
    handle = Handle(1, 32, 0, dependent=False, cooperative=False)
    maps = {"map": [b"m" * 128, 8, 4, 1], "decomposed": None}

    def encode(operand, how):
        return maps[how] or [operand.base, 8, operand.padding == "nan"]

    monkeypatch.setattr(launcher, "make_tensordesc_arg", encode, raising=False)
    monkeypatch.setattr(launcher, "template_of", lambda made: made if isinstance(made, bytes) else None)
    box = (Described(1, (8, 4), (4, 1), (8, 4)), Described(0, (8,), (1,), (8,)))
    plan = Plan(Launcher(print, (), ("map", "decomposed"), handle), 2, (9,), box, Counters())
    expected = (Address(0), Address(1), 9, Counter(), TensorMap(1, b"m" * 128), 8, 4, 1, Address(0), 8, 0, 0, 0)
    assert plan.launched([16, 32]) == Launched(handle, 2, expected)
    maps["map"] = ["a map of another kind"]
    assert plan.launched([16, 32]) is None
    assert Plan(Launcher(print, ()), 2, (9,)).launched([16]) is None


def test_only_what_triton_makes_is_a_tensor_map():
    assert template_of(object()) is None and template_of(Operand(0, (), (), ())) is None


def test_handles():
    head = (11, False, True, None, None, (4, 1, 512), None, None, None)
    assert handle_of(head) == Handle(11, 128, 512, dependent=True, cooperative=False)
    assert handle_of((*head[:5], (4, 2, 512), *head[6:])) is None


def test_machine_code_is_loaded(module, library):
    scale = ctypes.cast(library.scale, ctypes.c_void_p).value
    assert function_of(Image("scale", b"code"), 100) == scale
    attribute = (ctypes.c_int * 2).in_dll(library, "attribute")
    assert list(attribute) == [0, 0]
    assert function_of(Image("scale", b"code"), 100_000) == scale
    assert list(attribute) == [driver.MOST_SHARED, 100_000]
    for image, code in ((Image("scale", b"other code"), 200), (Image("other", b"code"), 500)):
        with pytest.raises(BackendError, match=f"answers {code} where {image.name} is loaded"):
            function_of(image, 100)
