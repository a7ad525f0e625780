"""Launches by the driver from C++: parameters, tensor maps, attributes, counters, contexts, errors. The driver is a
library of the test's whose kernels are C functions."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from tilefold.backends.cpp.compile import toolchain
from tilefold.backends.triton import driver, launcher
from tilefold.backends.triton.driver import Address, Counter, Handle, Launched, TensorMap, handle_of, template_of
from tilefold.backends.triton.launcher import Described, Launcher, Operand, Plan
from tilefold.runtime.native.load import native
from tilefold.runtime.recorder import Recorder
from tilefold.runtime.tape import Op

SOURCE = r"""
#include <cstdint>
#include <cstring>
struct Attribute { int id; char pad[4]; char value[64]; };
struct Config { unsigned grid[3], block[3], shared; void* stream; Attribute* attributes; unsigned count; };
extern "C" {
int64_t seen[12];
int cuLaunchKernelEx(const Config* c, void* f, void** p, void**) {
  if (!f) return 1;
  for (int k = 0; k < 3; ++k) { seen[k] = c->grid[k]; seen[3 + k] = c->block[k]; }
  seen[6] = c->shared; seen[7] = reinterpret_cast<int64_t>(c->stream); seen[8] = c->count;
  for (unsigned k = 0; k < c->count; ++k) {
    int on;
    std::memcpy(&on, c->attributes[k].value, 4);
    seen[9 + k] = on * c->attributes[k].id;
  }
  reinterpret_cast<void (*)(void**)>(f)(p);
  return 0;
}
int cuTensorMapReplaceAddress(void* map, void* address) { std::memcpy(map, &address, 8); return 0; }
int cuGetErrorString(int code, const char** s) { *s = "invalid value"; return code != 1; }
int cuCtxGetCurrent(void** c) { *c = nullptr; return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuDevicePrimaryCtxRetain(void** c, int) { *c = nullptr; return 0; }
// y[k] = x[k] * factor + last byte of the map that shows x; counter += 1
void scale(void** p) {
  const float* x = *static_cast<float**>(p[0]);
  float* y = *static_cast<float**>(p[1]);
  const int n = *static_cast<int32_t*>(p[2]), factor = *static_cast<int32_t*>(p[3]);
  *reinterpret_cast<int64_t*>(*static_cast<int64_t*>(p[4])) += 1;
  const char* map = static_cast<char*>(p[5]);
  const float* shown;
  std::memcpy(&shown, map, 8);
  if (reinterpret_cast<intptr_t>(map) % 64 || shown != x || *static_cast<int64_t*>(p[6])) return;
  for (int k = 0; k < n; ++k) y[k] = shown[k] * factor + map[127];
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(SOURCE)
    out = folder / "driver.so"
    subprocess.run(
        [*toolchain().command, "-shared", "-fPIC", "-O1", str(folder / "driver.cpp"), "-o", str(out)], check=True
    )
    return ctypes.CDLL(str(out))


def address(library, name):
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


@pytest.fixture
def module(library, monkeypatch):
    """The native module with the test's driver."""
    module = native().wait()
    assert module is not None, native().reason
    module.driver(tuple(address(library, name) for name in driver.FUNCTIONS))
    monkeypatch.setattr(native(), "_driver", True)
    yield module
    if driver.functions() is not None:
        module.driver(driver.functions())


class Counters:
    def __init__(self):
        self.memory, self.streams = torch.zeros(1, dtype=torch.int64), []

    def address(self, stream):
        self.streams.append(stream)
        return self.memory.data_ptr()


def recorded(module, plan, x):
    """A region whose call launches `plan` with x and y."""
    recorder = Recorder([x], [])
    recorder.step("scaled", "in the test")
    with recorder:
        y = torch.empty_like(x)
        recorder.planned(plan, [x, y], [x.data_ptr(), y.data_ptr()])
    tape = recorder.tape([y])
    assert tape is not None, recorder.refused
    region = module.region(False, None)
    assert module.add(region, (x,), *tape.packed())
    return region, tape


def scaled(library, monkeypatch, n, *, function=None, counters=None):
    """y = 3 x + 5, where the 5 is in the map."""
    template = bytes(127) + bytes([5])
    monkeypatch.setattr(launcher, "make_tensordesc_arg", lambda x, how: [template], raising=False)
    monkeypatch.setattr(launcher, "template_of", lambda made: made)
    function = address(library, "scale") if function is None else function
    handle = Handle(function, 128, 2048, dependent=True, cooperative=False)
    start = Launcher(lambda *given: None, (), ("swizzled",), handle)
    return Plan(start, 7, (n, 3), (Described(0, (n,), (1,), (n,)),), counters or Counters())


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
