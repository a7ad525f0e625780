"""Plans of whole programs: what is fused, that no plan is cheaper, that what runs is right."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.block.programs import ALL
from tilefold.algebra.dtypes import DType
from tilefold.block.legal import legal
from tilefold.errors import PlanError
from tilefold.pipeline import compile_program
from tilefold.plan import planner
from tilefold.plan.candidates import Kernels
from tilefold.plan.dag import bits
from tilefold.plan.exhaustive import cheapest
from tilefold.plan.forms import Form, build_form, forms, separate
from tilefold.plan.hardware import Machine
from tilefold.plan.machine import nominal
from tilefold.plan.planner import describe, greedy, plan_program, unfused
from tilefold.plan.search import shapes
from tilefold.plan.select import is_chain
from tilefold.plan.targets.cpu import CpuTarget
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.steps import KernelStep
from tilefold.tensor.analysis import Graph
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse

LARGE = """
program chain()
  input x: f32[4096, 4096]
  input w: f32[4096, 64]
  dim i = 4096
  dim j = 4096
  dim k = 64
  s[i]: f32 = sum[j] x[i, j] * x[i, j]
  y[i, j]: f32 = x[i, j] * rsqrt(s[i] / 4096.0 + 1e-05)
  z[i, j]: f32 = max(y[i, j], 0.0)
  o[i, k]: f32 = sum[j] z[i, j] * w[j, k]
  return o
""".replace("max(", "maximum(")

#: Without a library.
BARE = CpuTarget(nominal(), library=False)
TWICE = "program p()\n  input x: f32[8, 32]\n  dim i = 8\n  dim j = 32\n{}  return {}\n"


@pytest.mark.parametrize("name", [n for n in ALL if n != "mean_all"])
def test_no_plan_is_cheaper(name: str) -> None:
    plan = plan_program(parse(ALL[name]), BARE, budget=None)
    made = Kernels(plan.program, BARE)
    assert plan.selection.exact
    assert plan.selection.seconds == pytest.approx(cheapest(made.problem()))
    assert is_chain(made.dag, [k.members for k in plan.selection.kernels])


def test_memory_bound_chains_share_a_kernel() -> None:
    p = parse(LARGE)
    plan = plan_program(p, BARE, budget=None)
    by_greed, alone = greedy(plan), unfused(plan)
    assert plan.selection.seconds <= min(by_greed.seconds, alone.seconds) * (1 + 1e-9)
    assert plan.nbytes < sum(k.variant.what.cost.nbytes for k in alone.kernels)  # type: ignore[attr-defined]


def test_a_slow_library_is_not_called() -> None:
    gemm = (
        "program g()\n  input a: f32[256, 256]\n  input b: f32[256, 256]\n  dim i = 256\n  dim j = 256\n  dim k = 256\n"
    )
    p = parse(gemm + "  c[i, j]: f32 = sum[k] a[i, k] * b[k, j]\n  y[i, j]: f32 = exp(c[i, j])\n  return y\n")
    m = nominal()
    slow: Machine = replace(m, library=dict.fromkeys(m.library, 1e9))
    fast: Machine = replace(m, library=dict.fromkeys(m.library, 1e13))
    assert [k.snapshot.form is None for k in plan_program(p, CpuTarget(slow)).kernels] == [False]
    assert [k.snapshot.form is None for k in plan_program(p, CpuTarget(fast)).kernels] == [True, False]


def test_what_is_planned_runs_and_is_right() -> None:
    p = parse(ALL["rmsnorm_gemm"])
    compiled = compile_program(p)
    x = {"x": torch.randn(70, 40), "g": torch.randn(40), "w": torch.randn(24, 40)}
    assert compiled.planned and all(isinstance(s, KernelStep | LibraryStep) for s in compiled.steps)
    got = compiled(x, {"n": 70})["y"]
    torch.testing.assert_close(got, run(p, x, syms={"n": 70})["y"], rtol=1e-4, atol=1e-4)
    greedily = compile_program(p, goal="greedy")
    assert not greedily.planned
    torch.testing.assert_close(greedily(x, {"n": 70})["y"], got, rtol=1e-4, atol=1e-4)


def test_tiles_of_the_plan_are_those_of_the_kernel() -> None:
    compiled = compile_program(parse(ALL["softmax"]), load=False)
    (step,) = compiled.steps
    assert isinstance(step, KernelStep) and step.tiles is not None
    assert all(t.tile == step.tiles[t.dim] for t in step.kernel().grid)


def test_too_large_programs_are_grouped_greedily(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))  # no plan of it from before
    monkeypatch.setattr(planner, "MOST_OPERATORS", 1)
    with pytest.raises(PlanError, match="too many"):
        plan_program(parse(ALL["softmax"]), CpuTarget(nominal()))
    assert not compile_program(parse(ALL["softmax"]), load=False).planned


def test_a_spent_budget_is_told() -> None:
    p = parse(ALL["attention"])
    full, poor = (plan_program(p, BARE, budget=b) for b in (None, 1))
    assert full.selection.exact and not poor.selection.exact
    assert poor.selection.priced <= full.selection.priced
    assert poor.selection.seconds >= full.selection.seconds * (1 - 1e-9)


def test_equal_layers_are_priced_once() -> None:
    one = "  m{k}[i]: f32 = max[j] {x}[i, j]\n  y{k}[i, j]: f32 = {x}[i, j] - m{k}[i]\n"
    layers = "".join(one.format(k=k, x=f"y{k - 1}" if k else "x") for k in range(6))
    made = Kernels(parse(TWICE.format(layers, "y5")), CpuTarget(nominal()))
    for s in range(1, 1 << 12):
        if s.bit_count() <= 2 and made.bound(s) is not None:
            made.variants(s)
    assert len(made._variants) < len({s for s in range(1, 1 << 12) if s.bit_count() <= 2}) / 3


def test_keys_tell_apart_what_is_written() -> None:
    text = TWICE.format("  s[i]: f32 = sum[j] x[i, j]\n  y[i]: f32 = s[i] * 2.0\n", "{}")
    inside, outside = (Kernels(parse(text.format(o)), CpuTarget(nominal())) for o in ("y", "s, y"))
    assert inside.key(3) != outside.key(3) and inside.key(1) == outside.key(1)


@pytest.mark.parametrize("name", ["softmax", "attention", "layernorm"])
def test_snapshots(name: str) -> None:
    p = planner.prepare(parse(ALL[name]), frozenset())
    g = Graph.of(p)
    group = legal(g, tuple(c.name for c in p.body))
    assert not isinstance(group, str)
    found = dict(forms(g, group, nominal()))
    assert next(iter(found)) == Form() and Form(joined=False) in found
    for form, kernels in found.items():
        again = build_form(g, group, form)
        assert [k.block for k in again] == [k.block for k in kernels]
    passes = separate(g, found[Form()][0].plan)
    assert passes is not None and all(passes) and len(passes) > len(found[Form()][0].plan.stages)


def test_independent_reductions_have_no_separate_passes() -> None:
    p = planner.prepare(
        parse(TWICE.format("  s[i]: f32 = sum[j] x[i, j]\n  m[i]: f32 = max[j] x[i, j]\n", "s, m")), frozenset()
    )
    g = Graph.of(p)
    group = legal(g, ("s", "m"))
    assert not isinstance(group, str)
    assert [str(f) for f, _ in forms(g, group, nominal())] == ["one pass"]


def test_few_rows_of_a_long_axis_may_be_split() -> None:
    text = TWICE.replace("8", "2").replace("32]", "200000]").replace("j = 32", "j = 200000")
    p = planner.prepare(parse(text.format("  s[i]: f32 = sum[j] x[i, j]\n", "s")), frozenset())
    g = Graph.of(p)
    group = legal(g, ("s",))
    assert not isinstance(group, str)
    assert [f.segments for f, _ in forms(g, group, nominal())] == [0, 2, 16]


def test_the_default_tiling_must_be_beaten_clearly() -> None:
    compiled = compile_program(parse(ALL["rmsnorm_gemm"]), goal="greedy", load=False)
    (step,) = [s for s in compiled.steps if isinstance(s, KernelStep)]
    sizes = {d: 64 for d in step.canonical.block.sizes}
    default = shapes(step.canonical.block, sizes, nominal(), all_tiles=False)
    found = shapes(step.canonical.block, sizes, nominal())
    assert len(default) == 1 and default[0] in found
    assert found[0] == default[0] or found[0].cost.seconds * 1.03 < default[0].cost.seconds


def test_the_table_says_why_the_runner_up_lost() -> None:
    plan = plan_program(parse(LARGE), BARE, budget=None, rivals=True)
    rows = describe(plan)
    assert len(rows) == len(plan.kernels)
    assert any(rival.startswith("+") for *_, rival in rows)


def test_refusals_name_the_reason() -> None:
    p = parse(ALL["mean_all"])
    plan = plan_program(p, CpuTarget(nominal()), budget=None)
    assert {(r.producer, r.consumer) for r in plan.refusals} == {("s", "y")}
    assert all(r.reason for r in plan.refusals)


def test_candidates_are_convex_and_legal() -> None:
    made = Kernels(planner.prepare(parse(ALL["attention"]), frozenset()), BARE)
    for s in range(1, made.dag.everything + 1):
        if made.bound(s) is not None:
            assert not isinstance(legal(made.graph, made.dag.members(s)), str)
            group = made.group(s)
            assert group is not None and group.members == tuple(made.dag.names[k] for k in bits(s))
    assert made.whole_bytes("q") > 0 and made.program.dtype_of("q") is DType.F32


def test_garbage_is_not_collected_while_a_plan_is_made(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(planner, "_plan", lambda *a: seen.append(gc.isenabled()))
    assert gc.isenabled()
    planner.plan_program(parse(ALL["softmax"]), BARE)
    assert seen == [False] and gc.isenabled()


def test_what_is_known_of_a_kernel_is_its_price_once_it_has_one() -> None:
    made = Kernels(parse(ALL["softmax"]), BARE)
    s = made.dag.everything
    assert made.at_least(s) == made.bound(s)
    assert made.variants(s)[0].seconds == made.at_least(s) > (made.bound(s) or 0.0)
