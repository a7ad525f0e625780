"""Tensor programs in text form that the block tests fuse, and inputs for them."""

from __future__ import annotations

import torch

from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse

SOFTMAX = """
program softmax(n)
  input x: f32[5, n]
  dim i = 5
  dim j = n
  m[i]: f32 = max[j] x[i, j]
  e[i, j]: f32 = exp(x[i, j] - m[i])
  t[i]: f32 = sum[j] e[i, j]
  y[i, j]: f32 = e[i, j] / t[i]
  return y
"""

ATTENTION = """
program attention(n)
  input q: f32[2, 3, n, 8]
  input k: f32[2, 3, n, 8]
  input v: f32[2, 3, n, 8]
  dim b = 2
  dim h = 3
  dim i = n
  dim j = n
  dim d = 8
  dim e = 8
  s[b, h, i, j]: f32 = sum[d] q[b, h, i, d] * k[b, h, j, d]
  c[b, h, i, j]: f32 = where(j <= i, s[b, h, i, j] * 0.35, -inf)
  m[b, h, i]: f32 = max[j] c[b, h, i, j]
  p[b, h, i, j]: f32 = exp(c[b, h, i, j] - m[b, h, i])
  t[b, h, i]: f32 = sum[j] p[b, h, i, j]
  o[b, h, i, e]: f32 = sum[j] p[b, h, i, j] / t[b, h, i] * v[b, h, j, e]
  return o
"""

VARIANCE = """
program variance(n)
  input x: f32[6, n]
  dim i = 6
  dim l = n
  s[i]: f32 = sum[l] x[i, l]
  v[i]: f32 = sum[l] (x[i, l] - s[i] / size(l)) * (x[i, l] - s[i] / size(l))
  y[i]: f32 = v[i] / (size(l) - 1)
  return y
"""

ROUTING = """
program routing(n)
  input x: f32[n, 12]
  input w: f32[12, 10]
  dim s = n
  dim k = 12
  dim e = 10
  dim r = 3
  z[s, e]: f32 = sum[k] x[s, k] * w[k, e]
  m[s]: f32 = max[e] z[s, e]
  t[s]: f32 = sum[e] exp(z[s, e] - m[s])
  g[s, r]: f32, gi[s, r]: i64 = topk[e; r] exp(z[s, e] - m[s]) / t[s]
  return g, gi
"""

RMSNORM_GEMM = """
program rmsnorm_gemm(n)
  input x: f32[n, 40]
  input g: f32[40]
  input w: f32[24, 40]
  dim m = n
  dim k = 40
  dim o = 24
  s[m]: f32 = sum[k] x[m, k] * x[m, k]
  y[m, o]: f32 = sum[k] x[m, k] * rsqrt(s[m] / size(k) + 1e-05) * g[k] * w[o, k]
  return y
"""

LAYERNORM = """
program layernorm(n)
  input x: f32[n, 40]
  input g: f32[40]
  dim m = n
  dim k = 40
  s[m]: f32 = sum[k] x[m, k]
  v[m]: f32 = sum[k] (x[m, k] - s[m] / size(k)) * (x[m, k] - s[m] / size(k))
  y[m, k]: f32 = (x[m, k] - s[m] / size(k)) * rsqrt(v[m] / size(k) + 1e-05) * g[k]
  return y
"""

QUANT_GEMM = """
program quant_gemm(n)
  input a: f32[n, 40]
  input w: f32[40, 24]
  dim m = n
  dim k = 40
  dim o = 24
  x[m]: f32 = max[k] abs(a[m, k])
  q[m, k]: e4m3 = a[m, k] * 448.0 / x[m]
  c[m, o]: f32 = sum[k] q[m, k] * w[k, o]
  y[m, o]: f32 = c[m, o] * x[m] / 448.0
  return y
"""

REFUSED = """
program refused(n)
  input x: f32[6, n]
  dim i = 6
  dim l = n
  s[i]: f32 = sum[l] x[i, l] * x[i, l]
  y[i]: f32 = sum[l] exp(x[i, l] / sqrt(s[i] / size(l)))
  return y
"""

ARGMAX = """
program arg(n)
  input x: f32[6, n]
  dim i = 6
  dim l = n
  a[i]: i64 = argmax[l] x[i, l]
  b[i]: i64 = argmin[l] x[i, l]
  p[i]: f32 = prod[l] x[i, l]
  return a, b, p
"""

#: Groups by the sum of their two largest, then the best group: a top-k inside the pass over groups.
GROUPED = """
program grouped(n)
  input x: f32[n, 3, 5]
  dim t = n
  dim g = 3
  dim e = 5
  dim k = 2
  v[t, g, k]: f32, at[t, g, k]: i64 = topk[e; k] sigmoid(x[t, g, e])
  s[t, g]: f32 = sum[k] v[t, g, k]
  b[t]: i64 = argmax[g] s[t, g]
  y[t, g]: f32 = where(b[t] == g, s[t, g], 0.0)
  return y, b
"""

#: Places of the largest of each row, inside the pass over rows that adds what they weigh.
PICKED = """
program picked(n)
  input x: f32[n, 20, 33]
  dim t = n
  dim g = 20
  dim e = 33
  at[t, g]: i64 = argmax[e] x[t, g, e] * 2.0
  s[t]: f32 = sum[g] f32(at[t, g]) * x[t, g, 0]
  y[t, g]: f32 = s[t] + f32(at[t, g])
  return y
"""

MEAN_ALL = """
program total(n)
  input x: f32[n, 7]
  dim i = n
  dim l = 7
  s[]: f32 = sum[i, l] x[i, l]
  y[i, l]: f32 = x[i, l] - s / (size(i) * size(l))
  return y
"""

ALL = {
    "softmax": SOFTMAX,
    "attention": ATTENTION,
    "variance": VARIANCE,
    "routing": ROUTING,
    "rmsnorm_gemm": RMSNORM_GEMM,
    "layernorm": LAYERNORM,
    "quant_gemm": QUANT_GEMM,
    "refused": REFUSED,
    "argmax": ARGMAX,
    "grouped": GROUPED,
    "picked": PICKED,
    "mean_all": MEAN_ALL,
}
#: kernels that fusion must arrive at
KERNELS = dict.fromkeys(ALL, 1) | {"mean_all": 2}


def program(name: str) -> Program:
    return parse(ALL[name])


def inputs(p: Program, n: int, seed: int = 0, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Random normal inputs with every symbol equal to n."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for i in p.inputs:
        shape = [getattr(e, "value", n) for e in i.shape]
        out[i.name] = (torch.randn(shape, generator=gen) * scale).to(i.dtype.torch_dtype)
    return out
