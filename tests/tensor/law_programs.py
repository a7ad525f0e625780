"""Random programs in index notation for the laws, and the comparison before and after."""

from __future__ import annotations

import random

import torch

from tilefold.algebra.expr import Const
from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse

SIZES = {"i": 6, "j": 8, "k": 5, "l": 12}


def inputs_of(p: Program, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float64 arguments; integers are labels below 14, one of them out of range."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for i in p.inputs:
        shape = [int(e.value) for e in i.shape if isinstance(e, Const)]
        if i.dtype.is_float:
            out[i.name] = torch.randn(shape, generator=gen, dtype=torch.float64)
        else:
            out[i.name] = torch.randint(0, 12, shape, generator=gen)
    return out


def same(p: Program, q: Program) -> None:
    """Both give the same results in float64 (axes may be cut, memory is the same)."""
    given = inputs_of(p)
    a, b = run(p, given, exact=True), run(q, given, exact=True)
    assert p.outputs == q.outputs
    for name in p.outputs:
        torch.testing.assert_close(a[name].flatten(), b[name].flatten(), rtol=1e-9, atol=1e-9)


def random_program(seed: int) -> Program:
    """A norm-like chain between products with random factors, pairs, statistics and gradients."""
    r = random.Random(seed)
    head = [f"program random{seed}()"]
    head += [
        "input x: f32[6, 5]", "input z: f32[6, 8]", "input g: f32[8]", "input b: f32[8]", "input c: f32[6]",
        "input w: f32[5, 8]", "input u: f32[8, 12]", "input v: f32[8, 12]", "input dy: f32[6, 12]",
        "input dz: f32[6, 12]", "input t: i64[6]", "dim i = 6", "dim j = 8", "dim k = 5", "dim l = 12", "dim m = 12",
    ]  # fmt: skip
    scale = r.choice(["rs[i]", "c[i]", "rs[i] * g[j]", "g[j]", "c[i] * 0.5"])
    shift = r.choice(["", " - mu[i]", " - mu[i] * g[j]", " + b[j]"])
    combine = r.choice(["sigmoid(p[i, l]) * p[i, l] * n[i, l]", "p[i, l] + n[i, l]", "maximum(p[i, l], n[i, l])"])
    body = [
        "h0[i, j]: f32 = sum[k] x[i, k] * w[k, j]",
        "h[i, j]: f32 = h0[i, j] + z[i, j]",
        "mu[i]: f32 = sum[j] h[i, j] / 8.0",
        "ss[i]: f32 = sum[j] h[i, j] * h[i, j]",
        "rs[i]: f32 = rsqrt(ss[i] + 1.0)",
        f"a[i, j]: f32 = (h[i, j]{shift}) * {scale}",
        "p[i, l]: f32 = sum[j] a[i, j] * u[j, l]",
        "n[i, l]: f32 = sum[j] a[i, j] * v[j, l]",
        f"y[i, l]: f32 = {combine}",
        "top[i]: f32 = max[l] n[i, l]",
        "den[i]: f32 = sum[l] exp(n[i, l] - top[i])",
        "loss[i]: f32 = log(den[i]) + top[i] - n[i, t[i]]",
        "cnt[i]: f32 = sum[m] where((m == t[i]) & (t[i] != 3), rs[i], 0.0)",
        "da[i, j]: f32 = sum[l] dy[i, l] * u[j, l]",
        "db[i, j]: f32 = sum[l] dz[i, l] * v[j, l]",
        f"s[i]: f32 = sum[j] (da[i, j] + db[i, j]) * {r.choice(['a[i, j]', 'a[i, j] * c[i]'])}",
        "dg[j]: f32 = sum[i] (da[i, j] + db[i, j]) * h[i, j]",
        "dh[i, j]: f32 = (da[i, j] + db[i, j]) * g[j] - s[i] * h[i, j]",
        "rot[i, l]: f32 = where(l < 6, -p[i, l + 6], p[i, l - 6])",
    ]
    return parse("\n  ".join([*head, *body, "return y, loss, cnt, dg, dh, rot"]))
