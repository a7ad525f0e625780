"""Launch plans: what the C function is called with, and tensor maps kept by address."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tilefold.backends.triton import launcher
from tilefold.backends.triton.launcher import Described, Launcher, Operand, Plan, launcher_of

MATRIX = Described(1, (64, 32), (32, 1), (16, 32))


def recorded():
    calls = []
    return calls, lambda *args: calls.append(args)


def test_arguments_in_the_order_of_the_launcher():
    calls, call = recorded()
    Plan(Launcher(call, ("function", 0)), 7, (3, 4)).start(99, [0x10, 0x20])
    assert calls == [(7, 1, 1, 99, "function", 0, 0x10, 0x20, 3, 4)]


def test_an_empty_grid_launches_nothing():
    calls, call = recorded()
    Plan(Launcher(call, ()), 0, (3,), (MATRIX,)).start(0, [0x10, 0x20])
    assert not calls


def test_tensor_maps_are_encoded_once_an_address(monkeypatch):
    encoded = []

    def encode(operand, how):
        encoded.append((operand.base.data_ptr(), operand.shape, how))
        return [f"map of {operand.address}", *operand.shape, *operand.strides]

    monkeypatch.setattr(launcher, "make_tensordesc_arg", encode, raising=False)
    calls, call = recorded()
    plan = Plan(Launcher(call, (), ("swizzled",)), 1, (5,), (MATRIX,))
    for address in (0x200, 0x400, 0x200):
        plan.start(0, [0x100, address])
    assert encoded == [(0x200, (64, 32), "swizzled"), (0x400, (64, 32), "swizzled")]
    assert calls[0] == calls[2] == (1, 1, 1, 0, 0x100, 0x200, 5, "map of 512", 64, 32, 32, 1)
    for n in range(3 * launcher.MAPS):
        plan.start(0, [0x100, 0x1000 * n])
    assert len(plan._maps) <= launcher.MAPS


def test_other_launchers_take_operands():
    calls, call = recorded()
    Plan(Launcher(call, ()), 1, (), (MATRIX,)).start(0, [0x100, 0x200])
    assert calls[0][-1] == Operand(0x200, (64, 32), (32, 1), (16, 32))


def test_an_unknown_launcher_of_triton_is_called_as_it_is():
    run = lambda *args: None  # noqa: E731
    done = SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0))
    assert launcher_of(done) == Launcher(run, (5, (4, 1, 0), None, None, None))


@pytest.mark.parametrize("described", [False, True])
def test_the_c_function_under_tritons_wrapper_is_found(described):
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    c_function = print
    signature = {0: "*fp16", 1: "tensordesc<fp16[16, 32]>"} if described else {0: "*fp16"}
    run = object.__new__(driver.CudaLauncher)
    run.launch = driver.wrap_handle_tensordesc(c_function, signature, [{"swizzle": 3}] if described else None)
    run.global_scratch_size = run.profile_scratch_size = 0
    run.launch_cooperative_grid, run.launch_pdl = False, described
    done = SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0))
    found = launcher_of(done)
    assert found.call is c_function and found.encodings == (({"swizzle": 3},) if described else ())
    assert found.head == (5, False, described, None, None, (4, 1, 0), None, None, None)
    run.global_scratch_size = 128  # Triton has to allocate it
    assert launcher_of(done).call is run
