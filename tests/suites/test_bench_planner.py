"""The planner's benchmark: figures, page, and one family measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tilefold.errors import TilefoldError
from tilefold.plan.machine import nominal
from tilefold.suites import bench_planner, planner_report
from tilefold.suites.bench_planner import PlannerReport, PlannerRow, Timed, spearman, tilings
from tilefold.suites.page import CPU, MARKS, write_part
from tilefold.suites.planner_programs import FAMILIES


def row(name: str, *times: tuple[float, float]) -> PlannerRow:
    return PlannerRow(name, "n=1", tuple(Timed(f"i:{k}", p, m) for k, (p, m) in enumerate(times)))


REPORT = PlannerReport("cpu", 1, (row("a", (1.0, 2.0), (1.5, 1.95)), row("b", (2.0, 3.0), (2.5, 2.0))))


def test_sixty_programs_of_one_kernel_each() -> None:
    assert sum(len(f.sizes) for f in FAMILIES) == 60
    for f in FAMILIES[::7]:
        _, found = tilings(bench_planner.prepare(f.program(), frozenset()), nominal(), f.sizes[0])
        assert len({str(s) for s in found}) == len(found) >= 2


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)
    assert math.isnan(spearman([1.0], [1.0]))


def test_a_choice_is_good_within_five_percent() -> None:
    assert REPORT.within == 0.5 and REPORT.correlation == pytest.approx(1.0)
    assert REPORT.rows[1].behind == pytest.approx(1.5)


def test_page_and_json(tmp_path: Path) -> None:
    page, data = tmp_path / "benchmarks.md", tmp_path / "planner.json"
    write_part(page, CPU, "# Benchmarks\n\nfirst\n")
    write_part(page, "gpu", "last\n")
    planner_report.write(REPORT, json_path=data, docs_path=page)
    write_part(page, CPU, "# Benchmarks\n\nagain\n")
    text = page.read_text()
    order = [text.index(s) for s in ("again", "## The planner's predictions", MARKS["gpu"], "last")]
    assert order == sorted(order) and "first" not in text and text.count("rank correlation") == 1
    assert json.loads(data.read_text())["within"] == 0.5


def test_one_family_is_measured() -> None:
    report = bench_planner.run(["scaled residual"], top=2)
    assert len(report.rows) == 3
    assert all(t.measured > 0 and t.predicted > 0 for r in report.rows for t in r.tilings)
    assert planner_report.table(report).row_count == 3


def test_planning_a_decoder_is_timed(tmp_path: Path) -> None:
    report = bench_planner.run(["3 layers"])
    (planned,) = report.planned
    assert not report.rows and planned.seconds > 0 and 1 < planned.kernels < planned.operators
    page = tmp_path / "benchmarks.md"
    planner_report.write(replace(REPORT, planned=report.planned), docs_path=page)
    (line,) = planner_report.planning(report)
    assert line.startswith("decoder, 3 layers forward and backward: ") and f"* {line}." in page.read_text()


def test_an_unknown_family_is_an_error() -> None:
    with pytest.raises(TilefoldError, match="no program is called"):
        bench_planner.run(["nothing"])
