"""Every cascade derives, and folding it in random pieces gives what float64 torch gives."""

from __future__ import annotations

import random
import time

import pytest
import torch

from tests.algebra import cascades as c
from tests.algebra.cascades import DERIVABLE, cascade
from tilefold.algebra import derive as derive_module
from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.check import result_dims
from tilefold.algebra.derive import derive_fold
from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, apply, reader
from tilefold.algebra.expr import Const, Index, Load, Sym, call
from tilefold.algebra.fold import Fold
from tilefold.algebra.run_fold import Runner
from tilefold.algebra.symbolic import sympy

N = 23
SIZES = {"l": N, "k": 3, "i": 4, "e": 3, "a": 2, "b": 2, "d": 3, "r": 4}


def run(
    fold: Fold, problem: Cascade, tensors: dict, seed: int = 0, exact: bool = True, sizes: dict | None = None
) -> dict:
    """Results of a fold over random tiles, merged in random order."""
    rng = random.Random(seed)
    sizes = sizes or SIZES
    runner = Runner(fold, Env(reader(tensors), sizes, {}, exact))
    n = sizes[fold.axes[0]]
    cuts = sorted(rng.sample(range(1, n), 4)) if n > 4 else []
    whole = {a: (0, sizes[a]) for a in fold.axes}
    parts = [runner.lift(whole | {fold.axes[0]: t}) for t in zip([0, *cuts], [*cuts, n], strict=True)]
    parts[0] = runner.update(runner.identity(), whole | {fold.axes[0]: (0, [*cuts, n][0])})
    while len(parts) > 1:
        a, b = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(runner.merge(a, b))
    return runner.finish(parts[0], result_dims(problem))


def folded(text: str, tensors: dict, **options) -> dict:
    problem = cascade(text)
    return run(derive_fold(problem), problem, tensors, **options)


def random_tensor(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-9, atol=1e-9, equal_nan=True)


X, Y, W = random_tensor(N), random_tensor(N, seed=2), random_tensor(N, 3, seed=3)
P, V = random_tensor(4, N, seed=4) * 3, random_tensor(N, 3, seed=5)


@pytest.mark.parametrize("name", DERIVABLE)
def test_every_cascade_derives_with_a_complete_proof(name: str) -> None:
    fold = derive_fold(cascade(DERIVABLE[name]))
    assert fold.checks and all(check.ok for check in fold.checks)
    assert sum(check.method == "numeric" for check in fold.checks) >= 7
    assert len(fold.derivation) >= 1


@pytest.mark.parametrize("name", DERIVABLE)
def test_derivation_is_fast_cold(name: str) -> None:
    sympy()
    problem = cascade(DERIVABLE[name])
    best = float("inf")
    for _ in range(4):
        derive_module._derive.cache_clear()
        start = time.process_time()
        derive_fold(problem)
        best = min(best, time.process_time() - start)
        if best < 0.3:
            return
    pytest.fail(f"{best:.2f} s")


@pytest.mark.parametrize("seed", range(3))
def test_attention_equals_torch(seed: int) -> None:
    got = folded(c.ATTENTION, {"p": P, "v": V}, seed=seed)
    close(got["o"], torch.softmax(P, -1) @ V)
    causal = torch.where(torch.arange(N)[None] <= torch.arange(4)[:, None], P * 0.125, -torch.inf)
    close(folded(c.ATTENTION_MASKED, {"p": P, "v": V}, seed=seed)["o"], torch.softmax(causal, -1) @ V)


def test_softmax_and_cross_entropy_equal_torch() -> None:
    got = folded(c.SOFTMAX, {"x": X})
    close(got["m"] + got["t"].log(), X.logsumexp(0))
    labels = torch.tensor([3, 0, 22, 7])
    got = folded(c.CROSS_ENTROPY, {"x": P, "label": labels})
    loss = got["t"].log() + got["m"] - got["g"]
    close(loss, torch.nn.functional.cross_entropy(P, labels, reduction="none"))


@pytest.mark.parametrize("seed", range(3))
def test_routing_equals_torch(seed: int) -> None:
    got = folded(c.ROUTING, {"x": X}, seed=seed)
    values, index = torch.softmax(X, 0).topk(4)
    close(got["s"], values)
    assert torch.equal(got["i"], index)


def test_norms_equal_torch() -> None:
    x, g, b, w = X, Y, random_tensor(N, seed=8), W
    rms = x * torch.rsqrt(x.square().mean() + 1e-6)
    close(folded(c.RMSNORM_GEMM, {"x": x, "g": g, "w": w})["o"], (rms * g) @ w)
    close(folded(c.RMSNORM_MAX, {"x": x})["m"], rms.max())
    layer = torch.nn.functional.layer_norm(x, (N,), g, b, 1e-5)
    close(folded(c.LAYERNORM_GEMM, {"x": x, "g": g, "b": b, "w": w})["o"], layer @ w)
    got = folded(c.L2_NORM, {"x": x})
    close(got["m"] * got["t"].sqrt(), x.norm())


def test_moments_equal_torch() -> None:
    x = X + 3
    close(folded(c.VARIANCE, {"x": x})["q"] / (N - 1), x.var())
    got, d = folded(c.MOMENTS, {"x": x}), x - x.mean()
    close(torch.stack([got["k3"], got["k4"]]), torch.stack([(d**3).sum(), (d**4).sum()]))
    close(folded(c.THIRD_MOMENT_AS_PRODUCTS, {"x": x})["k"], (d**3).sum())
    close(folded(c.FOURTH_MOMENT, {"x": x})["k"], (d**4).sum())
    z = random_tensor(N, 2, seed=9) + 1
    close(folded(c.COVARIANCE, {"x": z})["q"] / (N - 1), torch.cov(z.mT))
    weights = Y.abs()
    cov = torch.cov(z.mT, correction=0, aweights=weights)
    got = folded(c.WEIGHTED_COVARIANCE, {"x": z, "w": weights})
    close(got["q"] / got["W"], cov)
    two = random_tensor(3, N, seed=10)
    close(folded(c.TWO_AXES_VARIANCE, {"x": two})["q"] / two.numel(), two.var(correction=0))


def test_inertia_equals_its_definition() -> None:
    mass, place = Y.abs() + 0.1, random_tensor(N, 3, seed=11) + 5
    center = (mass[:, None] * place).sum(0) / mass.sum()
    close(folded(c.INERTIA, {"w": mass, "x": place})["I"], (mass[:, None] * (place - center) ** 2).sum(0))


def test_choices_and_products_equal_torch() -> None:
    got = folded(c.ARGMAX_OF_SOFTMAX, {"x": X})
    close(got["p"], torch.softmax(X, 0).max())
    assert got["i"] == X.argmax()
    assert folded(c.ARGMIN_SCALED, {"x": X})["i"] == X.argmin()
    close(folded(c.PRODUCT_SCALED, {"x": X})["P"], (X / X.abs().max()).prod())
    close(folded(c.MAX_SHIFTED, {"x": X, "y": Y})["m"], (X - Y.sum()).max())
    close(folded(c.MAX_DECREASING, {"x": X})["m"], (-X / (X.square().sum() + 1)).max())
    close(folded(c.MAX_OF_WEIGHTED_EXP, {"x": X, "w": Y})["y"], ((X - X.max()).exp() * Y).max())


def test_sums_with_several_parts_equal_torch() -> None:
    p = torch.softmax(X, 0)
    close(folded(c.ENTROPY, {"x": X})["h"], (p * p.log()).sum())
    close(folded(c.PHASE, {"x": X, "y": Y})["q"], (Y + X.sum()).sin().sum())
    m = X.square().sum()
    close(folded(c.SUM_SUM, {"x1": X, "x2": Y})["s"], (X * Y).sum() / (m - 10).clamp(min=0.001).sqrt())
    c2 = Y.abs()
    e = 0.5 * (X - X.max() - 0.25 * c2).exp()
    close(folded(c.PERFORMER, {"c1": X, "c2": c2, "v": V})["o"], (e / e.sum()) @ V)


def test_ties_go_to_the_lowest_index_in_any_merge_order() -> None:
    x = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0, -1.0, 2.0] + [0.0] * 16, dtype=torch.float64)
    for seed in range(4):
        got = folded(c.ROUTING, {"x": x}, seed=seed)
        assert got["i"].tolist() == [1, 3, 4, 6]
        assert folded(c.ARGMAX_OF_SOFTMAX, {"x": x}, seed=seed)["i"] == 1


def test_quantise_gemm_derives_only_when_rounding_is_ignored() -> None:
    problem = cascade(c.QUANTISE_GEMM)
    fold = derive_fold(problem, ignore_rounding=True)
    got = run(fold, problem, {"a": X, "w": W})
    close(got["c"], (448 * X / X.abs().max()) @ W)


def test_memoised_on_dtypes_and_reducers() -> None:
    assert derive_fold(cascade(c.SOFTMAX)) is derive_fold(cascade(c.SOFTMAX))
    double = derive_fold(cascade(c.SOFTMAX, t="f64"))
    assert [v.dtype.value for v in double.state] == ["f32", "f64"]
    assert [v.dtype.value for v in derive_fold(cascade(c.SOFTMAX, m="bf16", t="f16")).state] == ["f32", "f32"]
    least = derive_fold(cascade(c.SOFTMAX.replace("max[l]", "min[l]").replace("x[l] - m", "m - x[l]")))
    assert least.state[0].reducer == "min" and least is not derive_fold(cascade(c.SOFTMAX))


def test_a_part_of_a_size_divides_an_index() -> None:
    """A quarter of an unknown size is zero of a trial's few: whole numbers by zero are zero, as in kernels."""
    quarter = call("floordiv", Sym("s"), Const(4, DType.I64))
    body = Load("x", (call("floordiv", Index("l"), quarter), call("mod", Index("l"), quarter)))
    assert derive_fold(Cascade(("l",), (Reduction("t", "sum", (), body, DType.F32),), (("x", DType.F32),))).checks
    found = apply("floordiv", torch.tensor([7, -7, 7]), torch.tensor([0, 0, 2])).tolist()
    assert found == [0, 0, 3] and apply("mod", torch.tensor([7]), torch.tensor([0])).item() == 0


def test_a_number_beside_tensors_is_one_for_each_problem() -> None:
    """The check stacks its problems: each has its own c, however many dims a sum has."""
    text = "s = sum[l] x[l] * c \n v[e] = sum[l] w[l, e] * c"
    c = torch.tensor(0.7, dtype=torch.float64)
    found = folded(text, {"x": X, "w": W, "c": c})
    close(found["s"], X.sum() * c)
    close(found["v"], W.sum(0) * c)
