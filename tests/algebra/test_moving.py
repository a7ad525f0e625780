"""Results that move by hundreds from one part of the data to the next: a repair must not leave float64's range.

The definition only knows the final value of each result. A Fold also meets the values of its
parts, and the factor between the two, such as exp(r - r'), may overflow where the definition does not.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.algebra import cascades as c
from tests.algebra.cascades import cascade
from tests.algebra.test_derive import N, close, folded, random_tensor, run
from tilefold.algebra.check import LENGTH, Problem, check_fold
from tilefold.algebra.context import Options
from tilefold.algebra.derive import build_fold, derive_fold
from tilefold.algebra.dtypes import DType
from tilefold.algebra.simplify import mul, number
from tilefold.algebra.trials import CASES, NAMED, gather
from tilefold.errors import NotFusibleError

SQUARES = "r0 = sum[l] x[l] * x[l]"
EXPONENTIALS = "r0 = sum[l] exp(x[l])"
FAR = "r1 = max[l] x[l] * x[l] * -r0 * r0 + r0"
FAR_IF = "r1 = max[l] x[l] * where(y[l] > 0.0, x[l], 0.0) * -r0 * r0 + r0"

MOVING = {
    "exp, square": (SQUARES, FAR, "r2 = sum[l] exp(x[l] - r1)"),
    "exp, exp": (EXPONENTIALS, FAR, "r2 = sum[l] exp(x[l] - r1)"),
    "exp, exp, where": (EXPONENTIALS, FAR_IF, "r2 = sum[l] exp(x[l] - r1)"),
    "exp, square, where": (SQUARES, FAR_IF, "r2 = sum[l] exp(x[l] - r1)"),
    "other sign": (SQUARES, FAR, "r2 = sum[l] exp(r1 - x[l])"),
    "weighted": (SQUARES, FAR, "r2 = sum[l] x[l] * exp(x[l] - r1) + r1"),
    "product": (SQUARES, FAR, "r2 = prod[l] exp(x[l] - r1)"),
    "maximum": (SQUARES, FAR, "r2 = max[l] exp(x[l] - r1) * y[l]"),
    "a sum": ("r0 = sum[l] x[l]", "r1 = sum[l] exp(x[l] - r0)"),
    "a sum, base 2": ("r0 = sum[l] x[l]", "r1 = sum[l] exp2(x[l] - r0)"),
    "a product": ("r0 = prod[l] x[l]", "r1 = sum[l] exp(x[l] - r0)"),
    "a product of exponentials": ("r0 = sum[l] x[l]", "r1 = prod[l] exp(x[l] - r0)"),
    "a mean and a root": (SQUARES, "r1 = sum[l] y[l] * rsqrt(r0 * r0 + 1.0) + x[l]", "r2 = sum[l] exp(x[l] - r1)"),
    "many dims": ("r0[i] = sum[l] p[i, l]", "r1[i, e] = sum[l] exp(p[i, l] - r0[i]) * v[l, e]"),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVING)
def test_exponents_that_move_far_are_refused(name: str) -> None:
    with pytest.raises(NotFusibleError, match=r"own check.*(times|steps of|waves of)") as error:
        derive_fold(cascade("\n".join(MOVING[name])))
    assert error.value.hint is not None and "range" in error.value.hint


@pytest.mark.parametrize("name", ["exp, square", "exp, exp, where"])
def test_such_folds_do_go_wrong_where_the_definition_does_not(name: str) -> None:
    problem = cascade("\n".join(MOVING[name]))
    fold = build_fold(problem, Options())
    wrong = 0
    for seed in range(20):
        x, y = random_tensor(N, seed=seed) * 2, random_tensor(N, seed=seed + 1)
        r0 = (x * x).sum() if name == "exp, square" else x.exp().sum()
        key = x * x if name == "exp, square" else x * torch.where(y > 0, x, 0.0)
        want = (x - (key * -r0 * r0 + r0).max()).exp().sum()
        got = run(fold, problem, {"x": x, "y": y}, seed=seed)["r2"]
        wrong += bool(want.isfinite() and not torch.isclose(got, want, rtol=1e-6))
    assert wrong


HELD = {
    "softmax": c.SOFTMAX,
    "logsumexp, guarded": c.LOGSUMEXP_GUARDED,
    "attention": c.ATTENTION,
    "performer": c.PERFORMER,
    "entropy": c.ENTROPY,
    "variance": c.VARIANCE,
    "two inputs": "m = max[l] x[l] + y[l] \n t = sum[l] exp(x[l] + y[l] - m)",
    "minimum": "m = min[l] x[l] \n t = sum[l] exp(m - x[l])",
    "scaled": "m = max[l] x[l] \n t = sum[l] exp(0.5 * x[l] - 0.5 * m)",
    "lost by rounding": f"{EXPONENTIALS} \n r1 = sum[l] 1.0 / r0 * (x[l] - r0) + 1.0",
    "overflow of the definition": f"{EXPONENTIALS} \n r1 = sum[l] maximum(y[l] * exp(r0), 0.0)",
    "overflow inside": f"{EXPONENTIALS} \n r1 = sum[l] rsqrt(r0 * r0 + 1.0) * r0 * abs(x[l] * r0) + x[l] * r0",
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_a_maximum_holds_them_and_what_the_definition_loses_is_not_demanded(name: str) -> None:
    assert all(check.ok for check in derive_fold(cascade(HELD[name])).checks)


@pytest.mark.parametrize("scale", [30, 300, 3000])
def test_softmax_is_right_however_far_its_maximum_moves(scale: float) -> None:
    for seed in range(4):
        x = random_tensor(N, seed=seed) * scale
        got = folded(c.SOFTMAX, {"x": x}, seed=seed)
        close(got["t"], (x - x.max()).exp().sum())


def test_the_scaled_cases_count_where_results_depend_on_results() -> None:
    alone, pair = cascade("s = sum[l] exp(x[l])"), cascade(c.SOFTMAX)
    assert Problem(alone, alone.reductions, LENGTH).cases == len(NAMED)
    problem = Problem(pair, pair.reductions, LENGTH)
    assert problem.cases == len(CASES)
    # a maximum is as large as the inputs: those beyond the range of exponents say nothing
    moderate = torch.tensor([int((re.search(r"(?:times|of) (\d+)", c) or [0, "0"])[1]) < 75 for c in CASES])
    assert all(ok[moderate].all() and not ok.all() for ok in problem.judged.values())


def test_a_maximum_that_bounds_another_input_is_enough() -> None:
    """Products inside a fold are inputs to its check: that `m` is at least `x` (performer) is lost, and no matter."""
    found = derive_fold(cascade("m = max[l] y[l] \n s = sum[l] exp(x[l] * 0.35 - m - z[l] * 0.06)"))
    assert all(c.ok for c in found.checks)


def test_what_the_definition_cannot_say_is_not_judged() -> None:
    problem = cascade("s = sum[l] exp(x[l]) \n q = sum[l] ((x[l] - s) / s + 1.0) * s \n p = prod[l] exp(x[l]) * s")
    judged = Problem(problem, problem.reductions, LENGTH).judged
    assert all(ok[: len(NAMED)].all() for ok in judged.values())
    scaled = {name: ok[len(NAMED) :] for name, ok in judged.items()}
    first, last = CASES.index("times 2, draw 0") - len(NAMED), CASES.index("times 500, draw 0") - len(NAMED)
    assert scaled["s"][first] and not scaled["q"][last] and not scaled["p"][last]
    assert 0 < scaled["q"].sum() < scaled["s"].sum()


@pytest.mark.parametrize("dtype", [DType.F32, DType.I64, DType.BOOL])
def test_every_case_has_its_own_values(dtype: DType) -> None:
    at = torch.arange(LENGTH).reshape(1, 1, -1)
    every, some = (gather("x", dtype, n, (at,)) for n in (len(CASES), len(NAMED)))
    assert every.shape == (1, len(CASES), LENGTH)
    assert torch.equal(every[:, : len(NAMED)].nan_to_num(7), some.nan_to_num(7))
    if dtype.is_float:
        scaled = every[0, len(NAMED) :]
        assert scaled.isfinite().all() and len({tuple(row) for row in scaled.tolist()}) == len(scaled)
        sums = scaled.cumsum(-1).abs()
        assert (sums[:, -1] < sums.amax(-1) / 20).any(), "some sums go far and come back"


def test_products_of_small_factors_are_compared_with_the_product() -> None:
    """Not with the sum of the factors, beside which 1e-9 is nothing."""
    problem = cascade(c.PRODUCT_SCALED)
    fold = derive_fold(problem)
    p = fold.var("P")
    broken = dataclasses.replace(p, repair=mul(p.repair, number(1.00001)))
    wrong = dataclasses.replace(fold, state=tuple(broken if v is p else v for v in fold.state))
    failed = [check.detail for check in check_fold(problem, wrong, problem.reductions) if not check.ok]
    assert failed and all("P (normal)" in detail for detail in failed)


def test_a_result_that_would_be_finished_from_elements_is_refused() -> None:
    odd = cascade(
        "r0 = sum[l] x[l] \n r1 = sum[l] 1.0 / r0 * -r0 * r0 * (x[l] - r0 / size(l)) + x[l] * r0 \n"
        "r2, i2 = argmax[l] (x[l] - r0) + y[l]"
    )
    with pytest.raises(NotFusibleError, match="needs elements"):
        derive_fold(odd)
