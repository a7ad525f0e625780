"""Recomputation: the 0-1 programme against trying all, and what is made of its answer."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from tests.block.programs import ALL
from tilefold.block.fuse import UNIT, prepare
from tilefold.errors import PlanError
from tilefold.pipeline import compile_program
from tilefold.plan import planner
from tilefold.plan.machine import nominal
from tilefold.plan.planner import plan_program
from tilefold.plan.problem import Problem
from tilefold.plan.recompute import Choice, choices, rewritten, solve
from tilefold.plan.select import Selection, select
from tilefold.plan.targets.cpu import CpuTarget
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse

#: h is cheap and large; its two readers sum over different axes, so they cannot share a kernel with it.
SHARED = """
program shared()
  input x: f32[3000, 4000]
  dim i = 3000
  dim j = 4000
  h[i, j]: f32 = x[i, j] * 2.0 + 1.0
  r[i]: f32 = sum[j] h[i, j] * h[i, j]
  c[j]: f32 = sum[i] h[i, j] * abs(h[i, j])
  return r, c
"""
KERNELS = [("h",), ("r",), ("c",)]


def test_a_cheap_map_is_computed_again() -> None:
    plan = plan_program(parse(SHARED), CpuTarget(nominal()), budget=None)
    assert sorted(c.name for c in plan.program.body if c.name.startswith("h_again"))
    assert len(plan.kernels) == 2 and plan.nbytes == pytest.approx(2 * 4 * 3000 * 4000, rel=0.01)


def test_an_expensive_map_is_stored() -> None:
    dear = "erf(" * 12 + "x[i, j]" + ")" * 12
    plan = plan_program(parse(SHARED.replace("x[i, j] * 2.0 + 1.0", dear)), CpuTarget(nominal()), budget=None)
    assert not [c for c in plan.program.body if "again" in c.name]


def test_what_is_computed_again_is_right() -> None:
    small = SHARED.replace("3000", "65").replace("4000", "70")
    p = prepare(parse(small), frozenset())
    found = choices(p, KERNELS)
    chosen = [next(v for v in found if v.kernel == k and bool(v.again) == (k > 0)) for k in (1, 2)]
    dropped = next(v for v in found if v.kernel == 0 and v.program is None)
    q = rewritten(p, KERNELS, [dropped, *chosen])
    assert "h" not in {c.name for c in q.body} and len(q.body) == 4
    x = {"x": torch.randn(65, 70)}
    want, got = run(p, x), run(q, x)
    assert all(torch.allclose(got[n], want[n]) for n in p.outputs)
    compiled = compile_program(parse(small))
    assert all(torch.allclose(compiled(x, {})[n], want[n], rtol=1e-4, atol=1e-3) for n in p.outputs)


@pytest.mark.parametrize("seed", range(12))
def test_the_answer_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    text = """
program p()
  input x: f32[8, 8]
  dim i = 8
  dim j = 8
  a[i, j]: f32 = x[i, j] * 2.0
  b[i, j]: f32 = a[i, j] + 1.0
  r[i]: f32 = sum[j] a[i, j] * b[i, j]
  c[j]: f32 = sum[i] b[i, j]
  d[j]: f32 = max[i] a[i, j]
  return r, c, d
"""
    p = parse(text)
    kernels = [("a",), ("b",), ("r",), ("c", "d")]
    found = choices(p, kernels)
    price = {v: rng.uniform(1.0, 4.0) for v in found}
    chosen = solve(p, found, price.__getitem__)
    assert _complete(p, kernels, chosen)
    by_kernel = [[v for v in found if v.kernel == k] for k in range(len(kernels))]
    total = min(_total(c, price) for c in product(*by_kernel) if _complete(p, kernels, c))
    assert _total(chosen, price) == pytest.approx(total)


def _total(chosen: object, price: dict[Choice, float]) -> float:
    return sum(price[v] for v in chosen if v.program is not None)  # type: ignore[attr-defined]


def _complete(p: object, kernels: list[tuple[str, ...]], chosen: object) -> bool:
    """Whether everything that is read is written, or given."""
    written = {t for v in chosen for t in v.written}  # type: ignore[attr-defined]
    made = {m for k in kernels for m in k}
    return {"r", "c", "d"} <= written and all(v.reads & made <= written for v in chosen)  # type: ignore[attr-defined]


def test_nothing_stored_for_others_gives_no_choice() -> None:
    p = prepare(parse(ALL["softmax"]), frozenset())
    found = choices(p, [tuple(c.name for c in p.body)])
    assert [v.again for v in found] == [()]


def test_too_many_variants_are_not_counted() -> None:
    """A recurrence whose steps another kernel reads: of 40 stored maps 2^40 were."""
    maps = "".join(f"  m{n + 1}[i]: f32 = m{n}[i] * 0.5 + x[i]\n" for n in range(40))
    reads = " + ".join(f"m{n}[i]" for n in range(1, 41))
    text = (
        f"program p()\n  input x: f32[8]\n  dim i = 8\n  m0[i]: f32 = x[i] + 1.0\n{maps}  r[]: f32 = sum[i] {reads}\n"
    )
    p = parse(text + "  return r\n")
    kernels = [tuple(f"m{n}" for n in range(41)), ("r",)]
    assert choices(p, kernels, most=96) == []
    few = choices(p, [*((f"m{n}",) for n in range(41)), ("r",)], most=10_000)
    assert 41 < len(few) < 10_000


def test_a_sum_of_everything_has_a_kernel_beside_copies() -> None:
    """Its kernel is parallel over a dim that no statement has, which goes with no dead statement."""
    text = SHARED.replace("  return r, c", "  t[]: f32 = sum[i, j] h[i, j] * x[i, j]\n  return r, c, t")
    plan = plan_program(parse(text), CpuTarget(nominal()), budget=None)
    assert [c for c in plan.program.body if "again" in c.name] and UNIT in plan.program.sizes
    assert sorted(m for k in plan.kernels for m in k.members if "again" not in m and m != "h") == ["c", "r", "t"]


def test_a_plan_stands_where_there_is_none_with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def select_once(problem: Problem, *, rivals: bool) -> Selection:
        seen.append(problem.dag.names[0])
        if len(seen) > 1:
            raise PlanError("no partition into legal kernels covers the program")
        return select(problem, rivals=rivals)

    monkeypatch.setattr(planner, "select", select_once)
    plan = plan_program(parse(SHARED), CpuTarget(nominal()), budget=None)
    assert len(seen) == 2 and not [c for c in plan.program.body if "again" in c.name]
