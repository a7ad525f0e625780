"""Tile matrix products of one thread: Tilefold's micro-kernel, torch.mm (MKL or oneDNN), brgemm.

    python bench/microkernel.py

GF/s of C[M, N] = A[M, K] B[K, N] in f32 on operands that stay in cache, best of several runs, beside
the FMA peak of the core measured by a loop of independent multiply-adds. brgemm is the
micro-kernel interface that libtorch exports; it runs in a process of its own, for it ends the
process where it does not support the machine. Layouts: n row-major, t transposed.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tilefold.algebra.dtypes import DType
from tilefold.backends.cpp.contract import GEMM_ENTRY, gemm_source
from tilefold.backends.cpp.launch import build_uncached

SIZES = [
    (64, 64, 64), (64, 128, 64), (128, 64, 64), (128, 64, 128), (64, 256, 256), (96, 512, 256), (64, 64, 384),
    (128, 512, 64),
]  # fmt: skip
LAYOUTS = ("nn", "tn", "nt")
BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb"
PEAK = """
#include <tilefold_simd.h>
extern "C" TF_EXPORT float peak(int64_t n, const float* start) {
  typedef tf::V<float, tf::kLanes> vec;
  vec t[12];
  const vec a = tf::load_full<tf::kLanes>(start), b = tf::load_full<tf::kLanes>(start + tf::kLanes);
  TF_UNROLL
  for (int i = 0; i < 12; ++i) t[i] = a;
  for (int64_t k = 0; k < n; ++k)
    TF_UNROLL
    for (int i = 0; i < 12; ++i) {
      t[i] = t[i] * a + b;
      __asm__ volatile("" : "+v"(t[i].r));
    }
  float s = 0;
  TF_UNROLL
  for (int i = 0; i < 12; ++i) s += tf::lane(t[i], 0);
  return s;
}
extern "C" TF_EXPORT int64_t lanes() { return tf::kLanes; }
"""


def best(f: Callable[[], object], seconds: float = 0.15) -> float:
    """Seconds of the fastest of many calls."""
    f()
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        f()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def operands(m: int, n: int, k: int, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a = torch.randn(m, k) if layout[0] == "n" else torch.randn(k, m).t()
    b = torch.randn(k, n) if layout[1] == "n" else torch.randn(n, k).t()
    return a, b, torch.empty(m, n)


def own(path: Path) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], object]]:
    """The compiled multiplication as a call on tensors."""
    f = getattr(ctypes.CDLL(str(path)), GEMM_ENTRY)
    f.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64] * 3, ctypes.c_bool]
    f.restype = None

    def bind(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], object]:
        parts = [x for t in (a, b, c) for x in (t.data_ptr(), *t.stride())]
        return lambda: f(a.shape[0], b.shape[1], a.shape[1], *parts, False)

    return bind


def brgemm(m: int, n: int, k: int) -> float:
    """Seconds of libtorch's brgemm on row-major operands."""
    lib = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    f = getattr(lib, BRGEMM)
    f.argtypes = [*[ctypes.c_int64] * 6, ctypes.c_bool, *[ctypes.c_void_p] * 3, ctypes.c_bool]
    f.restype = None
    a, b, c = operands(m, n, k, "nn")
    seconds = best(lambda: f(m, n, k, k, n, n, False, a.data_ptr(), b.data_ptr(), c.data_ptr(), False))
    torch.testing.assert_close(c, a @ b, atol=1e-3, rtol=1e-3)
    return seconds


def brgemm_apart(m: int, n: int, k: int) -> str:
    """GF/s of brgemm in a process of its own, or that it does not run here."""
    words = [sys.executable, __file__, "brgemm", str(m), str(n), str(k)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"{2 * m * n * k / float(done.stdout) / 1e9:7.1f}" if done.returncode == 0 else "     no"


def main() -> None:
    torch.set_num_threads(1)
    peak = ctypes.CDLL(str(build_uncached(PEAK, "peak")))
    peak.peak.argtypes, peak.peak.restype = (ctypes.c_int64, ctypes.c_void_p), ctypes.c_float
    start = torch.full((64,), 0.5)
    lanes, steps = int(peak.lanes()), 1_000_000
    top = 2 * 12 * lanes * steps / best(lambda: peak.peak(steps, start.data_ptr())) / 1e9
    print(f"one thread, {lanes} lanes; FMA peak {top:.0f} GF/s\n")
    print("    M    N    K  layout     own  of peak  torch.mm  brgemm")
    bind = own(build_uncached(gemm_source((DType.F32, DType.F32, DType.F32)), "gemm"))
    for m, n, k in SIZES:
        for layout in LAYOUTS:
            a, b, c = operands(m, n, k, layout)
            flops = 2 * m * n * k / 1e9
            mine, theirs = flops / best(bind(a, b, c)), flops / best(lambda a=a, b=b, c=c: torch.mm(a, b, out=c))
            third = brgemm_apart(m, n, k) if layout == "nn" else "      -"
            print(f"{m:5}{n:5}{k:5}  {layout:6}{mine:8.1f}{mine / top:8.0%}{theirs:10.1f} {third}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["brgemm"]:
        print(brgemm(*(int(x) for x in sys.argv[2:5])))
    else:
        main()
