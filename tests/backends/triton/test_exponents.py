"""exp by powers of two: one multiply-add an element, and factors of rows whose numbers are large."""

from __future__ import annotations

import math
import types

import pytest
import torch

from tests.backends.triton.emulated import _fused
from tilefold.algebra.dtypes import DType
from tilefold.backends.triton.exponents import Term, exponential
from tilefold.backends.triton.values import Value

#: The code's names, on tensors: products that are added round once.
TL = types.SimpleNamespace(
    fma=_fused,
    exp=torch.exp,
    exp2=torch.exp2,
    abs=torch.abs,
    where=lambda c, a, b: torch.where(c, torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32)),
)


def term(times: float, name: str, axes: tuple[str, ...], *, far: bool = False) -> Term:
    return Term(times, Value(name, axes, DType.F32), far)


def found(terms, frame=("i", "j"), *, exact=False, **values) -> torch.Tensor:
    code = exponential(terms, DType.F32, frame, exact=exact).code
    return eval(code, {"tl": TL, **values})


def rows(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


LARGE = [
    torch.finfo(torch.bfloat16).min,
    torch.finfo(torch.float32).min,
    torch.finfo(torch.float32).max,
    -1e30, -1e10, -1e9, -3e8, -1.91e8, 1.91e8, 1e12,
]  # fmt: skip


@pytest.mark.parametrize("times", [1.0, 0.125, 0.1, 3.0])
def test_what_is_a_rows_maximum_comes_to_one(times):
    """For large numbers; a row's factor is at most 2^8 for others."""
    terms = [term(times, "x", ("i", "j"), far=True), term(-times, "m", ("i",), far=True)]
    m = rows(*(n for n in LARGE if abs(n * times) > 1.9e8))
    x = m[:, None].expand(-1, 3).contiguous()
    x[:, 1:] -= x[:, 1:].abs() / 4  # far below
    y = found(terms, x=x, m=m)
    if times <= 1:
        assert torch.equal(y, torch.tensor([[1.0, 0.0, 0.0]]).expand_as(y))
    near = rows(*(10.0**k for k in range(8)), 1.2e8)
    y = found(terms, x=near[:, None] / times, m=near / times)
    assert bool(((y >= 2.0**-8) & (y <= 2.0**8)).all())


def test_a_multiple_less_its_maximum_is_as_right_as_what_is_rounded():
    """And the maximum itself comes to 1, for numbers of any size."""
    terms = [term(10.0, "x", ("i", "j"), far=True), term(-1.0, "m", ("i",), far=True)]
    m = torch.cat([torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 5, rows(*LARGE) / 100])
    x = torch.stack([m, m - 0.3, m - m.abs() / 4], 1)
    y = found(terms, exact=True, x=x, m=m * 10.0)
    assert bool((y[:, 0] == 1.0).all()) and bool((y[1000:, 2] == 0.0).all())
    want = torch.exp((x[:1000].double() - m[:1000, None].double()) * 10.0)
    assert float((y[:1000] / want - 1).abs().max()) < 5e-6
    assert float((y[:1000] / want - 1)[:, 1].mean().abs()) < 2e-7


def test_a_state_goes_from_one_rounding_to_another():
    """exp(x - m) rescaled by exp(m - n) is exp(x - n), whatever the maxima are rounded to."""
    m = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 1e6 - 5e5
    n = m + torch.rand(1000)
    x = m - 0.5
    lift = [term(1.0, "x", ("i", "j")), term(-1.0, "m", ("i",))]
    repair = [term(1.0, "m", ("i",)), term(-1.0, "n", ("i",))]
    one, other = found(lift, x=x[:, None], m=m), found(lift, x=x[:, None], m=n)
    torch.testing.assert_close(one[:, 0] * found(repair, ("i",), m=m, n=n), other[:, 0], rtol=1e-5, atol=0)


def test_an_added_mask_swallows_scores_before_the_maximum_is_taken():
    terms = [term(0.1, "s", ("i", "j")), term(1.0, "b", ("i", "j"), far=True), term(-1.0, "m", ("i",), far=True)]
    least = torch.finfo(torch.float32).min
    y = found(terms, s=rows(5.0, -3.0)[None], b=rows(least, least)[None], m=rows(least))
    assert torch.equal(y, torch.ones(1, 2))


def test_nothing_is_chosen_where_elements_are_near():
    terms = [term(0.125, "x", ("i", "j")), term(-1.0, "m", ("i",), far=True)]
    code = exponential(terms, DType.F32, ("i", "j")).code
    assert "where" not in code and code.count("tl.fma") == 2


def test_numbers_and_factors_of_nothing():
    third = Term(1.0, Value("3.0", (), DType.F32), far=False)
    y = found([term(0.5, "x", ("i", "j")), third, term(-1.0, "m", ("i",))], x=rows(1.0)[None], m=rows(2.0))
    assert y.item() == pytest.approx(math.exp(1.5))
    y = found([term(0.5, "x", ("i", "j")), third], x=rows(1.0)[None])
    assert y.item() == pytest.approx(math.exp(3.5))
    y = found([term(0.0, "x", ("i", "j"), far=True), term(0.0, "m", ("i",))], x=rows(1.0)[None], m=rows(2.0))
    assert y.item() == 1.0
