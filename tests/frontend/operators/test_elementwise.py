"""Every elementwise row against eager, on ordinary and on hostile values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import check, check_backward, compiled, lowered, randn
from tilefold import fuse
from tilefold.algebra.expr import Call, Cast, Const, walk
from tilefold.errors import UnsupportedError
from tilefold.frontend.fuse import trace

HOSTILE = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -3.5, 30.0, -30.0, 1e-30, math.inf, -math.inf, math.nan])

UNARY = [
    torch.exp, torch.exp2, torch.expm1, torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt, torch.rsqrt,
    torch.sin, torch.cos, torch.tan, torch.tanh, torch.sigmoid, torch.erf, torch.reciprocal, torch.sinh, torch.cosh,
    torch.neg, torch.abs, torch.sign, torch.floor, torch.ceil, torch.trunc, torch.round, torch.square, torch.isnan,
    torch.isinf, torch.isfinite, torch.relu, F.silu, F.gelu, F.softplus, F.leaky_relu, F.elu, F.hardtanh, F.hardswish,
    F.logsigmoid, torch.nan_to_num, torch.logical_not, F.mish, F.relu6, torch.atan, torch.asin, torch.acos, torch.asinh,
    torch.acosh, torch.atanh, torch.erfinv, torch.lgamma, torch.digamma,
]  # fmt: skip


@pytest.mark.parametrize("fn", UNARY, ids=lambda f: f.__name__)
def test_unary(fn):
    check(lambda x: fn(x), HOSTILE, tol=2e-6, modes=(False,), wide=True)
    check(lambda x: fn(x), randn(3, 5), modes=(True,))


def test_gelu_tanh_form():
    check(lambda x: F.gelu(x, approximate="tanh"), randn(3, 5))


BINARY = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.eq, torch.ne, torch.lt, torch.le,
    torch.gt, torch.ge, torch.remainder, torch.logical_and, torch.logical_or, torch.logical_xor, torch.fmod,
    torch.rsub, torch.floor_divide, torch.true_divide, torch.atan2, torch.hypot, torch.fmax, torch.fmin,
]  # fmt: skip
#: None takes a number.
OF_TENSORS = (torch.maximum, torch.minimum, torch.logical_and, torch.logical_or, torch.logical_xor, *BINARY[-4:])


@pytest.mark.parametrize("fn", BINARY, ids=lambda f: f.__name__)
def test_binary_broadcasts(fn):
    check(lambda x, y: fn(x, y), randn(2, 1, 4), randn(3, 1, seed=1))
    if fn not in OF_TENSORS:
        check(lambda x: fn(x, 2.5), randn(3, 4), modes=(False,))


@pytest.mark.parametrize("fn", [torch.atan2, torch.hypot, torch.fmax, torch.fmin], ids=lambda f: f.__name__)
def test_functions_of_two_hostile_numbers(fn):
    x, y = (v.flatten() for v in torch.meshgrid(HOSTILE, HOSTILE, indexing="ij"))
    check(lambda a, b: fn(a, b), x, y, tol=2e-6, modes=(False,), wide=True)


@pytest.mark.parametrize(
    ("fn", "least", "most"), [(torch.erfinv, -1.0, 1.0), (torch.lgamma, -20.0, 1e3), (torch.digamma, -20.0, 1e3)]
)
def test_functions_of_statistics(fn, least, most):
    """Near the ends and from small to large; as right as eager, whose own errors are near 1e-7 of the largest part."""
    x = torch.cat((torch.linspace(least, most, 4001)[1:-1], torch.logspace(-20, 0, 50) * min(most, 1.0) * 0.99))
    exact = fn(x.double())
    got = fuse(lambda x: fn(x))(x).double()
    size = exact.abs().clamp(min=1.0)
    assert ((got - exact).abs() / size).max() <= 2 * max(float(((fn(x).double() - exact).abs() / size).max()), 1e-7)
    if fn is not torch.digamma:
        check_backward(lambda x: fn(x), x[x > 0.1])


@pytest.mark.parametrize("fn", [torch.atan, torch.asin, torch.asinh, torch.atanh, torch.acos, torch.acosh])
def test_inverse_functions_are_right_to_the_last_places(fn):
    """Relatively, also of small numbers and of large ones, in both types; zeros keep their signs."""
    x = torch.cat([torch.linspace(-4, 4, 801), torch.logspace(-18, 18, 73), -torch.logspace(-18, 18, 73)]).double()
    if fn is torch.acosh:
        x = 1 + x.abs()
    elif fn in (torch.asin, torch.acos, torch.atanh):
        x = x[x.abs() < 1]
    for dtype, tol in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        given = x.to(dtype)
        want = fn(given.double())
        got = _evaluated(fn, given).double()
        assert ((got - want).abs() <= tol * want.abs()).all()
    if fn not in (torch.acos, torch.acosh):
        assert torch.equal(_evaluated(fn, HOSTILE[:2]).signbit(), torch.tensor([False, True]))


@pytest.mark.parametrize("fn", [torch.asin, torch.acos])
def test_arcs_take_one_root_and_one_quotient(fn):
    """By way of atan they took two quotients and a third under a root of their own."""
    body = lowered(fn, torch.linspace(-1, 1, 9)).program.body
    found = {n for c in body for n in walk(c.body) if isinstance(n, Call)}
    assert sorted(n.op for n in found if n.op in ("sqrt", "div")) == ["div", "sqrt"]


def _evaluated(fn, x):
    with torch.no_grad():
        return compiled(fn, False, [])(x)


@pytest.mark.parametrize("p", [-2, -1, -0.5, 0, 0.5, 1, 2, 3, 2.7])
def test_powers(p):
    check(lambda x: x.abs() ** p, randn(3, 4))


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_division_modes(mode, dtype):
    x = torch.tensor([7, -7, 8, -8, 0]).to(dtype)
    y = torch.tensor([2, 2, -3, -3, 5]).to(dtype)
    check(lambda a, b: torch.div(a, b, rounding_mode=mode), x, y)


def test_alpha_and_scaled_products():
    x, y, z = randn(3, 4), randn(3, 4, seed=1), randn(3, 4, seed=2)
    check(lambda a, b: torch.add(a, b, alpha=0.5), x, y)
    check(lambda a, b: torch.sub(a, b, alpha=2), x, y)
    check(lambda a, b: (torch.rsub(a, b, alpha=3), torch.rsub(a, 2.0, alpha=3)), x, y)
    check(lambda a, b, c: torch.addcmul(a, b, c, value=0.3), x, y, z)
    check(lambda a, b, c: torch.addcdiv(a, b, c.abs() + 1), x, y, z)
    check(lambda a, b, c: torch.lerp(a, b, c), x, y, z)
    check(lambda a, b: (torch.lerp(a, b, 0.2), torch.lerp(a, b, 0.8)), x, y)


def test_clamp_and_selection():
    x, y = HOSTILE, HOSTILE.flip(0)
    check(lambda a: a.clamp(-1, 2), x)
    check(lambda a: a.clamp_min(0.5), x)
    check(lambda a: a.clamp_max(0.5), x)
    check(lambda a, b: a.clamp(min=b), x, y)
    check(lambda a, b: torch.where(a > b, a, b * 2), x, y)
    check(lambda a: torch.where(a > 0, a, -math.inf), x)
    check(lambda a: a.masked_fill(a < 0, 7), x)
    check(lambda a, m: a.masked_fill(m, math.nan), x, x > 0)


def test_booleans():
    a, b = randn(4, 5) > 0, randn(4, 5, seed=1) > 0
    check(lambda p, q: (p & q) | ~(p ^ q), a, b)
    check(lambda p, q: (p + q, p * q), a, b)
    check(lambda p, x: p * x + p, a, randn(4, 5))


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_casts(dtype):
    x = torch.tensor([0.0, 1.0, -2.0, 3.75, 100.0, 0.1])
    x = x.abs() if dtype is torch.uint8 else x
    check(lambda a: a.to(dtype), x)
    check(
        lambda a: a.to(dtype).to(torch.float32) * 2, x, tol=1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6
    )


def test_quantising_casts_are_kept_when_maps_are_inlined():
    low = check(lambda x: (x.to(torch.float8_e4m3fn).float() * 3).sum(), randn(7, 5))
    assert any(isinstance(n, Cast) and n.dtype.value == "e4m3" for c in low.program.body for n in walk(c.body))


def test_integer_overflow_wraps():
    x = torch.tensor([100, 120, -128], dtype=torch.int8)
    check(lambda a: (a + a).to(torch.int64) * 2, x)


def test_mixed_types_promote_as_torch():
    check(lambda a, b: a + b, randn(3), torch.arange(3))
    check(lambda a, b: a * b, randn(3, dtype=torch.bfloat16), torch.arange(3), tol=1e-2)
    check(lambda a, b: a / b, torch.arange(3), torch.arange(1, 4))
    check(lambda a, b: a + b, randn(3), torch.tensor(0.1, dtype=torch.float64))
    check(lambda a: a * 0.1 + 0.3, randn(3, dtype=torch.float64).double(), tol=1e-14)


@pytest.mark.parametrize(
    "fn", [torch.tanh, torch.sigmoid, F.silu, F.gelu, F.relu, F.softplus, lambda x: F.gelu(x, approximate="tanh")]
)
def test_backward_formulas(fn):
    check_backward(fn, randn(3, 5))


def test_unknown_operator_and_dtype_name_themselves():
    with pytest.raises(UnsupportedError, match="special_ndtri"):
        lowered(torch.special.ndtri, randn(3))
    with pytest.raises(UnsupportedError, match="complex64"):
        lowered(lambda x: x * 1j, randn(3))


def test_the_only_element_of_a_range_is_a_literal():
    """No kernel computes with literals alone: in Triton they are numbers of Python, which no conversion takes."""
    low = check(lambda x: x + torch.arange(0.25, 0.75, 0.5, dtype=torch.float64).float(), randn(5, 3), modes=(False,))
    assert [n.value for c in low.program.body for n in walk(c.body) if isinstance(n, Const)] == [0.25]


def test_formulas_within_each_other_are_planned_object_by_object(monkeypatch):
    """An arc is 105 nodes, and 73,880 written out; two within each other 208, and a thousand millions."""
    made, init = [], Call.__init__

    def counting(self, *given):
        made.append(0)
        init(self, *given)

    monkeypatch.setattr(Call, "__init__", counting)
    trace(lambda y: torch.atan2(torch.atan2(y, y + 2), y), torch.ones(64, 32))
    assert 100 < len(made) < 20_000
