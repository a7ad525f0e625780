"""Python's garbage collector while graphs are compiled."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch

from tilefold.frontend.regions.assemble import Options
from tilefold.frontend.torch_compile import compile_captured
from tilefold.garbage import collecting_later
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


class Loop:
    """An object that only a collector frees."""

    def __init__(self):
        self.own = self


def test_garbage_is_freed_at_the_end_and_what_stays_is_old():
    with collecting_later():
        gone, kept = ref(Loop()), [Loop() for _ in range(64)]
        assert gone() is not None
    assert gone() is None
    young = {id(x) for n in (0, 1) for x in gc.get_objects(generation=n)}
    assert not young & set(map(id, kept))
    assert len(kept) == 64


def test_what_the_user_froze_stays_frozen():
    kept = Loop()

    def known():
        return any(x is kept for x in gc.get_objects())

    assert known()
    gc.freeze()
    try:
        with collecting_later():
            pass
        assert gc.get_freeze_count() and not known()
    finally:
        gc.unfreeze()
    assert known()


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
