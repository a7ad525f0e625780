"""The benchmark: wrong contenders are not timed, targets are judged on the worse repetition, reports are true."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch

from tilefold.errors import TilefoldError
from tilefold.suites import bench_cpu
from tilefold.suites.bench_cpu import BenchReport, BenchRow, Contender, MachineRates, Target, floor_ms
from tilefold.suites.bench_report import markdown, table, to_json, write
from tilefold.suites.case import normal, together
from tilefold.suites.workloads import WORKLOADS, Workload

MACHINE = MachineRates("a cpu", "AVX2", 2, "2.13", (("f32", 100.0), ("bf16", 20.0)), 10.0, True)
SMALL = Workload("small", lambda x: x.softmax(-1), together(normal(8, 64)), (("eager", 1.0), ("sdpa", 3.0)))


def rows() -> BenchReport:
    ours, eager = Contender("tilefold", 1e-7, (2.0, 2.1), (1.0, 1.0)), Contender("eager", 1e-7, (3.0, 3.1), (1.5, 1.4))
    wrong = Contender("compile", 0.5, why="wrong: less right than eager")
    targets = (Target("eager", 1.45, False), Target("compile", 1.0, None))
    return BenchReport(MACHINE, (BenchRow("softmax", (ours, eager, wrong), targets, 0.5),))


def test_wrong_and_failing_contenders_are_not_timed():
    def broken(x):
        raise RuntimeError("no such luck\nat all")

    w = replace(SMALL, peers=(("off", lambda x: x.softmax(-1) * 1.01), ("broken", broken)))
    calls, found = bench_cpu.prepare(w, w.make(torch.Generator().manual_seed(0)), lambda _: None)
    by_name = {c.name: c for c in found}
    assert "off" not in calls and by_name["off"].why.startswith("wrong") and by_name["off"].error > 0.005
    assert "broken" not in calls and by_name["broken"].why == "no such luck"
    assert {"tilefold", "eager", "compile"} <= set(calls)


def test_slow_peers_are_timed_by_one_call(monkeypatch):
    monkeypatch.setattr(bench_cpu, "SLOW_SECONDS", 0.2)
    calls_made = []

    def slow(x):
        calls_made.append(time.sleep(0.3))
        return x.softmax(-1)

    w = replace(SMALL, peers=(("sdpa", slow),))
    row = bench_cpu._row(w, 0.1, 3, lambda _: None)
    found = row.contender("sdpa")
    assert len(found.ms) == 1 and found.ms[0] >= 300 and len(calls_made) == 2  # one to check, one to time
    assert found.why == "timed by one call" and min(found.ratios) > 3 and row.targets[1].met is True


def test_rates_are_the_better_of_two_measurements():
    other = replace(MACHINE, gemm_gflops=(("f32", 90.0), ("bf16", 30.0)), copy_gbps=11.0)
    best = bench_cpu.best_of(MACHINE, other)
    assert best.gemm_gflops == (("f32", 100.0), ("bf16", 30.0)) and best.copy_gbps == 11.0


def test_a_row_is_measured(monkeypatch):
    monkeypatch.setattr(bench_cpu, "WORKLOADS", (SMALL,))
    said = []
    report = bench_cpu.run(["SMALL"], budget=0.1, rounds=5, progress=said.append)
    (row,) = report.rows
    assert [c.name for c in row.contenders] == ["tilefold", "eager", "compile"]
    assert all(len(c.ms) == len(c.ratios) == bench_cpu.REPEATS for c in row.contenders)
    assert row.contenders[0].ratios == (1.0, 1.0)
    assert row.targets[0].met is (row.contenders[1].ratio >= 1.0)
    assert row.targets[1] == Target("sdpa", 3.0, None)
    assert any("timing" in s for s in said)
    assert report.machine.copy_gbps > 0.1 and all(r > 0.1 for _, r in report.machine.gemm_gflops)


def test_unknown_workloads_are_refused():
    with pytest.raises(TilefoldError, match="no workload is called"):
        bench_cpu.run(["nothing like this"])


def test_the_less_flattering_repetition_counts():
    assert Contender("eager", 0.0, (1.0, 1.0), (1.5, 1.2)).ratio == 1.2
    assert bench_cpu._target("eager", 1.3, Contender("eager", 0.0, (1.0, 1.0), (1.5, 1.2))).met is False
    assert bench_cpu._target("eager", 1.2, Contender("eager", 0.0, (1.0, 1.0), (1.5, 1.2))).met is True


def test_floors_by_hand():
    gemm = Workload("g", SMALL.fn, SMALL.make, flops=1e9, nbytes=1e6, peak="bf16")
    assert floor_ms(gemm, MACHINE) == pytest.approx(10.0)  # the f32 rate is the faster one
    assert floor_ms(replace(gemm, peak=""), MACHINE) == pytest.approx(0.1)
    assert floor_ms(replace(gemm, nbytes=1e9), MACHINE) == pytest.approx(100.0)


def test_the_issues_bars_are_the_targets():
    bars = {(w.name.split(",")[0], peer): least for w in WORKLOADS for peer, least in w.targets}
    size = "12 x 1024 x 64"
    assert bars[f"bf16 attention {size}", "sdpa"] == 1.4
    assert bars[f"f32 attention {size}", "sdpa"] == 1.0
    assert bars[f"f32 soft-cap attention {size}", "compile"] == bars[f"f32 ALiBi attention {size}", "compile"] == 1.5
    assert bars["inertia I4", "compile"] == 3.0 and bars["variance V4", "compile"] == 1.0
    assert bars["softmax 1024 x 8192", "eager"] == 1.3
    assert bars["MoE routing R1", "compile"] == 1.5 and bars["MoE routing R1", "eager"] == 1.0
    assert bars["RMSNorm + SwiGLU FFN", "compile"] == 1.0


def test_reports_say_what_was_missed(tmp_path):
    page = markdown(rows())
    assert "| softmax | 2.00 | 0.50 | 1.40x (1.50) | - |" in page
    assert "1.4x eager: MISSED" in page or "1.5x eager: MISSED" in page
    assert "- softmax: compile: wrong: less right than eager" in page
    assert table(rows()).row_count == 1
    data = json.loads(to_json(rows()))
    assert data["rows"][0]["contenders"][1]["ms"] == [3.0, 3.1]
    write(rows(), json_path=tmp_path / "out" / "b.json", docs_path=tmp_path / "b.md")
    assert (tmp_path / "b.md").read_text() == page and json.loads((tmp_path / "out" / "b.json").read_text()) == data
