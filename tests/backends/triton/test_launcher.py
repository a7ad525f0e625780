"""Launch plans: what the C function is called with, and tensor maps kept by address."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from triton.runtime.errors import OutOfResources

from tests.backends.triton.kernels import made, meta
from tilefold.backends.triton import context, launch, launcher
from tilefold.backends.triton.config import TooLarge, TritonConfig
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.launcher import Described, Launcher, Operand, Plan, launcher_of
from tilefold.errors import BackendError
from tilefold.suites.gpu import operators as o

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
    done = SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0), name="f", kernel=None)
    found = launcher_of(done)
    assert found.call is c_function and found.encodings == (({"swizzle": 3},) if described else ())
    assert found.head == (5, False, described, None, None, (4, 1, 0), None, None, None)
    run.global_scratch_size = 128  # Triton has to allocate it
    assert launcher_of(done).call is run


def refusing(name):
    """A compiled kernel that the device has no room for, as Triton says so when it is first asked for."""

    class Refusing:
        @property
        def run(self):
            raise OutOfResources(327_680, 232_448, "shared memory")

    refused = Refusing()
    refused.name = name
    return refused


def test_a_kernel_that_the_device_has_no_room_for_is_an_error_of_ours():
    with pytest.raises(TooLarge, match=r"rows takes 327680 of shared memory, the device has 232448") as raised:
        launcher_of(refusing("rows"))
    assert isinstance(raised.value, BackendError) and raised.value.hint


def long_softmax(**how):
    x = meta(2048, 131_072, dtype=torch.bfloat16)
    (k,) = made(o.softmax, x)
    return TritonKernel(k.block, **how), [x, torch.empty_like(x)]


@pytest.fixture
def small_device(monkeypatch):
    """A device that holds tiles of 4,096 elements and less; the configurations that it was given."""
    tried = []

    def compile_for(kernel, rendered, config, divisible, *, wide, target):
        tried.append(config)
        return refusing(rendered.name) if max(config.tiles.values()) > 4096 else SimpleNamespace(
            run="run", function=1, packed_metadata=()
        )  # fmt: skip

    monkeypatch.setattr(launch, "compiled", compile_for)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    return tried


def test_lighter_configurations_are_tried_until_one_fits(small_device):
    k, xs = long_softmax()
    k.plan(xs, {})
    assert [max(c.tiles.values()) for c in small_device] == [65536, 32768, 16384, 8192, 4096]
    k.plan(xs, {})
    assert len(small_device) == 5  # what fits is remembered


def test_a_kernel_alone_that_computes_too_much_a_thread_gets_smaller_tiles(monkeypatch):
    monkeypatch.setattr(launch, "compiled", lambda kernel, r, config, *a, **how: config)
    monkeypatch.setattr(launch, "launcher_of", lambda done: Launcher(done, ()))
    monkeypatch.setattr(launch.torch.cuda, "device", lambda index: nullcontext())
    x = meta(4096, 64, dtype=torch.float32)
    (k,) = made(lambda x: (x * x).sum(1), x)
    xs = [x, meta(4096, dtype=torch.float32)]
    (row,) = {d for d, e in k.block.sizes.items() if e.value == 4096}

    def choose(block, sizes):
        return TritonConfig({row: 128}, warps=4)  # of 64 columns: 64 elements a thread

    assert TritonKernel(k.block, choose).plan(xs, {}).launcher.call == choose(None, None)
    monkeypatch.setattr(context, "MOST_A_THREAD", 16)
    smaller = TritonKernel(k.block, choose).plan(xs, {}).launcher.call
    assert smaller.tiles == {row: 32} and smaller.warps == 4
    monkeypatch.setattr(context, "MOST_A_THREAD", 1)
    with pytest.raises(TooLarge, match="elements in a thread block"):
        TritonKernel(k.block, choose).plan(xs, {})


def test_a_configuration_that_is_to_be_had_exactly_is_refused(small_device):
    k, xs = long_softmax(exactly=True)
    with pytest.raises(TooLarge):
        k.plan(xs, {})
    assert len(small_device) == 1
