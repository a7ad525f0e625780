"""The matrix multiplication: all edge sizes, layouts and types; and as a statement of kernels."""

from __future__ import annotations

import ctypes
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.cpp.harness import compare, strided
from tilefold.algebra.dtypes import DType
from tilefold.backends.cpp.contract import GEMM_ENTRY, gemm_name, gemm_source
from tilefold.backends.cpp.launch import build_uncached
from tilefold.runtime.executor import build_cached

TYPES = (
    (DType.F32, DType.F32, DType.F32),
    (DType.BF16, DType.F32, DType.F32),
    (DType.F64, DType.F64, DType.F64),
    (DType.I8, DType.I8, DType.I64),
)


@cache
def multiply(types, arch=None):
    """The multiplication of `types`, bound through ctypes."""
    path = (build_uncached if arch else build_cached)(gemm_source(types), gemm_name(types))
    f = getattr(ctypes.CDLL(str(path)), GEMM_ENTRY)
    f.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64] * 3, ctypes.c_bool]
    f.restype = None
    return f


def matrix(rows, cols, layout, dtype):
    """A matrix with unit stride along columns, rows or neither, surrounded by NaN where there is room."""
    if layout == "rows":
        x = torch.randn(rows, cols)
    elif layout == "columns":
        x = torch.randn(cols, rows).t()
    else:
        x = torch.randn(rows, cols, 3)[:, :, 1]
    if not dtype.is_floating_point:
        x = x * 10
    return x if dtype is torch.float32 else x.to(dtype)


def check(types, m, n, k, layouts, accumulate, arch=None):
    kinds = [t.torch_dtype for t in types]
    a, b, c = (matrix(r, s, lay, t) for (r, s), lay, t in zip(((m, k), (k, n), (m, n)), layouts, kinds, strict=True))
    want = a.double() @ b.double() + (c.double() if accumulate else 0)
    parts = [x for t in (a, b, c) for x in (t.data_ptr(), *t.stride())]
    multiply(types, arch)(m, n, k, *parts, accumulate)
    torch.testing.assert_close(c.double(), want, atol=1e-4 * max(k, 1) ** 0.5, rtol=1e-5)


LAYOUT = st.sampled_from(["rows", "columns", "neither"])


@pytest.mark.parametrize("types", TYPES, ids=gemm_name)
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 13, 17, 40, 97]),
    st.sampled_from([0, 1, 2, 3, 5, 8, 15, 16, 17, 33, 70]),
    st.sampled_from([0, 1, 2, 7, 8, 9, 64, 255, 257, 600]),
    st.tuples(LAYOUT, LAYOUT, LAYOUT),
    st.booleans(),
)
def test_every_edge(types, m, n, k, layouts, accumulate):
    check(types, m, n, k, layouts, accumulate)


def test_the_portable_code_runs(monkeypatch):
    """Plain x86-64: no AVX; the same results."""
    monkeypatch.setenv("TILEFOLD_ARCH", "x86-64")
    for m, n, k in ((6, 8, 5), (13, 21, 70), (1, 33, 9), (40, 3, 17)):
        for layouts in (("rows", "rows", "rows"), ("rows", "columns", "rows"), ("columns", "rows", "columns")):
            check(TYPES[0], m, n, k, layouts, False, "x86-64")


def test_operands_are_not_read_outside():
    """NaN around the operands stays outside the result."""
    whole = torch.full((40, 40), torch.nan)
    for m, n, k in ((5, 9, 7), (8, 16, 8), (1, 3, 11), (20, 1, 6)):
        a, b = whole.clone()[2 : 2 + m, 3 : 3 + k], whole.clone()[1 : 1 + k, 5 : 5 + n]
        a.copy_(torch.randn(m, k))
        b.copy_(torch.randn(k, n))
        surround = torch.full((40, 40), 7.0)
        c = surround[4 : 4 + m, 6 : 6 + n]
        parts = [x for t in (a, b, c) for x in (t.data_ptr(), *t.stride())]
        multiply(TYPES[0])(m, n, k, *parts, False)
        torch.testing.assert_close(c, a @ b)
        c.fill_(7.0)
        assert (surround == 7.0).all()


PRODUCTS = """
kernel products(B, M, N, K)
  dim b = B
  dim m = M
  dim n = N
  dim k = K
  dim r = 3
  in x: f32[B, M, K] unit 2
  in w: bf16[N, K] unit 1
  in z: f32[B, M, 3, K]
  in u: f32[3, N, K + 2]
  in g: i64[N]
  out y: f32[B, M, N] unit 2
  out c: f32[B, M, N]
  out p: bf16[B, M, N]
  grid b:1 m:8
    alloc s: f32[m:8, n:size(n)] panel
    alloc t: f32[n:size(n), m:8] panel
    alloc h: bf16[m:8, n:size(n)] panel
    fill t = 1.0
    for k:16
      t gemm= over k: w[n, k] * x[b, m, k]
    store y[b, m, n] over m, n = t[n, m]
    s = gemm over r, k: z[b, m, r, k] * u[r, n, k + 2]
    store c[b, m, n] over m, n = s[m, n]
    h = gemm over k: x[b, m, k] * u[1, n // 2, k]
    store p[b, m, n] over m, n = h[m, n]
"""


@pytest.mark.parametrize("sizes", [(2, 9, 20, 33), (1, 1, 40, 16), (1, 17, 1, 5), (2, 3, 4, 0), (1, 0, 3, 2)])
def test_gemm_statements(sizes):
    b, m, n, k = sizes
    torch.manual_seed(0)
    args = {
        "x": torch.randn(b, m, k), "w": torch.randn(n, k).bfloat16(), "z": torch.randn(b, m, 3, k),
        "u": torch.randn(3, n, k + 2), "g": torch.zeros(n, dtype=torch.int64), "y": torch.empty(b, m, n),
        "c": torch.empty(b, m, n), "p": torch.empty(b, m, n, dtype=torch.bfloat16),
    }  # fmt: skip
    compare(PRODUCTS, args, dict(zip("BMNK", sizes, strict=True)), atol=3e-2, rtol=2e-2)


HEADS = """
kernel heads(B, S, H)
  dim b = B
  dim s = S
  dim h = H
  dim d = 5
  dim n = 20
  dim g = 3
  dim e = 7
  in x: f32[B, S, H, 5]
  in w: f32[20, H, 5]
  in u: f32[3, 7, 20]
  out y: f32[B, S, 20]
  out z: f32[B, S, 3, 7]
  grid b:1 s:8
    alloc t: f32[b:1, s:8, n:20] tile
    alloc v: f32[b:1, s:8, g:3, e:7] tile
    t = gemm over h, d: x[b, s, h, d] * w[n, h, d]
    v = gemm over n: t[b, s, n] * u[g, e, n]
    v gemm= over n: t[b, s, n] * u[g, e, n]
    store y[b, s, n] over b, s, n = t[b, s, n]
    store z[b, s, g, e] over b, s, g, e = v[b, s, g, e]
"""


@pytest.mark.parametrize("sizes", [(2, 9, 4), (1, 1, 1), (3, 8, 12), (1, 3, 0)])
@pytest.mark.parametrize("turned", [False, True])
def test_dims_that_memory_has_as_one(sizes, turned):
    """Contracted dims and columns side by side: one product where they are contiguous, one an index where not."""
    b, s, h = sizes
    torch.manual_seed(0)
    x, w, u = torch.randn(b, s, h, 5), torch.randn(20, h, 5), torch.randn(3, 7, 20)
    if turned:
        x, w, u = strided(x, 2, 0, 1, 3), strided(w, 1, 0, 2), strided(u, 1, 0, 2)
    args = {"x": x, "w": w, "u": u, "y": torch.empty(b, s, 20), "z": torch.empty(b, s, 3, 7)}
    compare(HEADS, args, dict(zip("BSH", sizes, strict=True)), atol=1e-4, rtol=1e-4)


def test_a_part_of_a_dim_is_not_one_with_others():
    """Tiles of what is contracted: the loop's range is not all of the dim, though strides say that memory has it so."""
    text = """
kernel parts(M)
  dim m = M
  dim h = 3
  dim d = 12
  dim n = 9
  in x: f32[M, 3, 12] unit 2
  in w: f32[9, 3, 12] unit 2
  out y: f32[M, 9] unit 1
  grid m:8
    alloc t: f32[m:8, n:9] tile
    fill t = 0.0
    for d:5
      t gemm= over h, d: x[m, h, d] * w[n, h, d]
    store y[m, n] over m, n = t[m, n]
"""
    torch.manual_seed(0)
    args = {"x": torch.randn(11, 3, 12), "w": torch.randn(9, 3, 12), "y": torch.empty(11, 9)}
    compare(text, args, {"M": 11}, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(args["y"], torch.einsum("mhd,nhd->mn", args["x"], args["w"]), atol=1e-4, rtol=1e-4)
