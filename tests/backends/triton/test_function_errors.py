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


TL = SimpleNamespace(
    abs=np.abs, exp2=np.exp2, fma=fma, minimum=lambda a, b, propagate_nan: np.minimum(a, np.float32(b)),
    int32=np.int32, float32=np.float32, PropagateNan=SimpleNamespace(ALL=None),
)  # fmt: skip


def function(name):
    space = {"tl": TL, "triton": SimpleNamespace(jit=lambda f: f)}
    exec(needed(FUNCTIONS, code=f"{name}(x)"), space)
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


def softplus(x):
    return torch.log1p(torch.exp(-x.abs())) + torch.sigmoid(x) / (1.0 + x * x)


@pytest.mark.parametrize(
    ("fn", "dtype", "named"),
    [
        (softplus, torch.float32, {"tf_log1p_unit", "tf_sigmoid", "tf_reciprocal"}),
        (lambda x: torch.log1p(x.abs()) / x, torch.float32, {"tf_log1p_single"}),
        (torch.nn.functional.gelu, torch.bfloat16, {"tf_erf_by_exp"}),
        (torch.nn.functional.gelu, torch.float32, set()),
    ],
)
def test_which_kernels_have_them(fn, dtype, named):
    (kernel,) = made(fn, meta(64, 300, dtype=dtype))
    text = variant(kernel).rendered.source
    ours = ("tf_log1p_unit", "tf_log1p_single", "tf_sigmoid", "tf_reciprocal", "tf_erf_by_exp")
    body = text[text.rindex("@triton.jit") :]
    assert {n for n in ours if f"{n}(" in body} == named
