"""Reductions against eager: axes, keepdim, empty, one element, ties, NaN and infinities."""

from __future__ import annotations

import math

import pytest
import torch

from tests.frontend.check import check, randn
from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import Call, Const, Load, Size, Sym, walk
from tilefold.errors import UnsupportedError
from tilefold.frontend.fuse import fuse
from tilefold.frontend.operators.reduce import _corrected

VALUES = [
    torch.sum, torch.mean, torch.amax, torch.amin, torch.prod, torch.var, torch.std, torch.logsumexp,
    torch.linalg.vector_norm, torch.any, torch.all, torch.argmax, torch.argmin,
]  # fmt: skip


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("fn", VALUES, ids=lambda f: f.__name__)
def test_along_an_axis(fn, dim, keepdim):
    check(lambda x: fn(x, dim=dim, keepdim=keepdim), randn(3, 4, 5), modes=(keepdim,))


@pytest.mark.parametrize("fn", [torch.sum, torch.mean, torch.amax, torch.var, torch.std, torch.logsumexp])
def test_over_several_axes(fn):
    check(lambda x: fn(x, dim=(0, 2)), randn(3, 4, 5))
    check(lambda x: fn(x, dim=(-1, -2), keepdim=True), randn(3, 4, 5))


@pytest.mark.parametrize(
    "fn",
    [
        torch.sum,
        torch.mean,
        torch.prod,
        torch.max,
        torch.min,
        torch.var,
        torch.argmax,
        torch.argmin,
        torch.any,
        torch.all,
    ],
)
def test_over_everything(fn):
    check(lambda x: fn(x), randn(3, 4))


@pytest.mark.parametrize("fn", [torch.max, torch.min])
def test_value_and_index(fn):
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, math.nan, 5.0], [-math.inf, -math.inf, -math.inf]])
    check(lambda a: tuple(fn(a, dim=1)), x)
    check(lambda a: tuple(fn(a, dim=0, keepdim=True)), x)


@pytest.mark.parametrize("correction", [0, 1, 2])
def test_variance_corrections(correction):
    check(lambda x: torch.var(x, dim=1, correction=correction), randn(4, 3))
    check(lambda x: torch.var_mean(x, dim=0, correction=correction), randn(4, 3))


def test_variance_of_too_few_is_nan_as_in_torch():
    check(lambda x: torch.var(x, dim=1), randn(3, 1))


def test_variance_is_centred_and_divides_by_the_size():
    low = check(lambda x: torch.var(x * 1e-3 + 1000, dim=-1), randn(4, 64), tol=1e-4)
    sizes = {n for c in low.program.body for n in walk(c.body) if isinstance(n, Size)}
    assert sizes
    sums = [c for c in low.program.body if c.reducer == "sum"]
    assert len(sums) == 3 and all(any(isinstance(n, Call) and n.op == "sub" for n in walk(s.body)) for s in sums[1:])


def test_variance_of_16_bits_needs_no_residual():
    low = check(lambda x: torch.var(x, dim=-1), randn(4, 64, dtype=torch.bfloat16), tol=1e-2)
    assert sum(c.reducer == "sum" for c in low.program.body) == 2


@pytest.mark.parametrize("fn", [torch.var, torch.std])
@pytest.mark.parametrize("dim", [0, 1])
def test_spreads_far_from_zero_keep_their_digits(fn, dim):
    """A float32 mean of values near 1e5 is off by 0.004; eager sums in float64 on a CPU."""
    check(lambda x: fn(x, dim), randn(7, 40) + 1e5, tol=2e-6)


@pytest.mark.parametrize("p", [0, 1, 2, 3, math.inf, -math.inf])
def test_norms(p):
    check(lambda x: torch.linalg.vector_norm(x, p, dim=1), randn(3, 5))


def test_sums_of_other_types():
    check(lambda x: x.sum(1), torch.arange(12, dtype=torch.int32).reshape(3, 4))
    check(lambda x: (x > 0).sum(0), randn(3, 4))
    check(lambda x: x.sum(1, dtype=torch.float64), randn(3, 4))
    check(lambda x: x.sum(1), randn(3, 4, dtype=torch.bfloat16), tol=2e-2)
    check(lambda x: x.mean(1), randn(3, 4, dtype=torch.float16), tol=1e-2)


def test_empty_reductions():
    x = torch.zeros(3, 0)
    check(lambda a: (a.sum(1), a.prod(1), a.mean(1), (a > 0).any(1), (a > 0).all(1)), x, modes=(False,))


def test_axis_of_one_element():
    check(lambda x: (x.sum(1), x.mean(1), x.amax(1), x.argmax(1), x.logsumexp(1)), randn(3, 1))


def test_logsumexp_of_infinite_rows():
    check(lambda x: torch.logsumexp(x, 1), torch.tensor([[-math.inf, -math.inf], [math.inf, 1.0], [1e4, 1e4]]))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_topk(largest, dim):
    x = torch.randperm(42, generator=torch.Generator().manual_seed(0)).reshape(6, 7).float()
    check(lambda a: tuple(torch.topk(a, 3, dim=dim, largest=largest)), x)
    check(lambda a: torch.topk(a, 2, dim=dim, largest=largest)[1], x)


def test_topk_orders_nan_as_largest():
    x = torch.tensor([[1.0, math.nan, 3.0, -1.0]])
    check(lambda a: tuple(torch.topk(a, 2, largest=True)), x)
    check(lambda a: tuple(torch.topk(a, 3, largest=False)), x)


def test_topk_with_a_symbolic_k_is_compiled_for_its_value():
    run = fuse(lambda a, k: torch.topk(a, k).values)
    x = randn(3, 17)
    for k in (2, 3, 5, 3):
        torch.testing.assert_close(run(x, k), torch.topk(x, k).values)
    assert len(run.graphs) == 3  # a guard a value


def test_topk_with_k_in_the_data_is_refused():
    run = fuse(lambda a, k: torch.topk(a, k.item()).values)
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(UnsupportedError, match="depends on data"),
    ):
        run(randn(3, 17), torch.tensor(3))


@pytest.mark.parametrize("correction", [0, 1, 2, 3, 5, 0.5, 2.5])
@pytest.mark.parametrize("known", [(4,), (2, 2), (1,), (2,), None])
def test_the_corrected_count_is_not_negative(known, correction):
    """max(0, n - correction), and no max where n is known to be larger."""
    over = (Sym("n"),) if known is None else tuple(Const(k, DType.I64) for k in known)
    e = _corrected(Sym("n"), over, correction)
    sizes = (0, 1, 2, 4, 9) if known is None else (math.prod(known),)
    for n in sizes:
        at = evaluate(e, Grid({}), Env(lambda *_: torch.tensor(0), {}, {"n": n}, exact=True))
        assert float(at) == max(0, n - correction)
    assert any(isinstance(x, Const) and x.dtype.is_float for x in walk(e)) == (correction % 1 != 0)
    clamped = any(isinstance(x, Call) and x.op == "maximum" for x in walk(e))
    assert clamped == (correction != 0 and (known is None or math.prod(known) <= correction))


def test_places_of_truth_values_are_those_of_integers():
    """No kernel orders truth values (the gradient of a running product asks for the first zero)."""

    def fn(x):
        y = x > 0
        return *y.max(1), *y.min(0), y.max()

    low = check(fn, randn(3, 5))
    types = low.program.dtype_of
    arguments = [ld.tensor for c in low.program.body if c.index_name for ld in walk(c.body) if isinstance(ld, Load)]
    assert all(types(t) is not DType.BOOL for t in arguments)


@pytest.mark.parametrize("shape", [(), (1,), (1, 3)])
def test_a_mean_of_one_element_keeps_its_dtype(shape):
    check(lambda x: x.mean(0), randn(*shape, dtype=torch.bfloat16))
