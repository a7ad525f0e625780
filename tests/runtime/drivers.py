"""A driver of GPUs for tests: a library whose kernels are C functions, and plans that launch them."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from tilefold.backends.cpp.compile import toolchain
from tilefold.backends.triton import driver, launcher
from tilefold.backends.triton.driver import Handle, Image
from tilefold.backends.triton.launcher import Described, Launcher, Plan
from tilefold.runtime.launches import launch_of
from tilefold.runtime.native.load import native
from tilefold.runtime.recorder import Recorder

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
void scale(void** p);
int attribute[2];
int cuModuleLoadData(void** module, const char* image) {
  *module = nullptr;
  return std::strcmp(image, "code") ? 200 : 0;
}
int cuModuleGetFunction(void** f, void*, const char* name) {
  *f = reinterpret_cast<void*>(&scale);
  return std::strcmp(name, "scale") ? 500 : 0;
}
int cuFuncSetCacheConfig(void*, int) { return 0; }
int cuFuncSetAttribute(void*, int which, int value) { attribute[0] = which; attribute[1] = value; return 0; }
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
    """The driver: a file."""
    folder = tmp_path_factory.mktemp("driver")
    source, out = folder / "driver.cpp", folder / "driver.so"
    source.write_text(SOURCE)
    subprocess.run([*toolchain().command, "-shared", "-fPIC", "-O1", str(source), "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


@pytest.fixture
def module(library, monkeypatch):
    """The native module with that driver."""
    found = native().wait()
    assert found is not None, native().reason
    monkeypatch.setattr(driver, "LIBRARY", library._name)
    driver.functions.cache_clear()
    found.driver(driver.functions())
    monkeypatch.setattr(native(), "_driver", True)
    yield found
    monkeypatch.undo()
    driver.functions.cache_clear()
    if driver.functions() is not None:
        found.driver(driver.functions())


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
        recorder.add(launch_of(plan, recorder.slots([x, y]), [x.data_ptr(), y.data_ptr()], *recorder.at))
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
    if function is None:
        function = ctypes.cast(library.scale, ctypes.c_void_p).value
    handle = Handle(function, 128, 2048, dependent=True, cooperative=False, image=Image("scale", b"code"))
    start = Launcher(lambda *given: None, (), ("swizzled",), handle)
    return Plan(start, 7, (n, 3), (Described(0, (n,), (1,), (n,)),), counters or Counters())
