"""What was planned for a CPU is read by the next process: the same steps, without planning or proving anything."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.block.programs import ALL
from tilefold import pipeline
from tilefold.errors import PlanError
from tilefold.plan.machine import nominal
from tilefold.runtime import kept
from tilefold.runtime.fused_programs import PLANS
from tilefold.runtime.steps import KernelStep
from tilefold.tensor.interp import run
from tilefold.tensor.text import parse

NAME = "rmsnorm_gemm"
TWO = """
program two()
  input x: f32[512, 512]
  input w: f32[512, 512]
  dim i = 512
  dim j = 512
  dim k = 512
  y[i, j]: f32 = sum[k] x[i, k] * w[k, j]
  z[i, j]: f32 = sum[k] y[i, k] * y[k, j]
  return z
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """An empty cache and a machine whose products are the library's; the list grows by every program planned."""
    found, plan = [], pipeline.plan_program
    machine = nominal()
    machine = replace(machine, library=dict.fromkeys(machine.library, 1e12))
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pipeline, "this_machine", lambda: machine)
    monkeypatch.setattr(pipeline, "plan_program", lambda p, m, **how: found.append(p.name) or plan(p, m, **how))
    return found


def compiled(goal="fast"):
    return pipeline.compile_program(parse(ALL[NAME]), goal=goal, load=False)


def described(made):
    """Names, and of kernels tiles, order and text."""
    return [(s.name, s.tiles, s.kernel()) if isinstance(s, KernelStep) else (s.name, s.reads) for s in made.steps]


@pytest.mark.parametrize("goal", ["fast", "greedy", "fused"])
def test_a_second_process_has_the_same_steps(goal, asked, monkeypatch):
    first = compiled(goal)
    for name in ("plan_program", "fuse"):
        monkeypatch.setattr(pipeline, name, None)  # neither is called again
    again = compiled(goal)
    assert described(again) == described(first) and again.fused == first.fused
    assert again.planned == first.planned == (goal == "fast")
    assert any(isinstance(s, KernelStep) for s in again.steps)
    x = {"x": torch.randn(70, 40), "g": torch.randn(40), "w": torch.randn(24, 40)}
    want = run(again.program, {k: t.double() for k, t in x.items()}, syms={"n": 70})["y"].float()
    torch.testing.assert_close(again(x, {"n": 70})["y"], want, rtol=1e-4, atol=1e-4)


def test_another_machine_goal_or_tilefold_plans_again(asked, monkeypatch):
    compiled()
    compiled()
    assert len(asked) == 1
    monkeypatch.setattr(pipeline, "this_machine", lambda: replace(nominal(), launch=1.0))
    compiled()
    monkeypatch.setattr(pipeline.torch, "get_num_threads", lambda: 7)
    compiled()
    monkeypatch.setattr(kept, "stamp", lambda root: "another Tilefold")
    compiled()
    assert len(asked) == 4


def changed(text, how):
    data = json.loads(text)
    (settled,) = [n for n in data["nodes"] if n[0] == "Settled"]
    parts = [data["nodes"][at] for _, at in settled[2][1:]]
    how(parts)
    return json.dumps(data).encode()


def no_kernel(parts):
    parts[0][2] = 99


def no_statement(parts):
    parts[0][1] = ["t", "nowhere"]


@pytest.mark.parametrize("poison", [no_kernel, no_statement])
def test_parts_of_nothing_are_planned_again(poison, asked, tmp_path):
    first = compiled()
    (file,) = (tmp_path / PLANS.name).iterdir()
    whole = file.read_bytes()
    text = changed(whole[kept.DIGEST :], poison)
    file.write_bytes(kept.checksum(file, text).encode() + text)
    assert described(compiled()) == described(first)
    assert len(asked) == 2 and file.read_bytes() == whole


def test_a_file_of_another_kind_is_no_plan(asked, tmp_path):
    compiled()
    (file,) = (tmp_path / PLANS.name).iterdir()
    whole = file.read_bytes()
    text = b'{"nodes":[],"root":"a plan"}'
    file.write_bytes(kept.checksum(file, text).encode() + text)
    compiled()
    assert len(asked) == 2 and file.read_bytes() == whole


def test_a_step_that_reads_what_is_made_behind_it_is_refused():
    made = pipeline.compile_program(parse(TWO), load=False)
    assert len(made.steps) == 2
    with pytest.raises(PlanError, match="before it is made"):
        replace(made, steps=made.steps[::-1])
