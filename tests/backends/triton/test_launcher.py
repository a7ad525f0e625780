"""Launch plans: what the C function is called with, and tensor maps kept by address."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from triton.runtime.errors import OutOfResources

from tests.backends.triton.kernels import made, meta
from tilefold.backends.triton import context, launch, launcher, product_tiles, refusals, words
from tilefold.backends.triton.build import Target, built
from tilefold.backends.triton.compile import job_of
from tilefold.backends.triton.config import TooLarge, TritonConfig
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.launcher import Described, Launcher, Operand, Plan, launcher_of
from tilefold.backends.triton.views import Like
from tilefold.block.text import parse
from tilefold.errors import BackendError
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
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


PATCHES = """block weight()
  input x: bf16[8, 3, 14, 16, 14, 16]
  input g: bf16[8, 197, 768]
  dim m = 8
  dim i = 768
  dim j = 3
  dim k = 16
  dim l = 16
  dim n = 14
  dim p = 14
  result w[i, j, k, l]: bf16
  forall i
    forall j
      forall k
        forall l
          init s[i, j, k, l]: f32 = 0.0
          for m
            accum s = sum[m, n, p] x[m, j, n, k, p, l] * g[m, n * 14 + p + 1, i]
          store w[i, j, k, l] over (i, j, k, l) = s[i, j, k, l]
  return w
"""


def of_shapes(*shapes):
    return [Like.packed(s, torch.bfloat16, torch.device("cpu")) for s in shapes]


def test_a_kernel_takes_smaller_tiles_where_a_value_would_be_too_large():
    """Of three summed dims its loop streams one: tiles of 64 of that would be a million elements with the others."""
    k = TritonKernel(parse(PATCHES))
    xs = of_shapes((8, 3, 14, 16, 14, 16), (8, 197, 768), (768, 3, 16, 16))
    assert k.job(xs, {}) is not None  # the rule knows
    with patch.multiple(product_tiles, OPERAND=1 << 30, EXACT=1 << 30):
        k = TritonKernel(parse(PATCHES))
        with pytest.raises(TooLarge, match="a load of g would hold"):
            k.variant((5, 2, 3), k.sizes({}), tf32=False, interpreted=False)
        assert k.job(xs, {}) is not None
        with pytest.raises(TooLarge):
            TritonKernel(parse(PATCHES), exactly=True).job(xs, {})


MAP = """block twice()
  input x: bf16[64, 7, 7]
  dim i = 64
  dim j = 7
  dim k = 7
  result y[i, j, k]: bf16
  forall i
    forall j
      forall k
        store y[i, j, k] over (i, j, k) = bf16(2.0 * f32(x[i, j, k]))
  return y
"""


def test_dims_are_joined_unless_no_kernel_can_be_made_so(monkeypatch):
    xs, bound = of_shapes(*[(64, 7, 7)] * 2), TritonKernel._bound
    k = TritonKernel(parse(MAP))
    _, merges = k.joined(xs, {})
    assert merges and k.job(xs, {}).source != ""

    def only_apart(self, *given):
        if len(self.block.sizes) < 3:
            raise BackendError("too many neighbours")
        return bound(self, *given)

    monkeypatch.setattr(TritonKernel, "_bound", only_apart)
    k = TritonKernel(parse(MAP))
    assert k.joined(xs, {})[1] == merges
    assert k.job(xs, {}) is not None
    assert k.joined(xs, {}) == (k, ())


def test_a_kernel_that_cannot_be_launched_is_not_planned_again(monkeypatch):
    """Its group is cut, whatever an earlier process kept of the program."""
    monkeypatch.setattr(refusals, "_found", {})
    x = meta(2048, 4096, dtype=torch.float32)
    program = trace(lambda x: torch.softmax(x, -1) * 2.0, x).program
    (step,) = compile_program(program, device="interpreter").steps
    assert len(step.members) > 1
    with monkeypatch.context() as patch:
        patch.setattr(TritonKernel, "_bound", refused_by_the_device)
        with pytest.raises(BackendError, match="no registers"):
            step.triton.plan([meta(2048, 4096, dtype=torch.float32)] * 2, {})
    assert len(refusals.refused()) == 1
    steps = compile_program(program, device="interpreter").steps
    assert len(steps) == 2 and {m for s in steps for m in s.members} == set(step.members)
    assert len(compile_program(program, device="interpreter").steps) == 2
    monkeypatch.setattr(refusals, "_found", {})
    assert len(compile_program(program, device="interpreter").steps) == 1


def refused_by_the_device(self, *given):
    raise BackendError("no registers")


DRIVER = r"""
#include <stdint.h>
#include <string.h>
uint64_t seen[16];
int cuLaunchKernelEx(const unsigned* config, void* f, void** p, void** more) {
  static const int bytes[] = {8, 8, 4, 8, 8, 8};  // two addresses, a number of 32 bits, one of 64, scratch twice
  seen[0] = config[0];
  seen[1] = (uint64_t)f;
  for (int k = 0; k < 6; ++k) memcpy(&seen[2 + k], p[k], bytes[k]);
  return 0;
}
int cuGetErrorString(int code, const char** s) { *s = "no"; return 0; }
int cuCtxGetCurrent(void** c) { *c = seen; return 0; }
int cuCtxSetCurrent(void* c) { return 0; }
int cuDeviceGet(int* d, int n) { return 0; }
int cuDevicePrimaryCtxRetain(void** c, int d) { return 0; }
int cuPointerGetAttribute(void* a, int b, uint64_t c) { return 0; }
int cuFuncSetAttribute(void* f, int a, int b) { return 0; }
"""
LAUNCH = """
import ctypes, sys
from types import SimpleNamespace
from unittest.mock import patch
library = ctypes.CDLL(sys.argv[1] + "/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
from triton.backends.nvidia import driver
from triton.runtime import build
from tilefold.backends.triton.launcher import Plan, launcher_of
from tilefold.backends.triton.words import build_shared

driver.library_dirs = lambda: [sys.argv[1]]
driver.PyCUtensorMap = object
build_shared()
build._build = None  # no call has a compiler
about = SimpleNamespace(
    target=SimpleNamespace(backend="cuda"), num_ctas=1, global_scratch_size=0, global_scratch_align=1,
    profile_scratch_size=0, profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
)

class Done:
    metadata, function, packed_metadata, name, kernel = about, 77, (4, 1, 0), "f", None

    def __init__(self, *types):
        self.src = SimpleNamespace(signature=dict(enumerate(types)))

    @property
    def run(self):
        return driver.CudaLauncher(self.src, self.metadata)

for types in (("*fp32", "*bf16", "i32", "i64"), ("*fp16", "*i64", "i32", "i64"), ("*fp16", "*i64", *["i64"] * 50)):
    found = launcher_of(Done(*types))
    Plan(found, 3, (-5, 1 << 40, *range(len(types) - 4))).start(0, [0xFFFF_0000_1111_2222, 0x10])
    print(list((ctypes.c_uint64 * 16).in_dll(library, "seen"))[:8])
"""


def test_kernels_share_a_c_function_that_takes_words(tmp_path):
    """In a process of its own: a library under the name of CUDA's driver writes down what is launched."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    named = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run([compiler, *named, str(tmp_path / "driver.c")], check=True)
    own = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", LAUNCH, tmp_path], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    launched = [3, 77, 0xFFFF_0000_1111_2222, 0x10, 2**32 - 5, 1 << 40, 0, 0]
    many = [3, 77, 0xFFFF_0000_1111_2222, 0x10, 2**32 - 5, 1 << 40, 0, 1]
    assert done.stdout.splitlines() == [str(launched)] * 2 + [str(many)]
    assert len(list((tmp_path / "cache").glob("*/__triton_launcher*"))) == 2


def kernel_of(types, **about):
    """A compiled kernel with these types of arguments, and a launcher of Triton's."""
    sizes = {"global_scratch_size": 0, "profile_scratch_size": 0} | about
    metadata = SimpleNamespace(**{"target": SimpleNamespace(backend="cuda")} | sizes)
    src = SimpleNamespace(signature=dict(enumerate(types)))
    return SimpleNamespace(run=print, function=5, packed_metadata=(4, 1, 0), src=src, metadata=metadata)


def test_zeros_follow_the_arguments_of_a_shared_function():
    few, many = words.WORDS
    found = kernel_of(["*fp16", "i32", "i64"])
    assert launcher_of(found).tail == (0,) * (few - 3) == launcher_of(found).tail
    assert len(found.src.signature) == few
    most = kernel_of(["*fp16"] * (few - 2))
    assert launcher_of(most).tail == (0, 0)
    more = kernel_of(["*fp16"] * (few - 1))
    assert launcher_of(more).tail == (0,) * (many - few + 1)
    assert len(more.src.signature) == many


@pytest.mark.parametrize(
    "own",
    [
        kernel_of(["*fp16", "tensordesc<fp16[16, 32]>"]),
        kernel_of(["*fp16", "fp32"]),
        kernel_of(["*fp16", ("i32", "i32")]),
        kernel_of(["*fp16"] * (words.WORDS[-1] - 1)),
        kernel_of(["*fp16"], global_scratch_size=128),
        kernel_of(["*fp16"], profile_scratch_size=128),
        kernel_of(["*fp16"], target=SimpleNamespace(backend="hip")),
    ],
)
def test_other_kernels_have_a_c_function_of_their_own(own):
    types = own.src.signature
    assert launcher_of(own).tail == () and own.src.signature is types


def test_functions_that_kernels_have_for_themselves_are_built_where_kernels_are(monkeypatch):
    built_for = []
    monkeypatch.setattr(words, "CudaLauncher", lambda src, about: built_for.append(src.signature))
    for types in (["*fp16", "i32"], ["*fp16", "tensordesc<fp16[16, 32]>"]):
        words.build_own(kernel_of(types))
    assert built_for == [{0: "*fp16", 1: "tensordesc<fp16[16, 32]>"}]
    monkeypatch.setattr(words, "CudaLauncher", lambda src, about: shutil.which(None))  # no compiler: any error
    words.build_own(kernel_of(["tensordesc<fp16[16, 32]>"]))


@pytest.mark.parametrize(("columns", "vectors"), [(1000, True), (1001, False)])
def test_rows_at_multiples_of_sixteen_bytes_are_read_as_vectors(columns, vectors, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton_cache"))
    (k,) = made(o.softmax, meta(4096, columns, dtype=torch.bfloat16))
    kernel = TritonKernel(k.block)
    xs = [Like.packed((4096, columns), torch.bfloat16, torch.device("meta"))] * 2
    v, _, numbers = kernel._bound(xs, {})
    divisors = kernel._divisors(xs, numbers)
    assert divisors == [16, 16, *[8 if vectors else 1] * 2]
    code = built(job_of(v.kernel, v.rendered, v.config, divisors, wide=False), Target("cuda", 90)).asm["ptx"]
    assert ("ld.global.v4" in code) is vectors and ("ld.global.b16" in code) is not vectors


def test_kernels_of_dynamic_sizes_do_not_differ_by_every_power_of_two():
    kernel = TritonKernel(made(o.softmax, meta(64, 1000))[0].block)
    assert kernel._divisors([], [16, 8, 24, 1000, 0]) == [16, 8, 8, 8, 16]
    kernel._dynamic = frozenset("i")
    assert kernel._divisors([], [16, 8, 24, 1000, 0]) == [16, 1, 1, 1, 16]


def test_tensors_of_several_devices_are_refused():
    """Where a GPU can read the memory of the host, a kernel would."""
    x = meta(4, 8, dtype=torch.bfloat16)
    (k,) = made(o.softmax, x)
    with pytest.raises(ValueError, match="tensors of cpu, meta"):
        TritonKernel(k.block).plan([x, torch.empty(4, 8, dtype=torch.bfloat16)], {})


def test_windows_that_are_written_out_have_no_long_vectors_to_store():
    (k,) = made(lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1), meta(8, 8, 28, 28))
    assert TritonKernel(k.block)._divisors([], [16, 8, 56]) == [16, 1, 1]
