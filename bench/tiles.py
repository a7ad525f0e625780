"""Hand-written tile kernels through the C++ back end, beside PyTorch: what generated code can reach.

    python bench/tiles.py [threads]

Milliseconds, the fastest of calls that alternate between the two.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tilefold.backends.cpp.launch import CppKernel
from tilefold.runtime.executor import build_cached
from tilefold.tile.text import parse

SOFTMAX = """
kernel softmax(R, C)
  dim i = R
  dim j = C
  in x: f32[R, C] unit 1
  out y: f32[R, C] unit 1
  grid i:4
    alloc m: f32[i:4] tile
    alloc t: f32[i:4] tile
    alloc p: f32[i:4, j:size(j)] panel
    m = max over j: x[i, j]
    p = exp(x[i, j] - m[i])
    t = sum over j: p[i, j]
    store y[i, j] over i, j = p[i, j] / t[i]
"""

VARIANCE = """
kernel variance(R, C)
  dim i = R
  dim j = C
  in x: f32[R, C] unit 1
  out y: f32[R] unit 0
  grid i:4
    alloc s: f32[i:4] tile
    alloc v: f32[i:4] tile
    s = sum over j: x[i, j]
    v = sum over j: (x[i, j] - s[i] / C) ** 2
    store y[i] over i = v[i] / C
"""

ATTENTION = """
kernel attention(B, H, S, T)
  dim b = B
  dim h = H
  dim i = S
  dim j = T
  dim d = 64
  dim e = 64
  in q: {0}[B, H, S, 64] unit 3
  in k: {0}[B, H, T, 64] unit 3
  in v: {0}[B, H, T, 64] unit 3
  out y: {0}[B, H, S, 64] unit 3
  grid b:1 h:1 i:64
    alloc qt: f32[d:64, i:64] tile
    alloc m: f32[i:64] tile
    alloc t: f32[i:64] tile
    alloc o: f32[i:64, e:64] tile
    qt = q[b, h, i, d] * 0.125
    fill m = -inf
    fill t = 0.0
    fill o = 0.0
    for j:128{1}
      alloc s: f32[j:128, i:64] tile
      alloc mn: f32[i:64] tile
      alloc a: f32[i:64] tile
      s = gemm over d: k[b, h, j, d] * qt[d, i]
{2}      mn = m[i]
      mn max= over j: s[j, i]
      a = exp(where(m[i] == -inf, 0.0, m[i]) - where(mn[i] == -inf, 0.0, mn[i]))
      m = mn[i]
      s = exp(s[j, i] - where(m[i] == -inf, 0.0, m[i]))
      t = t[i] * a[i]
      t sum= over j: s[j, i]
      o = o[i, e] * a[i]
      o gemm= over j: s[j, i] * v[b, h, j, e]
    store y[b, h, i, e] over i, e = o[i, e] / t[i]
"""


def attention(dtype: str, causal: bool) -> str:
    """Text of a fused attention kernel."""
    if not causal:
        return ATTENTION.format(dtype, "", "")
    mask = "      s = where(j <= i, s[j, i], -inf)\n"
    return ATTENTION.format(dtype, " in 0 .. minimum(size(j), tile_stop(i))", mask)


def duel(name: str, ours: Callable[[], object], theirs: Callable[[], object], rival: str, seconds: float = 1.0) -> None:
    """Time both in turns and print a row."""
    ours(), theirs()
    best, end = [float("inf")] * 2, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for n, f in enumerate((ours, theirs)):
            start = time.perf_counter()
            f()
            best[n] = min(best[n], time.perf_counter() - start)
    print(f"{name:34}{best[0] * 1e3:8.2f}{best[1] * 1e3:8.2f} {rival:6}{best[1] / best[0]:6.2f}x")


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    print(f"{torch.get_num_threads()} threads\n{'':34}    ours  theirs           ratio")
    x, y, out = torch.randn(1024, 8192), torch.empty(1024, 8192), torch.empty(1024)
    syms = {"R": 1024, "C": 8192}
    softmax, variance = (CppKernel(parse(t), build_cached) for t in (SOFTMAX, VARIANCE))
    duel("softmax 1024 x 8192", lambda: softmax({"x": x, "y": y}, syms), lambda: torch.softmax(x, -1), "eager")
    torch.testing.assert_close(y, x.softmax(-1))
    duel("variance 1024 x 8192", lambda: variance({"x": x, "y": out}, syms), lambda: x.var(-1, correction=0), "eager")
    torch.testing.assert_close(out, x.var(-1, correction=0))
    for dtype, kind in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        for causal in (False, True):
            run = CppKernel(parse(attention(dtype, causal)), build_cached)
            q, k, v = (torch.randn(1, 12, 1024, 64, dtype=kind) for _ in range(3))
            o, sizes = torch.empty_like(q), {"B": 1, "H": 12, "S": 1024, "T": 1024}
            args = {"q": q, "k": k, "v": v, "y": o}
            name = f"attention {dtype} 12 x 1024 x 64{' causal' if causal else ''}"
            duel(
                name,
                lambda run=run, args=args, sizes=sizes: run(args, sizes),
                lambda q=q, k=k, v=v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c),
                "sdpa",
            )
            torch.testing.assert_close(
                o, F.scaled_dot_product_attention(q, k, v, is_causal=causal), atol=2e-2, rtol=2e-2
            )


if __name__ == "__main__":
    main()
