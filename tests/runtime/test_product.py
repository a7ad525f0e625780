"""Products by cuBLASLt from C++: what the library is asked, when it is not, what a call sets. The library is a
test's: it computes what its descriptions say, on the CPU."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from tilefold.backends.cpp.compile import toolchain
from tilefold.runtime import cublas
from tilefold.runtime.native.load import native
from tilefold.runtime.recorder import Recorder

SOURCE = r"""
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>
using P = void*;
struct Made { std::map<int, std::vector<char>> set; int type; uint64_t rows, columns; int64_t lead; };
static int get(Made* m, int key, int otherwise) {
  if (!m->set.count(key)) return otherwise;
  int n;
  std::memcpy(&n, m->set[key].data(), 4);
  return n;
}
static int64_t wide(Made* m, int key) {
  int64_t n = 0;
  if (m->set.count(key)) std::memcpy(&n, m->set[key].data(), 8);
  return n;
}
static float read(const void* p, int64_t n, int type) {
  const uint16_t bits = static_cast<const uint16_t*>(p)[n];
  if (type == 14) {
    const uint32_t all = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &all, 4);
    return x;
  }
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return x;
}
static void write(void* p, int64_t n, int type, float x) {
  uint16_t bits;
  if (type == 14) {
    uint32_t all;
    std::memcpy(&all, &x, 4);
    bits = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
  } else {
    const _Float16 y = x;
    std::memcpy(&bits, &y, 2);
  }
  static_cast<uint16_t*>(p)[n] = bits;
}
static int put(P m, int key, const void* value, size_t n) {
  const char* c = static_cast<const char*>(value);
  static_cast<Made*>(m)->set[key] = std::vector<char>(c, c + n);
  return 0;
}
static int drop(P m) { delete static_cast<Made*>(m); return 0; }
static char space[64];
extern "C" {
int64_t asked = 0, computed = 0, alive = 0;
int alignment[4];
int refuse = 0;
int64_t most = 0, wanted = 48;  // bytes of workspace: torch's for cuBLAS, and an algorithm's
float waves[2];  // of partial sums in float32, and rounded
int rounded = 0;  // products computed by what may round them
int cublasLtMatmulDescCreate(P* m, int compute, int scale) { ++alive; *m = new Made{}; return compute != 68 || scale; }
int cublasLtMatmulDescDestroy(P m) { --alive; return drop(m); }
int cublasLtMatmulDescSetAttribute(P m, int k, const void* v, size_t n) { return put(m, k, v, n); }
int cublasLtMatrixLayoutCreate(P* m, int type, uint64_t rows, uint64_t columns, int64_t lead) {
  ++alive;
  *m = new Made{{}, type, rows, columns, lead};
  return lead < int64_t(rows);
}
int cublasLtMatrixLayoutDestroy(P m) { --alive; return drop(m); }
int cublasLtMatrixLayoutSetAttribute(P m, int k, const void* v, size_t n) { return put(m, k, v, n); }
int cublasLtMatmulPreferenceCreate(P* m) { ++alive; *m = new Made{}; return 0; }
int cublasLtMatmulPreferenceDestroy(P m) { --alive; return drop(m); }
int cublasLtMatmulPreferenceSetAttribute(P m, int k, const void* v, size_t n) { return put(m, k, v, n); }
int cublasLtMatmulAlgoGetHeuristic(P, P, P, P, P, P, P w, int, void* found, int* count) {
  ++asked;
  for (int k = 0; k < 4; ++k) alignment[k] = get(static_cast<Made*>(w), 5 + k, -1);
  std::memset(found, 0, 96);
  const size_t n = wanted;
  const int ways = get(static_cast<Made*>(w), 3, 0);
  std::memcpy(found, &ways, 4);
  std::memcpy(static_cast<char*>(found) + 64, &n, 8);
  std::memcpy(static_cast<char*>(found) + 76, &waves[ways != 2], 4);
  *count = wide(static_cast<Made*>(w), 1) == (most > 64 ? most : 64) && (ways == 2 || ways == 7) && !refuse;
  return 0;
}
int cublasLtMatmul(P handle, P desc, const void* one, const void* a, P la, const void* b, P lb, const void* zero,
    const void* c, P lc, void* d, P ld, const void* how, void* workspace, size_t size, P stream) {
  auto *m = static_cast<Made*>(desc), *A = static_cast<Made*>(la), *B = static_cast<Made*>(lb);
  auto *D = static_cast<Made*>(ld);
  if (size > 64 ? !workspace || workspace == space : workspace != (size ? space : nullptr)) return 6;
  if (size > 64) std::memset(workspace, 1, size);
  if (handle != space || size != size_t(wanted) || c != d || lc != ld || stream) return 1;
  if (*static_cast<const float*>(one) != 1 || *static_cast<const float*>(zero) != 0) return 2;
  const int ta = get(m, 3, 0), tb = get(m, 4, 0), type = D->type;
  const int64_t depth = ta ? A->rows : A->columns, batch = get(D, 5, 1);
  if (int64_t(ta ? A->columns : A->rows) != int64_t(D->rows) || int64_t(tb ? B->columns : B->rows) != depth) return 3;
  if (int64_t(tb ? B->rows : B->columns) != int64_t(D->columns)) return 4;
  if (get(A, 5, 1) != batch || get(B, 5, 1) != batch) return 5;
  const void* bias = get(m, 7, 1) == 4 ? reinterpret_cast<const void*>(wide(m, 8)) : nullptr;
  for (int64_t n = 0; n < batch; ++n)
    for (int64_t i = 0; i < int64_t(D->rows); ++i)
      for (int64_t j = 0; j < int64_t(D->columns); ++j) {
        float sum = bias ? read(bias, i, get(m, 26, -1)) : 0;
        for (int64_t k = 0; k < depth; ++k)
          sum += read(a, n * wide(A, 6) + (ta ? i * A->lead + k : k * A->lead + i), A->type) *
              read(b, n * wide(B, 6) + (tb ? k * B->lead + j : j * B->lead + k), B->type);
        write(d, n * wide(D, 6) + j * D->lead + i, type, sum);
      }
  ++computed;
  rounded += *static_cast<const int*>(how) != 2;
  return 0;
}
P handle() { return space; }
size_t workspace_size() { return sizeof(space); }
P workspace() { return space; }
size_t most_workspace() { return most; }
}
"""


class Library:
    """The library, and how often it was asked and called."""

    def __init__(self, path):
        self.c = ctypes.CDLL(str(path))
        names = (*cublas.FUNCTIONS, "handle", "workspace_size", "workspace", "most_workspace")
        self.addresses = tuple(ctypes.cast(getattr(self.c, n), ctypes.c_void_p).value for n in names)

    def number(self, name, kind=ctypes.c_int64):
        return kind.in_dll(self.c, name)

    def waves(self, *of):
        (ctypes.c_float * 2).in_dll(self.c, "waves")[:] = of


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("products")
    source, out = folder / "products.cpp", folder / "products.so"
    source.write_text(SOURCE)
    flags = ("-std=c++20", "-shared", "-fPIC", "-O1", "-Wno-unused-parameter")
    subprocess.run([*toolchain().command, *flags, str(source), "-o", str(out)], check=True)
    return Library(out)


@pytest.fixture
def products(built):
    """Products of this process's CPU are those of the library."""
    module = native().wait()
    assert module is not None, native().reason
    for name, value in {"asked": 0, "computed": 0, "most": 0, "wanted": 48}.items():
        built.number(name).value = value
    for name in ("refuse", "rounded"):
        built.number(name, ctypes.c_int).value = 0
    built.waves(0.0, 0.0)
    module.products(built.addresses, "cpu")
    yield built
    module.products(cublas.functions() or (0,) * len(built.addresses), "cuda")


def runs(f, *args):
    """A region of the call, run three times: the last result."""
    module, recorder = native().module, Recorder(args, [])
    recorder.step("product", "in the test")
    with recorder, torch.no_grad():
        y = f(*args)
    tape = recorder.tape([y])
    assert tape is not None, recorder.refused
    region = module.region(False, None)
    assert module.add(region, args, *tape.packed())
    return [module.run(region, args)[0] for _ in range(3)][-1]


def close(got, *args, f):
    want = f(*(x.double() for x in args))
    size = f(*(x.double().abs() for x in args))  # of the terms that are summed
    eps = torch.finfo(got.dtype).eps
    sums = torch.finfo(torch.float32).eps * args[-1].shape[-2]  # each term may be rounded with the sum before it
    assert got.shape == want.shape and ((got.double() - want).abs() <= (eps + sums) * size + 1e-3 * eps).all()


def matrix(rows, columns, dtype, seed, *, turned=False, gap=0):
    g = torch.Generator().manual_seed(seed)
    if turned:
        return matrix(columns, rows, dtype, seed, gap=gap).T
    return torch.randn(rows, columns + gap, generator=g).to(dtype)[:, :columns]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("m", "k", "n", "gap"), [(5, 7, 3, 0), (8, 16, 24, 8), (1, 9, 4, 0), (6, 1, 5, 2), (4, 3, 1, 0)]
)
def test_matrices_in_any_order_of_memory(products, dtype, turned, m, k, n, gap):
    a = matrix(m, k, dtype, 0, turned=turned[0], gap=gap)
    b = matrix(k, n, dtype, 1, turned=turned[1], gap=gap)
    close(runs(torch.mm, a, b), a, b, f=torch.mm)
    assert (products.number("asked").value, products.number("computed").value) == (1, 3)
    bias = torch.randn(n).to(dtype)
    close(runs(torch.addmm, bias, a, b), bias, a, b, f=torch.addmm)
    assert (products.number("asked").value, products.number("computed").value) == (2, 6)


def test_batches_and_one_matrix_for_all(products):
    a = torch.randn(3, 4, 6).bfloat16()
    for b in (torch.randn(3, 6, 5).bfloat16(), torch.randn(6, 3, 5).bfloat16().transpose(0, 1)):
        close(runs(torch.bmm, a, b), a, b, f=torch.bmm)
    one = torch.randn(1, 5, 6).bfloat16().mT.expand(3, 6, 5)
    close(runs(torch.bmm, a, one), a, one, f=torch.bmm)
    assert products.number("computed").value == 9


@pytest.mark.parametrize(("most", "wanted"), [(4096, 1000), (4096, 64), (4096, 0), (32, 64)])
def test_parts_of_long_contractions_have_room_as_in_torchs_calls(products, most, wanted):
    """What is more than the shared workspace is the call's own, and gone after it."""
    products.number("most").value, products.number("wanted").value = most, wanted
    a, b = matrix(8, 64, torch.bfloat16, 0), matrix(64, 24, torch.bfloat16, 1)
    close(runs(torch.mm, a, b), a, b, f=torch.mm)
    assert (products.number("asked").value, products.number("computed").value) == (1, 3)


def test_what_the_library_does_not_get(products):
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    close(runs(torch.mm, a, b), a, b, f=torch.mm)
    x, y = a.bfloat16(), b.bfloat16()
    apart = torch.randn(4, 12).bfloat16()[:, ::2]
    close(runs(torch.mm, apart, y), apart, y, f=torch.mm)
    whole = torch.randn(4, 5).bfloat16()
    close(runs(torch.addmm, whole, x, y), whole, x, y, f=torch.addmm)
    half = lambda c, x, y: torch.addmm(c, x, y, beta=0.5)  # noqa: E731
    close(runs(half, torch.ones(5).bfloat16(), x, y), torch.ones(5), x, y, f=half)
    empty = torch.randn(4, 0).bfloat16()
    assert not runs(torch.mm, empty, torch.randn(0, 5).bfloat16()).any()
    assert products.number("computed").value == 0
    products.number("refuse", ctypes.c_int).value = 1
    close(runs(torch.mm, x, y), x, y, f=torch.mm)
    assert (products.number("asked").value, products.number("computed").value) == (1, 0)


def test_an_operand_at_a_worse_address_goes_to_torch(products):
    """How a product is computed was chosen for addresses as good as those of the first call."""
    base = torch.randn(4 * 8 + 8).bfloat16()
    b = torch.randn(8, 8).bfloat16()
    args = (base[: 4 * 8].view(4, 8), b)
    module, recorder = native().module, Recorder(args, [])
    recorder.step("product", "in the test")
    with recorder:
        y = torch.mm(*args)
    region = module.region(False, None)
    assert module.add(region, args, *recorder.tape([y]).packed())
    for at in (0, 1, 0):
        x = base[at : at + 4 * 8].view(4, 8)
        close(module.run(region, (x, b))[0], x, b, f=torch.mm)
    assert products.number("computed").value == 2
    assert list((ctypes.c_int * 4).in_dll(products.c, "alignment")) == [16] * 4


@pytest.mark.parametrize(
    "exact, other, allowed, rounded",
    [
        (0.01, 0.5, True, True),
        (0.01, 0.5, False, False),  # the process says that sums are not rounded
        (0.01, 0.03, True, False),  # hardly fuller
        (0.5, 4.0, True, False),  # full enough
        (0.0, 4.0, True, False),  # not known
    ],
)
def test_partial_sums_are_rounded_where_all_else_leaves_the_device_idle(products, exact, other, allowed, rounded):
    products.waves(exact, other)
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = allowed
    try:
        a, b = torch.randn(4, 6).bfloat16(), torch.randn(6, 5).bfloat16()
        close(runs(torch.mm, a, b), a, b, f=torch.mm)
    finally:
        settings.allow_bf16_reduced_precision_reduction = before
    assert bool(products.number("rounded", ctypes.c_int).value) is rounded
    assert products.number("computed").value == 3


def test_nothing_is_left_behind(products):
    before = products.number("alive").value
    for _ in range(3):
        runs(torch.mm, torch.randn(3, 4).bfloat16(), torch.randn(4, 2).bfloat16())
    assert products.number("alive").value == before
