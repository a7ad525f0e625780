"""NaN, infinities, zeros, nothing, one element, huge and tiny values: as torch's eager code."""

from __future__ import annotations

import math

import pytest
import torch

from tests.algebra import cascades as c
from tests.algebra.cascades import cascade
from tests.algebra.test_derive import SIZES, N, close, folded, random_tensor, run
from tilefold.algebra.context import Options, own_load
from tilefold.algebra.derive import build_fold, derive_fold
from tilefold.frontend.fuse import fuse

INF = math.inf


def with_values(*values: float) -> torch.Tensor:
    """A row of N numbers whose first ones are given."""
    x = random_tensor(N)
    x[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return x


ROWS = {
    "one -inf": with_values(-INF),
    "starts with -inf": with_values(*[-INF] * 12),
    "all -inf": torch.full((N,), -INF, dtype=torch.float64),
    "one +inf": with_values(0.0, INF),
    "both": with_values(INF, -INF),
    "nan": with_values(1.0, math.nan),
    "nan and inf": with_values(INF, 1.0, math.nan),
    "zeros": torch.zeros(N, dtype=torch.float64),
    "ties": torch.ones(N, dtype=torch.float64),
    "huge": random_tensor(N) * 1e4,
    "tiny": random_tensor(N) * 1e-30,
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("seed", range(2))
def test_softmax_family_as_torch(row: str, seed: int) -> None:
    x, v = ROWS[row], random_tensor(N, 3, seed=5)
    m = x.max()
    e = (x - m).exp()
    got = folded(c.SOFTMAX, {"x": x}, seed=seed)
    close(got["m"], m)
    close(got["t"], e.sum())
    attention = folded(c.ATTENTION, {"p": x[None], "v": v}, seed=seed, sizes=SIZES | {"i": 1})
    close(attention["o"][0], (e / e.sum()) @ v)
    got = folded(c.LOGSUMEXP_GUARDED, {"x": x}, seed=seed)
    guard = torch.where(got["m"].abs() == INF, 0.0, got["m"])
    close(got["t"].log() + guard, x.logsumexp(0))


@pytest.mark.parametrize("row", [r for r in ROWS if r != "both"])
def test_norms_as_torch(row: str) -> None:
    x, w = ROWS[row], random_tensor(N, 3, seed=6)
    m = x.abs().max()
    close(folded(c.L2_NORM, {"x": x})["t"], (x / m).square().sum())
    r = torch.rsqrt(x.square().mean() + 1e-6)
    close(folded(c.RMSNORM_MAX, {"x": x})["m"], (x / (x.square().mean() + 1e-6).sqrt()).max())
    close(folded(c.RMSNORM_GEMM, {"x": x, "g": x * 0 + 1, "w": w})["o"], (x * r * (x * 0 + 1)) @ w)
    close(folded(c.VARIANCE, {"x": x})["q"], ((x - x.mean()) ** 2).sum())
    problem = cascade(c.QUANTISE_GEMM)
    got = run(derive_fold(problem, ignore_rounding=True), problem, {"a": x, "w": w})
    want = (448 * x / m) @ w
    assert torch.equal(got["c"].isfinite(), want.isfinite())
    close(got["c"].nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0))


@pytest.mark.parametrize("row", ["ties", "huge", "one -inf", "nan", "one +inf"])
def test_choices_as_torch(row: str) -> None:
    x = ROWS[row]
    got = folded(c.ARGMAX_OF_SOFTMAX, {"x": x})
    p = (x - x.max()).exp() / (x - x.max()).exp().sum()
    close(got["p"], p.max())
    if not p.isnan().all():
        assert got["i"] == p.argmax()
    scaled = x * torch.rsqrt(x.square().sum() + 1e-6)
    got = folded(c.ARGMIN_SCALED, {"x": x})
    close(got["p"], scaled.min())
    if not scaled.isnan().all():
        assert got["i"] == scaled.argmin()


def test_other_end_catches_nan_that_the_best_key_hides() -> None:
    """x = -inf makes the norm infinite: -inf / inf is NaN, though the largest x is finite."""
    fold = derive_fold(cascade(c.RMSNORM_MAX))
    assert [v.name for v in fold.state] == ["s", "m", "m_other"]
    assert folded(c.RMSNORM_MAX, {"x": ROWS["one -inf"]})["m"].isnan()


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_and_one_element(n: int) -> None:
    sizes = SIZES | {"l": n, "i": 2}
    p, v = random_tensor(2, n), random_tensor(n, 3)
    got = folded(c.ATTENTION, {"p": p, "v": v}, sizes=sizes)
    close(got["o"], torch.softmax(p, -1) @ v)
    close(got["m"], p.amax(-1) if n else torch.full((2,), -INF))
    x = random_tensor(n)
    close(folded(c.VARIANCE, {"x": x}, sizes=sizes)["q"], torch.tensor(0.0))
    close(folded(c.L2_NORM, {"x": x}, sizes=sizes)["m"], x.abs().max() if n else torch.tensor(-INF))


def test_l2_norm_does_not_overflow_or_vanish_in_f32() -> None:
    for scale in (1e-30, 1e30):
        x = (random_tensor(N) * scale).float()
        got = folded(c.L2_NORM, {"x": x}, exact=False)
        norm = got["m"] * got["t"].sqrt()
        torch.testing.assert_close(norm.double(), x.double().norm(), rtol=1e-6, atol=0)


def test_variance_keeps_its_digits_beside_a_large_mean_in_f32() -> None:
    """E[x^2] - E[x]^2 has lost them all: 1e8 has a spacing of 8 in f32."""
    x = (random_tensor(N) + 1e4).float()
    want = x.double().var(correction=0) * N
    for seed in range(5):
        got = folded(c.VARIANCE, {"x": x}, exact=False, seed=seed)["q"]
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=0)
    raw = (x * x).sum() - x.sum() ** 2 / N
    assert abs(raw.double() - want) > 0.1 * want


def test_inertia_and_covariance_are_centred_in_f32() -> None:
    place, mass = (random_tensor(N, 3) + 1e4).float(), random_tensor(N).abs().float() + 0.1
    d = place.double() - (mass.double()[:, None] * place.double()).sum(0) / mass.double().sum()
    got = folded(c.INERTIA, {"w": mass, "x": place}, exact=False)["I"]
    torch.testing.assert_close(got.double(), (mass.double()[:, None] * d**2).sum(0), rtol=1e-3, atol=0)
    got = folded(c.COVARIANCE, {"x": place[:, :2]}, exact=False)["q"] / (N - 1)
    torch.testing.assert_close(got.double(), torch.cov(place[:, :2].double().mT), rtol=1e-2, atol=1e-2)


OFFSET = {
    "variance": (c.VARIANCE, lambda x, w: ((x[:, 0] - x[:, 0].mean()) ** 2).sum(), "q"),
    "covariance": (c.COVARIANCE, lambda x, w: torch.cov(x[:, :2].mT) * (N - 1), "q"),
}


@pytest.mark.parametrize("offset", [1e5, 1e6])
@pytest.mark.parametrize("name", OFFSET)
def test_values_far_from_zero_keep_the_digits_of_their_spread_in_f32(name: str, offset: float) -> None:
    """What the rounding of a running mean adds is kept beside the sums and taken out; without it, it is found."""
    text, definition, result = OFFSET[name]
    x, w = (random_tensor(N, 3) + offset).float(), random_tensor(N).abs().float() + 0.1
    inputs = {"w": w, "x": x[:, 0] if name == "variance" else x[:, :2] if name == "covariance" else x}
    want = definition(x.double(), w.double())
    problem = cascade(text)
    forms = {on: build_fold(problem, Options(residuals=on)) for on in (True, False)}

    def error(on: bool, seed: int) -> float:
        got = run(forms[on], problem, inputs, exact=False, seed=seed)[result].double()
        return float((got - want).abs().max() / want.abs().max())

    assert max(error(True, seed) for seed in range(5)) < 2e-6
    assert max(error(False, seed) for seed in range(5)) > 1e-4


def test_what_a_user_takes_out_is_not_taken_out_twice() -> None:
    """torch's variance brings its own residual (`frontend.operators.reduce.centred`)."""
    fold = derive_fold(cascade(c.VARIANCE.replace("q =", "rest = sum[l] x[l] - s / size(l)\nq =")))
    assert dict(fold.finish)["q"] == own_load(next(v for v in fold.state if v.name == "q"))


def test_squares_of_equal_values_are_not_negative() -> None:
    x = torch.full((N,), 0.1, dtype=torch.float32)
    assert all(folded(c.VARIANCE, {"x": x}, exact=False, seed=s)["q"] >= 0 for s in range(5))


def test_a_residual_that_overflows_takes_nothing_out() -> None:
    x = torch.full((N,), 1e25, dtype=torch.float32)
    x[0] = -1e25
    assert folded(c.VARIANCE, {"x": x}, exact=False)["q"] == INF


def test_signed_weights_whose_partial_sum_vanishes() -> None:
    """The running centre is undefined while the weights seen so far add up to 0; nothing may be lost."""
    w = torch.ones(N, dtype=torch.float64)
    w[1] = -1.0
    x = random_tensor(N, 3)
    center = (w[:, None] * x).sum(0) / w.sum()
    problem = cascade(c.INERTIA)
    for seed in range(6):
        got = run(derive_fold(problem), problem, {"w": w, "x": x}, seed=seed)
        close(got["I"], (w[:, None] * (x - center) ** 2).sum(0))


def test_delayed_factors_are_those_that_cannot_overflow() -> None:
    laws = {k: [s.law for s in derive_fold(cascade(t)).derivation] for k, t in c.DERIVABLE.items()}
    assert "delay" in laws["attention"] and "kept in the loop" in laws["attention"]
    assert "delay" in laws["RMSNorm + GEMM"] and "kept in the loop" not in laws["RMSNorm + GEMM"]
    assert "delay" not in laws["L2 norm"] and "kept in the loop" in laws["L2 norm"]


def left_of(x, y):
    """What is left of x, centred, without its projection on y: squares, summed."""
    x, y = (t - t.mean(-1, keepdim=True) for t in (x, y))
    share = (x * y).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True)
    return (x - share * y).square().sum(-1)


def test_what_a_projection_leaves_keeps_its_digits_where_that_is_little():
    """Of sums of products it would be the small difference of large ones: 7 % off."""
    y = torch.randn(4, 2000, generator=torch.Generator().manual_seed(0))
    x = y + 1e-3 * torch.randn(4, 2000, generator=torch.Generator().manual_seed(1))
    want, eager, ours = left_of(x.double(), y.double()), left_of(x, y), fuse(left_of)(x, y)
    assert (ours / want - 1).abs().max() <= 2 * (eager / want - 1).abs().max() + 1e-6
