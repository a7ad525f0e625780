"""Fused programs in index notation that the planner's predictions are compared with: 20 families, three sizes each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse


@dataclass(frozen=True, slots=True)
class Family:
    """One fused kernel with sizes left open; `sizes` are the values of its symbols that are tried."""

    name: str
    text: str
    sizes: tuple[Mapping[str, int], ...]

    def program(self) -> Program:
        """The parsed program."""
        return parse(self.text)


def _rows(body: str, out: str, *inputs: str) -> str:
    more = "".join(f"  input {i}\n" for i in inputs)
    lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
    return f"program rows(n, c)\n  input x: f32[n, c]\n{more}  dim i = n\n  dim j = c\n{lines}\n  return {out}\n"


def _attention(scores: str, keys: str = "n") -> str:
    return f"""
program attention(n, l)
  input q: f32[4, n, 64]
  input k: f32[4, l, 64]
  input v: f32[4, l, 64]
  dim h = 4
  dim i = n
  dim j = l
  dim d = 64
  dim e = 64
  s[h, i, j]: f32 = sum[d] q[h, i, d] * k[h, j, d]
  c[h, i, j]: f32 = {scores}
  m[h, i]: f32 = max[j] c[h, i, j]
  p[h, i, j]: f32 = exp(c[h, i, j] - m[h, i])
  t[h, i]: f32 = sum[j] p[h, i, j]
  o[h, i, e]: f32 = sum[j] p[h, i, j] / t[h, i] * v[h, j, e]
  return o
"""


def _gemm(body: str, out: str, *inputs: str) -> str:
    more = "".join(f"  input {i}\n" for i in inputs)
    lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
    head = f"program gemm(n)\n  input x: f32[n, 256]\n  input w: f32[256, 256]\n{more}"
    return f"{head}  dim i = n\n  dim j = 256\n  dim k = 256\n{lines}\n  return {out}\n"


_ROWS = ({"n": 64, "c": 8192}, {"n": 512, "c": 512}, {"n": 4096, "c": 96})
_ATTENTION = ({"n": 64, "l": 256}, {"n": 256, "l": 256}, {"n": 384, "l": 1024})
_DECODE = ({"n": 1, "l": 1024}, {"n": 4, "l": 2048}, {"n": 16, "l": 512})
_GEMMS = ({"n": 32}, {"n": 192}, {"n": 1024})

FAMILIES: tuple[Family, ...] = (
    Family(
        "softmax",
        _rows(
            """m[i]: f32 = max[j] x[i, j]
            e[i, j]: f32 = exp(x[i, j] - m[i])
            t[i]: f32 = sum[j] e[i, j]
            y[i, j]: f32 = e[i, j] / t[i]""",
            "y",
        ),
        _ROWS,
    ),
    Family(
        "logsumexp",
        _rows(
            """m[i]: f32 = max[j] x[i, j]
            t[i]: f32 = sum[j] exp(x[i, j] - m[i])
            y[i]: f32 = m[i] + log(t[i])""",
            "y",
        ),
        _ROWS,
    ),
    Family(
        "variance",
        _rows(
            """s[i]: f32 = sum[j] x[i, j]
            v[i]: f32 = sum[j] (x[i, j] - s[i] / size(j)) * (x[i, j] - s[i] / size(j))
            y[i]: f32 = v[i] / (size(j) - 1)""",
            "y",
        ),
        _ROWS,
    ),
    Family(
        "layer norm",
        _rows(
            """s[i]: f32 = sum[j] x[i, j]
            v[i]: f32 = sum[j] (x[i, j] - s[i] / size(j)) * (x[i, j] - s[i] / size(j))
            y[i, j]: f32 = (x[i, j] - s[i] / size(j)) * rsqrt(v[i] / size(j) + 1e-05) * g[j] + b[j]""",
            "y",
            "g: f32[c]",
            "b: f32[c]",
        ),
        _ROWS,
    ),
    Family(
        "RMS norm",
        _rows(
            """s[i]: f32 = sum[j] x[i, j] * x[i, j]
            y[i, j]: f32 = x[i, j] * rsqrt(s[i] / size(j) + 1e-05) * g[j]""",
            "y",
            "g: f32[c]",
        ),
        _ROWS,
    ),
    Family(
        "sum and maximum",
        _rows(
            """s[i]: f32 = sum[j] x[i, j] * y[i, j]
            m[i]: f32 = max[j] abs(x[i, j])""",
            "s, m",
            "y: f32[n, c]",
        ),
        _ROWS,
    ),
    Family("argmax", _rows("a[i]: i64 = argmax[j] x[i, j]", "a"), _ROWS),
    Family("sums of columns", _rows("s[j]: f32 = sum[i] x[i, j] * x[i, j]", "s"), _ROWS),
    Family(
        "GELU of a sum",
        _rows(
            "y[i, j]: f32 = (x[i, j] + r[i, j]) * 0.5 * (1.0 + erf((x[i, j] + r[i, j]) * 0.70710678))",
            "y",
            "r: f32[n, c]",
        ),
        _ROWS,
    ),
    Family(
        "scaled residual",
        _rows("y[i, j]: f32 = x[i, j] * g[j] + r[i, j]", "y", "g: f32[c]", "r: f32[n, c]"),
        _ROWS,
    ),
    Family("attention", _attention("s[h, i, j] * 0.125"), _ATTENTION),
    Family("attention, causal", _attention("where(j <= i, s[h, i, j] * 0.125, -inf)"), _ATTENTION),
    Family("attention, soft cap", _attention("tanh(s[h, i, j] * 0.0125) * 10.0"), _ATTENTION),
    Family("attention, decode", _attention("s[h, i, j] * 0.125"), _DECODE),
    Family(
        "routing",
        """
program routing(n)
  input x: f32[n, 256]
  input w: f32[256, 64]
  dim i = n
  dim k = 256
  dim e = 64
  dim r = 2
  z[i, e]: f32 = sum[k] x[i, k] * w[k, e]
  m[i]: f32 = max[e] z[i, e]
  t[i]: f32 = sum[e] exp(z[i, e] - m[i])
  g[i, r]: f32, gi[i, r]: i64 = topk[e; r] exp(z[i, e] - m[i]) / t[i]
  return g, gi
""",
        _GEMMS,
    ),
    Family(
        "RMS norm and product",
        _gemm(
            """s[i]: f32 = sum[k] x[i, k] * x[i, k]
            y[i, j]: f32 = sum[k] x[i, k] * rsqrt(s[i] / size(k) + 1e-05) * g[k] * w[k, j]""",
            "y",
            "g: f32[256]",
        ),
        _GEMMS,
    ),
    Family(
        "quantise and product",
        _gemm(
            """m[i]: f32 = max[k] abs(x[i, k])
            q[i, k]: f32 = round(x[i, k] * 127.0 / m[i])
            c[i, j]: f32 = sum[k] q[i, k] * w[k, j]
            y[i, j]: f32 = c[i, j] * m[i] / 127.0""",
            "y",
        ),
        _GEMMS,
    ),
    Family(
        "product, bias, GELU",
        _gemm(
            """c[i, j]: f32 = sum[k] x[i, k] * w[k, j]
            y[i, j]: f32 = (c[i, j] + b[j]) * 0.5 * (1.0 + erf((c[i, j] + b[j]) * 0.70710678))""",
            "y",
            "b: f32[256]",
        ),
        _GEMMS,
    ),
    Family(
        "SwiGLU",
        _gemm(
            """a[i, j]: f32 = sum[k] x[i, k] * w[k, j]
            b[i, j]: f32 = sum[k] x[i, k] * u[k, j]
            y[i, j]: f32 = a[i, j] * sigmoid(a[i, j]) * b[i, j]""",
            "y",
            "u: f32[256, 256]",
        ),
        _GEMMS,
    ),
    Family(
        "product and log-sum-exp",
        _gemm(
            """z[i, j]: f32 = sum[k] x[i, k] * w[k, j]
            m[i]: f32 = max[j] z[i, j]
            t[i]: f32 = sum[j] exp(z[i, j] - m[i])
            y[i]: f32 = m[i] + log(t[i])""",
            "y",
        ),
        _GEMMS,
    ),
)
