"""Python's garbage collector while graphs are compiled."""

from __future__ import annotations

import gc

import pytest
import torch

from tilefold.frontend.regions.assemble import Options
from tilefold.frontend.regions.garbage import collecting_later
from tilefold.frontend.torch_compile import compile_captured
from tilefold.pipeline import compile_program


@pytest.fixture(autouse=True)
def collector():
    gc.enable()
    yield
    gc.enable()


def test_it_is_on_again_afterwards_also_after_an_error():
    with collecting_later():
        assert not gc.isenabled()
        with collecting_later():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), collecting_later():
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with collecting_later():
        pass
    assert not gc.isenabled()


def test_forward_and_backward_are_compiled_without_it():
    seen = []

    def program(p, *, device):
        seen.append(gc.isenabled())
        return compile_program(p, device=device, load=False)

    def backend(gm, example):
        return compile_captured(gm, example, Options(program, leftover="eager"))

    torch._dynamo.reset()
    x = torch.randn(8, 16, requires_grad=True)
    torch.compile(lambda x: torch.softmax(x, -1).sin().sum(), backend=backend)(x).backward()
    assert seen == [False, False] and gc.isenabled()
