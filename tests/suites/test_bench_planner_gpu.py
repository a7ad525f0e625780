"""The planner's benchmark for GPUs, with a clock that is made up."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cli import invoke
from tilefold.errors import TilefoldError
from tilefold.plan.hardware import H100
from tilefold.suites import bench_planner_gpu
from tilefold.suites.bench_planner_gpu import GpuPlannerReport, GpuPlannerRow, TimedPlan, run, summary, table
from tilefold.suites.timing import Series


class Clock:
    """The n-th call that is timed takes n milliseconds; nothing runs."""

    policy = "made up"

    def __init__(self):
        self.count = 0

    def ready(self, call):
        return call

    def rounds(self, calls, *, most, budget):
        self.count += 1
        return {name: Series((self.count * 1e-3,)) for name in calls}

    def release(self):
        pass


def compiled(p, *, device, search):
    return lambda inputs, syms: None


def row(name, family, *plans):
    return GpuPlannerRow(name, family, *(TimedPlan(1, p, m) for p, m in plans))


def test_figures():
    rows = (
        row("a", "x", (1.0, 10.0), (0.5, 9.0)),
        row("b", "x", (2.0, 20.0), (1.5, 25.0)),
        row("c", "y", (3.0, 5.0)),
        row("d", "y", (4.0, 4.0)),
    )
    report = GpuPlannerReport("gpu", "made up", rows, (("e", "no memory"),))
    assert report.correlation("x") == pytest.approx(1.0) and report.correlation("y") == pytest.approx(-1.0)
    assert report.correlation() < 0 and math.isnan(report.correlation("z"))
    assert [r.right for r in rows] == [True, False, None, None] and report.choices == (1, 2)
    lines = list(summary(report))
    assert "not timed: e: no memory" in lines and any("of 2 programs with two plans" in x for x in lines)
    assert table(report).row_count == 4


def test_programs_are_planned_and_timed():
    report = run(
        H100, Clock(), device="cpu", names=["softmax of columns", "rows of odd length"], small=True, compiled=compiled
    )
    assert report.rows and not report.left
    assert all(r.greedy.predicted > 0 and r.greedy.measured >= 1e-3 and r.greedy.kernels >= 1 for r in report.rows)
    assert len({r.greedy.measured for r in report.rows}) == len(report.rows)


def test_both_plans_are_timed_where_they_differ(monkeypatch):
    real, asked = bench_planner_gpu.gpu_kernels, []

    def other(p, target):
        asked.append(target.search)
        return real(p, target, "fast" if target.search else "fused")

    monkeypatch.setattr(bench_planner_gpu, "gpu_kernels", other)
    report = run(H100, Clock(), device="cpu", names=["odd sizes, bias"], small=True, compiled=compiled)
    (found,) = report.rows
    assert asked == [False, True] and found.selected is not None and found.selected.kernels > found.greedy.kernels
    assert (found.greedy.measured, found.selected.measured) == (1e-3, 2e-3)


def test_what_cannot_run_is_said():
    def refuses(p, *, device, search):
        raise TilefoldError("not today")

    report = run(H100, Clock(), device="cpu", names=["softmax of columns"], small=True, compiled=refuses)
    assert not report.rows and {why for _, why in report.left} == {"not today"}
    with pytest.raises(TilefoldError, match="no program is called nothing"):
        run(H100, Clock(), names=["nothing"])


def test_the_command_needs_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke(["bench", "planner", "--device", "cuda"])
    assert result.exit_code == 2 and "no CUDA device" in result.stderr
