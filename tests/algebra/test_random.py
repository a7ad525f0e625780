"""Random cascades: each is refused with a reason, or its Fold equals the definition in float64."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.algebra.cascades import cascade
from tests.algebra.test_derive import N, random_tensor, run
from tilefold.algebra.cascade import Cascade
from tilefold.algebra.derive import derive_fold
from tilefold.algebra.evaluate import Env, Grid, evaluate, reader, reduce_values, select_values
from tilefold.algebra.expr import tensors_read
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


@dataclasses.dataclass
class Defined:
    """A result by its definition, the magnitude of what it adds up, and whether eager's own order is harmless."""

    value: torch.Tensor
    size: float
    sure: bool


def definition(problem: Cascade, tensors: dict[str, torch.Tensor]) -> dict[str, Defined]:
    """Every result by its definition.

    Not sure is a sum or product of finite numbers that overflows in some order of taking them, and not in
    others, such as 0 * 1e200 * 1e200, and what depends on one: eager is right or wrong by chance there.
    """
    values, out = dict(tensors), dict[str, Defined]()
    for r in problem.reductions:
        grid = Grid({"l": (0, N)})
        x = evaluate(r.body, grid, Env(reader(values), {"l": N}, {}, exact=True)).broadcast_to((N,)).double()
        if r.reducer in INDEX_REDUCERS:
            result = select_values(x, torch.arange(N), r.reducer, 0, 1)[0][0]
        else:
            result = reduce_values(x, r.reducer, (0,))
        sure = all(out[d].sure for d in tensors_read(r.body) if d in out)
        values[r.name] = result
        out[r.name] = Defined(result, float(x.abs().sum()), sure and in_any_order(r.reducer, x))
    return out


def in_any_order(reducer: str, x: torch.Tensor) -> bool:
    """Whether no order of adding or multiplying finite x leaves the range of float64."""
    if not x.isfinite().all() or reducer not in ("sum", "prod"):
        return True
    if reducer == "sum":
        return bool(x.abs().sum().isfinite())
    factors = x[x != 0].abs()
    return bool(factors.clamp(min=1).prod().isfinite() and factors.clamp(max=1).prod() > 0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
    for name, want in definition(problem, tensors).items():
        if not want.sure:
            continue
        assert bool(got[name].isnan()) == bool(want.value.isnan()), text
        if want.value.isfinite():
            bound = 1e-7 * max(want.size, abs(float(want.value)))
            assert abs(float(got[name] - want.value)) <= bound, text
