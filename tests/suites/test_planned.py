"""The planner's part of the block suite: what is quick of it, and that it can fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilefold.plan.exhaustive import MOST, cheapest, runnable
from tilefold.plan.machine import nominal
from tilefold.plan.planner import plan_program
from tilefold.plan.problem import Problem
from tilefold.plan.select import select
from tilefold.plan.targets.cpu import CpuTarget
from tilefold.suites.blocks import planned
from tilefold.suites.blocks.decoder import A_LAYER, Decoder, forward_program, training_program
from tilefold.suites.blocks.planned import problem_of, random_problem
from tilefold.suites.case import Maker
from tilefold.tensor.ir import Program

SMALL = Decoder(2, length=32, dim=64, heads=4, kv_heads=2, hidden=96)


def test_names_are_unique() -> None:
    names = [c.name for c in planned.cases()]
    assert len(set(names)) == len(names) == 10


def test_random_dags_are_planned_optimally() -> None:
    assert planned.random_dags().ok


def test_a_selection_that_is_not_optimal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def singles(p: Problem, *, rivals: bool = True) -> object:
        return select(replace(p, largest=1), rivals=rivals)

    monkeypatch.setattr(planned, "select", singles)
    assert not planned.random_dags().ok


def test_exhaustive_search_has_its_limit() -> None:
    p = random_problem(random.Random(0), MOST + 1)
    with pytest.raises(ValueError, match="too many"):
        cheapest(p)


def test_kernels_in_a_ring_cannot_run() -> None:
    p = random_problem(random.Random(1), 3)
    dag = replace(p.dag, preds=(0, 1, 2), succs=(2, 4, 0))
    assert runnable(replace(p, dag=dag), [1, 2, 4])
    assert not runnable(replace(p, dag=dag), [0b101, 0b010])


def test_decoder_programs() -> None:
    forward, both = forward_program(SMALL), training_program(replace(SMALL, layers=1))
    assert len(forward.outputs) == 1 and len(both.outputs) == 1 + A_LAYER + 1
    plan = plan_program(both, CpuTarget(nominal()))
    assert {m for k in plan.kernels for m in k.members} == {c.name for c in plan.program.body}


@pytest.mark.parametrize(("name", "fn", "make"), planned.PROGRAMS, ids=[name for name, *_ in planned.PROGRAMS])
def test_no_plan_of_a_function_is_cheaper(name: str, fn: Callable[..., Any], make: Maker) -> None:
    p = planned.trace(fn, *make(torch.Generator().manual_seed(0))).program
    plan = plan_program(p, CpuTarget(nominal()), budget=None)
    assert plan.selection.seconds == pytest.approx(cheapest(problem_of(plan)))
    assert name != "LayerNorm + matmul" or planned.kernels_of(plan) == "2 kernels (1 library)"


@pytest.mark.parametrize("make", [forward_program, training_program])
def test_groupings_for_comparison_are_priced_under_the_same_laws(make: Callable[[Decoder], Program]) -> None:
    """The streams of an attention are expensive to store for them too, and no library call computes their products."""
    found = planned.decoder(make, 1)
    assert found.ok, found.detail
