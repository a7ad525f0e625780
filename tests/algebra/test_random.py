"""Random cascades: each is refused with a reason, or its Fold equals the definition in float64."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.algebra.cascades import cascade
from tests.algebra.test_derive import N, random_tensor, run
from tilefold.algebra.cascade import Cascade
from tilefold.algebra.definition import define, trusted
from tilefold.algebra.derive import derive_fold
from tilefold.algebra.evaluate import Env, Grid, evaluate, reader, reduce_values, select_values
from tilefold.algebra.ops import INDEX_REDUCERS
from tilefold.errors import NotFusibleError

FIRST = ("max[l] x[l]", "min[l] x[l]", "sum[l] x[l]", "sum[l] x[l] * x[l]", "max[l] abs(x[l])", "sum[l] exp(x[l])")
# D is an earlier result; what a factor does to it differs in sign, zeros, growth and shape
FACTORS = (
    "x[l]", "y[l]", "x[l] / D", "exp(x[l] - D)", "exp(D - x[l])", "(x[l] - D / size(l))", "rsqrt(D * D + 1.0)",
    "sqrt(abs(D) + 0.5)", "log(D * D + 2.0)", "exp(x[l] / D)", "(x[l] - D)", "abs(x[l] * D)", "D", "1.0 / D",
    "where(y[l] > 0.0, x[l], 0.0)", "maximum(y[l] * exp(D), 0.0)", "-D * D", "2.0", "bf16(x[l] * D)", "e4m3(x[l] * D)",
)  # fmt: skip
REDUCERS = ("sum", "sum", "sum", "max", "min", "prod", "argmax")


@st.composite
def formulas(draw: st.DrawFn) -> str:
    rows = [f"r0 = {draw(st.sampled_from(FIRST))}"]
    for n in range(1, draw(st.integers(2, 3))):
        factors = [draw(st.sampled_from(FACTORS)) for _ in range(draw(st.integers(1, 3)))]
        body = " * ".join(f.replace("D", f"r{draw(st.integers(0, n - 1))}") for f in factors)
        if draw(st.booleans()):
            body += f" + {draw(st.sampled_from(('y[l]', 'r0', '1.0', 'x[l] * r0')))}"
        reducer = draw(st.sampled_from(REDUCERS))
        left = f"r{n}, i{n}" if reducer == "argmax" else f"r{n}"
        rows.append(f"{left} = {reducer}[l] {body}")
    return "\n".join(rows)


def definition(problem: Cascade, tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, float]]:
    """Every result by its definition, with the magnitude of what it adds up."""
    values, out = dict(tensors), {}
    for r in problem.reductions:
        grid = Grid({"l": (0, N)})
        x = evaluate(r.body, grid, Env(reader(values), {"l": N}, {}, exact=True)).broadcast_to((N,)).double()
        if r.reducer in INDEX_REDUCERS:
            result = select_values(x, torch.arange(N), r.reducer, 0, 1)[0][0]
        else:
            result = reduce_values(x, r.reducer, (0,))
        values[r.name] = result
        out[r.name] = (result, float(x.abs().sum()))
    return out


def eager_is_right(problem: Cascade, tensors: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Results that float64 can say: not an overflow such as exp(1000), nor only rounding such as r * r / r - r."""
    env = Env(reader(tensors), {"l": N}, {}, exact=True)
    want = define(problem.reductions, ("l",), env, 1)
    return {k: bool(ok) for k, ok in trusted(problem.reductions, ("l",), env, 1, want).items()}


# The same cascades in every run: which folds are drawn does not decide whether a change is good.
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(formulas(), st.integers(0, 99))
def test_random_cascades(text: str, seed: int) -> None:
    problem = cascade(text)
    try:
        fold = derive_fold(problem)
    except NotFusibleError as refusal:
        assert refusal.message and (refusal.reduction or "failed its own check" in refusal.message)
        return
    tensors = {"x": random_tensor(N, seed=seed) * 2, "y": random_tensor(N, seed=seed + 1)}
    got = run(fold, problem, tensors, seed=seed)
    right = eager_is_right(problem, tensors)
    for name, (want, size) in definition(problem, tensors).items():
        if right[name]:
            assert bool(got[name].isnan()) == bool(want.isnan()), text
        if right[name] and want.isfinite():
            assert abs(float(got[name] - want)) <= 1e-7 * max(size, abs(float(want))), text


def test_eager_is_right_of_most_and_not_of_what_it_loses() -> None:
    problem = cascade("""
        r0 = sum[l] x[l] * x[l]
        noise = sum[l] -r0 * r0 * 1.0 / r0 + r0
        lucky = prod[l] x[l] * maximum(y[l] * exp(100.0 * r0), 0.0)
        after = sum[l] x[l] - noise
        fine = sum[l] x[l] * rsqrt(r0)
    """)
    tensors = {"x": random_tensor(N) * 2, "y": random_tensor(N, seed=1)}
    right = eager_is_right(problem, tensors)
    assert right == {"r0": True, "noise": False, "lucky": False, "after": False, "fine": True}
