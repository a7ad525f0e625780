"""What functions of kernels are off by, run in numpy's float32; and which kernels have them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import made, meta, variant
from tilefold.backends.triton.prelude import FUNCTIONS, needed

UNIT = 2.0**-24


class Tile(np.ndarray):
    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)


def tile(x):
    return np.asarray(x, dtype=np.float32).view(Tile)


def fma(a, b, c):
    return tile(np.float64(a) * np.float64(b) + np.float64(c))


def approximate(text, constraints, given, dtype, is_pure, pack):
    """As right as the machine's: its reciprocal roots are off by 2^-22.9, relatively."""
    (x,) = given
    if text.startswith("lg2.approx.f32"):
        return np.log2(x)
    assert text.startswith("rsqrt.approx.ftz.f32")
    off = np.random.default_rng(0).uniform(-(2.0**-22.9), 2.0**-22.9, x.shape)
    with np.errstate(all="ignore"):
        return tile((1.0 + off) / np.sqrt(np.float64(np.where(np.abs(x) < 2.0**-126, 0.0, x))))


def where(condition, a, b):
    return tile(np.where(condition, a, b))


TL = SimpleNamespace(
    inline_asm_elementwise=approximate, where=where,
    abs=np.abs, exp2=np.exp2, fma=fma, minimum=lambda a, b, propagate_nan: np.minimum(a, np.float32(b)),
    int32=np.int32, float32=np.float32, PropagateNan=SimpleNamespace(ALL=None),
)  # fmt: skip


def function(name):
    space = {"tl": TL, "triton": SimpleNamespace(jit=lambda f: f), "libdevice": SimpleNamespace(mul_rn=np.multiply)}
    exec(needed(FUNCTIONS, code=f"{name}(x)"), space)
    space["tf_reciprocal"] = np.reciprocal
    return space[name]


def test_log1p_of_0_to_1_is_right_to_the_last_place():
    x = tile(np.concatenate([np.logspace(-37, -1, 4000), np.linspace(0.1, 1.0, 20001), [0.0, math.nan]]))
    got, want = function("tf_log1p_unit")(x), np.log1p(np.float64(x))
    assert got[-2] == 0.0 and np.isnan(got[-1])
    assert (np.abs(got - want)[:-2] / want[:-2]).max() < 2.5 * UNIT


def test_erf_is_right_to_few_places():
    x = tile(np.concatenate([np.linspace(-6.0, 6.0, 40001), [0.0, -0.0, math.inf, -math.inf, math.nan]]))
    got, want = function("tf_erf_by_exp")(x), np.array([math.erf(v) for v in np.float64(x)])
    assert np.abs(got - want)[:-1].max() < 2.0**-21 and np.isnan(got[-1])
    assert np.signbit(got[-4]) and not np.signbit(got[-5])


def test_powers_are_right_to_two_places():
    rng = np.random.default_rng(0)
    pow_of = function("tf_pow_of_positive")
    for low, high, most in ((1e-3, 10, 3), (1e-30, 1e30, 1), (0.5, 2, 100), (0.9, 1.1, 500), (1e-10, 1e10, 3)):
        x = tile(np.exp(rng.uniform(math.log(low), math.log(high), 100001)))
        y = tile(rng.uniform(-most, most, x.size))
        want = np.float64(x) ** np.float64(y)
        normal = (want > 1e-37) & (want < 3e38)
        assert (np.abs(pow_of(x, y) - want) / want)[normal].max() < 6 * UNIT


def test_powers_of_what_is_not_normal():
    x = tile([0.0, math.inf, 1e-40, math.nan] * 4)
    y = tile(np.repeat([2.0, -1.5, 0.0, 0.5], 4))
    with np.errstate(all="ignore"):
        got, want = function("tf_pow_of_positive")(x, y), np.float64(x) ** np.float64(y)
    assert np.allclose(got, want.astype(np.float32), rtol=1e-4, atol=0.0, equal_nan=True)


def test_roots_are_rounded_right():
    """Also where a remainder or the number itself is less than normal."""
    everywhere = np.exp2(np.random.default_rng(0).uniform(-149.0, 128.0, 1 << 18))
    x = tile(np.concatenate([np.linspace(1.0, 4.0, 1 << 18), everywhere, [2.0**-149, 2.0**-126, np.finfo("f4").max]]))
    assert (function("tf_sqrt")(x) == np.sqrt(np.float64(x)).astype(np.float32)).all()
    normal = tile(x[x >= 2.0**-100])
    assert (function("tf_sqrt_of_normal")(normal) == np.sqrt(np.float64(normal)).astype(np.float32)).all()


def test_roots_of_what_is_no_positive_number():
    with np.errstate(all="ignore"):
        got = function("tf_sqrt")(tile([0.0, -0.0, math.inf, -math.inf, -1.0, -1e-40, math.nan]))
    assert list(got[:3]) == [0.0, 0.0, math.inf] and np.isnan(got[3:]).all()
    assert not np.signbit(got[0]) and np.signbit(got[1])


def quotient(x, s):
    """As `scalar.Expressions` writes it."""
    below = function("tf_inverse_below")(s)
    return function("tf_by_parts")(x, below, function("tf_inverse_rest")(s, below))


def test_quotients_by_an_inverse_of_two_parts_are_rounded_right():
    """And so are not all of a row off by what is rounded off the inverse."""
    rng = np.random.default_rng(0)
    s = tile(np.concatenate([np.exp2(rng.uniform(-60, 90, 2000)) * rng.choice([-1, 1], 2000), [1.0, 2.0**-60, 3.0]]))
    x = tile(np.exp2(rng.uniform(-20, 0, (400, s.size))) * np.abs(np.float64(s)))
    got, want = np.float64(quotient(x, s)), np.float64(x) / np.float64(s)
    assert (np.abs(got / want - 1)).max() < 1.001 * UNIT
    assert np.abs((got / want - 1).mean(0)).max() < 0.15 * UNIT  # 400 independent errors of a third of it


def test_quotients_of_what_is_no_number_or_none():
    x = tile([[0.0], [1.0], [-3.0], [math.inf], [-math.inf], [math.nan]])
    s = tile([1.0, -2.0, 3.0, 0.75, 0.0, -0.0, math.inf, -math.inf, math.nan])
    with np.errstate(all="ignore"):
        want = x / s
        near = (np.abs(want - quotient(x, s)) <= 1e-7 * np.abs(want)) | (want == quotient(x, s))
        assert (near | (np.isnan(want) & np.isnan(quotient(x, s)))).all()


def softplus(x):
    return torch.log1p(torch.exp(-x.abs())) + torch.sigmoid(x) / (1.0 + x * x)


@pytest.mark.parametrize(
    ("fn", "dtype", "named"),
    [
        (softplus, torch.float32, {"tf_log1p_unit", "tf_sigmoid", "tf_reciprocal"}),
        (lambda x: torch.log1p(x.abs()) / x, torch.float32, {"tf_log1p_single"}),
        (lambda x: x.abs() ** 2.4 + x.relu() ** x, torch.float32, {"tf_pow_of_positive"}),
        (lambda x: x**2.4, torch.float32, set()),
        (torch.nn.functional.gelu, torch.bfloat16, {"tf_erf_by_exp"}),
        (torch.sqrt, torch.float32, {"tf_sqrt"}),
        (lambda x: torch.sqrt(x * x + 1e-6), torch.float32, {"tf_sqrt_of_normal"}),
        (torch.nn.functional.gelu, torch.float32, set()),
    ],
)
def test_which_kernels_have_them(fn, dtype, named):
    (kernel,) = made(fn, meta(64, 300, dtype=dtype))
    text = variant(kernel).rendered.source
    ours = ("tf_log1p_unit", "tf_log1p_single", "tf_sigmoid", "tf_reciprocal", "tf_erf_by_exp", "tf_pow_of_positive")
    ours += ("tf_sqrt", "tf_sqrt_of_normal")
    body = text[text.rindex("@triton.jit") :]
    assert {n for n in ours if f"{n}(" in body} == named
