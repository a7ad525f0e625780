"""Scalar functions of generated code against float64, over all magnitudes and special values."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import tilefold
from tests.backends.cpp.harness import compare
from tilefold.backends.cpp.launch import CppKernel
from tilefold.runtime.executor import build_cached
from tilefold.tile.text import parse

#: units in the last place, against the correctly rounded result
F32 = {
    "exp": 1.5, "exp2": 1.5, "log": 1.0, "tanh": 1.5, "sigmoid": 2.5, "erf": 1.5, "log2": 1.0, "log1p": 1.5,
    "expm1": 1.5, "sin": 1.5, "cos": 1.5, "rsqrt": 2.0, "sqrt": 0.6, "floor": 0.0, "ceil": 0.0, "trunc": 0.0,
    "round": 0.0, "sign": 0.0, "abs": 0.0, "erfinv": 1.0, "lgamma": 1.0,
}  # fmt: skip
F64 = {"exp": 2.0, "log": 2.0, "sigmoid": 3.0, "tanh": 2.0, "erf": 2.0, "log1p": 2.0, "sqrt": 0.6, "exp2": 2.0}


def source(dtype: str, names: tuple[str, ...]) -> str:
    outs = "\n".join(f"  out y_{n}: {dtype}[N] unit 0" for n in names)
    stores = "\n".join(f"    store y_{n}[i] over i = {n}(x[i])" for n in names)
    return f"kernel functions(N)\n  dim i = N\n  in x: {dtype}[N] unit 0\n{outs}\n  grid i:4096\n{stores}\n"


@cache
def f32_results() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Every 9973rd of all f32 bit patterns, and the specials."""
    patterns = torch.arange(0, 2**32, 9973, dtype=torch.int64)
    x = torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 88.72, -103.97, 0.5, 1.5, 2.5, -2.5]
    )
    x = torch.cat([x, special, torch.linspace(-20, 20, 40001)])
    out = {f"y_{n}": torch.empty_like(x) for n in F32}
    CppKernel(parse(source("f32", tuple(F32))), build_cached)({"x": x, **out}, {"N": x.numel()})
    return x, out


@pytest.mark.parametrize("name", F32)
def test_f32_functions(name):
    x, out = f32_results()
    y, exact = out[f"y_{name}"], getattr(torch, name)(x.double())
    want = exact.float()
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.isinf(), want.isinf())
    finite = want.isfinite()
    ulp = torch.exp2(torch.floor(torch.log2(want.abs().double().clamp(min=2.0**-126))) - 23)
    error = ((y.double() - exact).abs() / ulp)[finite]
    assert error.max() <= max(F32[name], 0.0), f"{error.max():.2f} ulp at {x[finite][error.argmax()]}"


def test_f64_functions():
    x = torch.cat([torch.randn(5000, dtype=torch.float64) * s for s in (1e-6, 1, 50, 1e3)])
    x = torch.cat(
        [x, torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 709.7, -745.0, 1e-310], dtype=torch.float64)]
    )
    out = {f"y_{n}": torch.empty_like(x) for n in F64}
    CppKernel(parse(source("f64", tuple(F64))), build_cached)({"x": x, **out}, {"N": x.numel()})
    for n in F64:
        torch.testing.assert_close(
            out[f"y_{n}"], getattr(torch, n)(x), rtol=1e-15 * max(F64[n], 1.0), atol=1e-300, equal_nan=True
        )


BINARY = """
kernel binary(N)
  dim i = N
  in x: f32[N] unit 0
  in y: f32[N] unit 0
  in a: i64[N] unit 0
  in b: i32[N] unit 0
  out p: f32[N]
  out q: f32[N]
  out r: f32[N]
  out mx: f32[N]
  out mn: f32[N]
  out s: f32[N]
  out fd: i64[N]
  out md: i64[N]
  out cmp: bool[N]
  grid i:64
    store p[i] over i = x[i] ** y[i]
    store q[i] over i = x[i] // y[i]
    store r[i] over i = x[i] % y[i]
    store mx[i] over i = maximum(x[i], y[i])
    store mn[i] over i = minimum(x[i], y[i])
    store s[i] over i = x[i] ** 3.0 + abs(y[i]) ** 0.5 + x[i] ** 2
    store fd[i] over i = a[i] // b[i]
    store md[i] over i = a[i] % b[i]
    store cmp[i] over i = ((x[i] < y[i]) | isnan(x[i])) & ~isinf(y[i]) | (a[i] == b[i])
"""


def test_binary_functions():
    torch.manual_seed(0)
    some = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 3.0, -3.0, torch.inf, -torch.inf, torch.nan, 7.25, 1e30])
    x, y = (t.reshape(-1) for t in torch.meshgrid(some, some, indexing="ij"))
    n = x.numel()
    a, b = (
        torch.randint(-50, 50, (n,)),
        torch.randint(1, 9, (n,), dtype=torch.int32) * (1 - 2 * torch.randint(0, 2, (n,))),
    )
    out = {k: torch.empty(n) for k in ("p", "q", "r", "mx", "mn", "s")}
    ints = {k: torch.empty(n, dtype=torch.int64) for k in ("fd", "md")}
    args = {"x": x, "y": y, "a": a, "b": b.int(), **out, **ints, "cmp": torch.empty(n, dtype=torch.bool)}
    compare(BINARY, args, {"N": n})


POWER = """
kernel power(N)
  dim i = N
  in x: f32[N] unit 0
  in y: f32[N] unit 0
  out p: f32[N]
  grid i:4096
    store p[i] over i = x[i] ** y[i]
"""


def test_powers_are_rounded_once_or_nearly():
    gen = torch.Generator().manual_seed(0)
    special = torch.tensor(
        [
            0.0, 1.0, 2.0, 0.5, 3.0, 7.25, 1e30, 1e-30, 1e-45, 3e-39, 1 + 2.0**-23, 1 - 2.0**-24, 16777216.0,
            16777217e3, torch.inf, torch.nan, 0.70710677, 0.70710683, 2.0**127, 2.0**-126, 3.4028235e38,
            150.0, 127.999, 149.5,
        ]
    )  # fmt: skip
    special = torch.cat([special, -special])
    sx, sy = (t.reshape(-1) for t in torch.meshgrid(special, special, indexing="ij"))
    bits = torch.randint(0, 0x7F800000, (100_000,), generator=gen, dtype=torch.int32).view(torch.float32)
    wanted = torch.rand(100_000, generator=gen) * 280 - 152  # the result's exponent
    near = 1 + (torch.rand(100_000, generator=gen) - 0.5) * torch.logspace(-6, 0, 100_000)
    x, y = torch.cat([bits, near]), torch.cat([wanted / bits.log2(), wanted / near.log2()])
    x, y = torch.cat([sx, x]), torch.cat([sy, y.nan_to_num(posinf=1.0, neginf=1.0)])
    p = torch.empty_like(x)
    CppKernel(parse(POWER), build_cached)({"x": x, "y": y, "p": p}, {"N": x.numel()})
    exact = x.double() ** y.double()
    want = exact.float()
    assert torch.equal(p.isnan(), want.isnan())
    assert torch.equal(p.isinf(), want.isinf())
    assert torch.equal(p.signbit()[~want.isnan()], want.signbit()[~want.isnan()])
    finite = want.isfinite()
    ulp = torch.exp2(torch.floor(torch.log2(want.abs().double().clamp(min=2.0**-126))) - 23)
    error = ((p.double() - exact).abs() / ulp)[finite]
    assert error.max() <= 0.75, f"{error.max():.2f} ulp at {x[finite][error.argmax()]}, {y[finite][error.argmax()]}"


QUOTIENT = """
kernel quotients(R, C)
  dim i = R
  dim j = C
  in x: {dtype}[C] unit 0
  in c: {dtype}[R] unit 0
  out y: {dtype}[R, C] unit 1
  grid i:1
    store y[i, j] over i, j = x[j] / c[i]
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quotients_by_one_number_are_the_rounded_ones(dtype):
    gen = torch.Generator().manual_seed(0)
    tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    some = torch.tensor([0.0, 1.0, 3.0, tiny, tiny / 8, huge, huge / 3, 1e-18, 1e18, 1e-20, 1e20, 1 / 3], dtype=dtype)
    some = torch.cat([some, torch.tensor([torch.inf, torch.nan], dtype=dtype)])
    some = torch.cat([some, -some])
    x = torch.cat([some, torch.randn(3001, generator=gen, dtype=dtype)])
    c = torch.cat([some, torch.randn(40, generator=gen, dtype=dtype).exp(), 2 - torch.logspace(-7, -1, 9).to(dtype)])
    y = torch.empty(c.numel(), x.numel(), dtype=dtype)
    text = QUOTIENT.format(dtype="f32" if dtype is torch.float32 else "f64")
    CppKernel(parse(text), build_cached)({"x": x, "c": c, "y": y}, {"R": c.numel(), "C": x.numel()})
    want = x / c[:, None]
    torch.testing.assert_close(y, want, rtol=torch.finfo(dtype).eps, atol=tiny * torch.finfo(dtype).eps, equal_nan=True)
    real = ~want.isnan()
    assert torch.equal(y.signbit()[real], want.signbit()[real])
    usual = want.abs().nan_to_num() > 1e-10
    assert (y[usual] != want[usual]).double().mean() < 1e-4


@pytest.mark.parametrize("divisor", [4.0, -0.125, 2.0**-100, 2.0**100, 1.0, 3.0, 2.0**125, 2.0**-126])
def test_quotients_by_a_constant_are_the_rounded_ones(divisor):
    """Powers of two, by which is multiplied, and others: zeros, denormals, infinities, NaN as divisions have them."""
    tiny, huge = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
    x = torch.tensor(
        [0.0, -0.0, 1.0, 3.0, tiny, tiny / 8, 3 * tiny / 2**20, huge, huge / 3, torch.inf, -torch.inf, torch.nan]
    )
    x = torch.cat([x, -x, torch.randn(501, generator=torch.Generator().manual_seed(0))])[None]
    text = QUOTIENT.format(dtype="f32").replace("x[j] / c[i]", f"x[j] / {divisor!r}")
    y = torch.empty_like(x)
    CppKernel(parse(text), build_cached)({"x": x[0], "c": torch.ones(1), "y": y}, {"R": 1, "C": x.numel()})
    torch.testing.assert_close(y, x / divisor, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(y.signbit(), (x / divisor).signbit())


NARROW = """
kernel narrow(N)
  dim i = N
  in x: f32[N] unit 0
  out a: i8[N] unit 0
  out b: u8[N] unit 0
  out c: i16[N] unit 0
  out d: i8[N] unit 0
  grid i:4096
    store a[i] over i = i8(minimum(maximum(round(x[i]), -128.0), 127.0))
    store b[i] over i = u8(round(minimum(maximum(x[i], 0.0), 1.0) * 255.0))
    store c[i] over i = i16(trunc(minimum(maximum(x[i], -32768.0), 32767.0)))
    store d[i] over i = i8(minimum(maximum(x[i] * x[i], -5000000000.0), 5000000000.0))
"""


def test_bounded_numbers_become_narrow_integers():
    """Those known to be of 32 bits go that way, others by 64 bits: of infinities and NaN the low bits count."""
    x = torch.cat([torch.randn(500), 200 * torch.randn(500), 3e4 * torch.randn(500), torch.arange(-300, 300) / 2])
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-40, 1e4, 7e4])])
    n = x.numel()
    a, b = torch.empty(n, dtype=torch.int8), torch.empty(n, dtype=torch.uint8)
    c, d = torch.empty(n, dtype=torch.int16), torch.empty(n, dtype=torch.int8)
    kernel = CppKernel(parse(NARROW), build_cached)
    kernel({"x": x, "a": a, "b": b, "c": c, "d": d}, {"N": n})
    assert torch.equal(a, x.round().clamp(-128, 127).to(torch.int64).to(torch.int8))
    assert torch.equal(b, (x.clamp(0, 1) * 255).round().to(torch.int64).to(torch.uint8))
    assert torch.equal(c, x.clamp(-32768, 32767).to(torch.int64).to(torch.int16))
    assert torch.equal(d, (x * x).clamp(-5e9, 5e9).to(torch.int64).to(torch.int8))
    assert kernel.source.count("to<int64_t>") == 1


CASTS = """
kernel casts(N)
  dim i = N
  in x: f32[N] unit 0
  out e4: e4m3[N] unit 0
  out e5: e5m2[N] unit 0
  out h: f16[N] unit 0
  out b: bf16[N] unit 0
  grid i:4096
    store e4[i] over i = x[i]
    store e5[i] over i = x[i]
    store h[i] over i = x[i]
    store b[i] over i = x[i]
"""
LOADS = """
kernel loads(N)
  dim i = N
  in e4: e4m3[256] unit 0
  in e5: e5m2[256] unit 0
  in h: f16[N] unit 0
  in b: bf16[N] unit 0
  out y: f32[4, N]
  grid i:4096
    store y[0, i] over i = e4[i % 256]
    store y[1, i] over i = e5[i % 256]
    store y[2, i] over i = h[i]
    store y[3, i] over i = b[i]
"""


def test_narrow_stores_round_as_torch():
    patterns = torch.arange(0, 2**32, 40009, dtype=torch.int64)
    x = torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)
    near = torch.arange(0, 0x10000, dtype=torch.int64).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat([x, near, torch.linspace(-500, 500, 20001)])
    kinds = {"e4": torch.float8_e4m3fn, "e5": torch.float8_e5m2, "h": torch.float16, "b": torch.bfloat16}
    out = {k: torch.empty(x.numel(), dtype=t) for k, t in kinds.items()}
    CppKernel(parse(CASTS), build_cached)({"x": x, **out}, {"N": x.numel()})
    for k, t in kinds.items():
        got, want = out[k].float(), x.to(t).float()
        assert torch.equal(got.isnan(), want.isnan()), k
        ok = ~want.isnan()
        assert torch.equal(got[ok], want[ok]), (k, x[ok][(got != want)[ok]][:5])


def test_narrow_loads_are_exact():
    all16, all8 = torch.arange(0, 2**16).to(torch.int16), torch.arange(0, 256).to(torch.uint8)
    ins = {
        "e4": all8.view(torch.float8_e4m3fn), "e5": all8.view(torch.float8_e5m2),
        "h": all16.view(torch.float16), "b": all16.view(torch.bfloat16),
    }  # fmt: skip
    y = torch.empty(4, 2**16)
    CppKernel(parse(LOADS), build_cached)({**ins, "y": y}, {"N": 2**16})
    for n, k in enumerate(ins):
        want = ins[k].float().repeat(2**16 // ins[k].numel())
        torch.testing.assert_close(y[n], want, rtol=0, atol=0, equal_nan=True)


def test_a_square_that_is_subtracted_is_rounded_first():
    """A mean of squares less the square of the mean, of one element: 0, not what a fused multiply-subtract leaves."""
    m = torch.randn(100, 33, generator=torch.Generator().manual_seed(0))
    for x in (m, m[:, :3]):
        assert tilefold.fuse(lambda s, m: torch.relu(s - m * m))(x * x, x).eq(0).all()
