"""A run of `tilefold bench planner` for people and for machines: table, JSON, its part of `docs/benchmarks.md`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from tilefold.suites.bench_planner import PlannerReport, PlannerRow
from tilefold.suites.page import write_part


def to_json(report: PlannerReport) -> str:
    """Everything measured and the two figures."""
    figures = {"correlation": report.correlation, "within": report.within}
    return json.dumps({**asdict(report), **figures}, indent=2) + "\n"


def table(report: PlannerReport) -> Table:
    """One row a program: times in microseconds, and the choice's over the fastest of its tilings."""
    out = Table(title=f"{report.machine}, {report.threads} threads", title_justify="left")
    for head in ("program", "sizes", "chosen tiles"):
        out.add_column(head)
    for head in ("predicted us", "measured us", "of", "over the fastest"):
        out.add_column(head, justify="right")
    for r in report.rows:
        out.add_row(*_cells(r))
    return out


def _cells(r: PlannerRow) -> tuple[str, ...]:
    c = r.choice
    times = (f"{1e6 * c.predicted:.0f}", f"{1e6 * c.measured:.0f}")
    return r.name, r.sizes, c.tiles, *times, str(len(r.tilings)), f"{r.behind:.2f}x"


def planning(report: PlannerReport) -> list[str]:
    """What planning each decoder took, a line each."""
    return [
        f"{p.name}: {p.operators} operators become {p.kernels} kernels; the first plan of a process takes "
        f"{p.seconds:.2f} s of the processor"
        for p in report.planned
    ]


def summary(report: PlannerReport) -> str:
    """The two figures in a line."""
    return (
        f"{len(report.rows)} programs: rank correlation of predicted and measured time {report.correlation:.3f}; "
        "the choice is within 5 % of the best of its top 8 (or of all, where there are fewer) in "
        f"{report.within:.0%} of them"
    )


def markdown(report: PlannerReport) -> str:
    """The planner's part of the page."""
    heads = ("program", "sizes", "chosen tiles", "predicted us", "measured us", "tilings", "over the fastest")
    lines = [
        "## The planner's predictions",
        "",
        "Written by `tilefold bench planner --docs docs/benchmarks.md`; do not edit.",
        "",
        f"{summary(report)}.",
        "",
        f"Commit {report.commit}; measured on {report.machine}, {report.threads} "
        f"thread{'s' if report.threads != 1 else ''}. Times are the "
        "best of some rounds in which the tilings take turns. The constants of the cost model were fitted to timings "
        "of these programs on an AVX2 machine, so there the figures are of the fit, not of programs that it has not "
        "seen.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(_cells(r)) + " |" for r in report.rows),
    ]
    if report.planned:
        lines += ["", "Planning a whole decoder, without a limit on what is priced:", ""]
        lines += [f"* {line}." for line in planning(report)]
    return "\n".join(lines) + "\n"


def write(report: PlannerReport, *, json_path: Path | None = None, docs_path: Path | None = None) -> None:
    """Write the JSON and the planner's part of the page where asked."""
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(to_json(report), encoding="utf-8")
    if docs_path is not None:
        write_part(docs_path, "planner", markdown(report))
