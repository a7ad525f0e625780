"""A benchmark run for people and for machines: table, JSON, and the page `docs/benchmarks.md`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from tilefold.suites.bench_cpu import OURS, BenchReport, BenchRow, Contender
from tilefold.suites.page import CPU, write_part

_PEERS = ("eager", "compile", "sdpa")
_HEADS = {"eager": "eager", "compile": "torch.compile", "sdpa": "SDPA"}


def to_json(report: BenchReport) -> str:
    """Everything measured, as JSON; NaN becomes null."""
    return json.dumps(_plain(asdict(report)), indent=2) + "\n"


def _plain(x: object) -> object:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def table(report: BenchReport) -> Table:
    """The rows for a terminal. Ratios above 1: Tilefold is faster."""
    out = Table(title=machine_line(report), title_justify="left")
    out.add_column("workload")
    for head in ("ms", "floor", *(_HEADS[p] for p in _PEERS), "error", "target"):
        out.add_column(head, justify="right")
    for r in report.rows:
        cells = _cells(r)
        missed = any(t.met is not True for t in r.targets)
        out.add_row(*cells[:-1], f"[{'red' if missed else 'green'}]{cells[-1]}[/]" if cells[-1] else "")
    return out


def machine_line(report: BenchReport) -> str:
    """Where the figures are from."""
    m = report.machine
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in m.gemm_gflops)
    return (
        f"{m.cpu}, {m.capability}, {m.threads} threads, torch {m.torch}; "
        f"GEMM GFLOP/s: {rates}; copy {m.copy_gbps:.1f} GB/s"
    )


def _cells(r: BenchRow) -> list[str]:
    ours = r.contender(OURS)
    assert ours is not None
    return [
        r.name,
        _ms(ours),
        f"{r.floor_ms:.2f}",
        *(_ratio(r.contender(p)) for p in _PEERS),
        "" if math.isnan(ours.error) else f"{ours.error:.0e}",
        ", ".join(_verdict(t.peer, t.least, t.met) for t in r.targets),
    ]


def _ms(c: Contender) -> str:
    return "-" if not c.ms else f"{min(c.ms):.2f}"


def _ratio(c: Contender | None) -> str:
    """`1.52x (1.60)`: the smaller of the repetitions and the larger."""
    if c is None:
        return ""
    return f"{min(c.ratios):.2f}x ({max(c.ratios):.2f})" if c.ratios else "-"


def _verdict(peer: str, least: float, met: bool | None) -> str:
    word = {True: "met", False: "MISSED", None: "not measured"}[met]
    return f"{least:.1f}x {_HEADS[peer]}: {word}"


def markdown(report: BenchReport) -> str:
    """The page `docs/benchmarks.md`."""
    heads = ["workload", "Tilefold ms", "floor ms", *(f"vs {_HEADS[p]}" for p in _PEERS), "error", "target"]
    lines = [
        "# Benchmarks",
        "",
        "Written by `tilefold bench cpu --docs docs/benchmarks.md`; do not edit.",
        "",
        f"Commit {report.commit}; measured on {machine_line(report)}.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(_cells(r)) + " |" for r in report.rows),
        "",
        *_notes(report),
    ]
    return "\n".join(lines) + "\n"


def _notes(report: BenchReport) -> list[str]:
    remarks = [f"- {r.name}: {c.name}: {c.why}" for r in report.rows for c in r.contenders if c.why]
    memory = (
        "Results are in memory that the allocator keeps (glibc's `mallopt`), as in a program that reuses its buffers;\n"
        'rows marked "fresh output" leave the allocator alone, and page faults cost all contenders alike.'
        if report.machine.kept_memory
        else "Large results are fresh memory on each call: page faults cost all contenders alike."
    )
    return [
        "How to read it:",
        "",
        "- *vs peer*: the peer's time over Tilefold's, above 1 where Tilefold is faster. Contenders take turns in one",
        "  process, on the same random arguments; a ratio is the median of the rounds' own ratios. The series is",
        "  repeated twice: the smaller ratio is given, and the larger in brackets.",
        "- *floor*: the time that the measured ceilings allow at best (matrix product rate of the library, copy",
        "  bandwidth), every byte counted once.",
        "- *error*: maximum relative error against float64. Every contender is checked before it is timed: Tilefold's",
        "  error may be twice eager's own and a few units in the last place, that of peers more.",
        f"- {memory}".replace("\n", "\n  "),
        *(["", "Remarks:", "", *remarks] if remarks else []),
    ]


def write(report: BenchReport, *, json_path: Path | None = None, docs_path: Path | None = None) -> None:
    """Write the JSON and the CPU part of the page where asked."""
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(to_json(report), encoding="utf-8")
    if docs_path is not None:
        write_part(docs_path, CPU, markdown(report))
