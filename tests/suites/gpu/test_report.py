"""Bars are judged on geometric means and say what was missed; tables, page and plots show every row."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from tests.suites.gpu.fixtures import record, results
from tilefold.errors import UnsupportedError
from tilefold.suites.gpu import plots, report
from tilefold.suites.gpu.bars import (
    BARS,
    Bar,
    against,
    bandwidth_here,
    geometric_mean,
    judge_all,
    judge_bar,
    judge_startup,
)
from tilefold.suites.gpu.results import load_all, save
from tilefold.suites.page import CPU, MARKS, write_part

RUN = results(
    record("H1", "tilefold", 10.0, over=1.0, error=1e-3, eager_error=2e-3, first_call=1.0),
    record("H1", "flash", 20.0, over=2.0),
    record("H1", "cudnn", 9.0, over=0.9),
    record("H2", "tilefold", 10.0, over=1.0, first_call=2.0),
    record("H2", "flash", 10.0, over=1.0),
    record("H2", "eager", why="OutOfMemoryError: too much [of it]"),
    record("R1", "tilefold", 5.0, over=1.0, family="moe routing"),
    record("R1", "gemm", 2.0, over=0.4, family="moe routing"),
    numerics=({"row": "causal-prefill-2048", "contender": "flex", "rms": 1e-5, "p90": 2e-5, "p99": 3e-5, "why": ""},),
    ablations=(
        {"study": "levels", "point": "1024", "variant": "unfused", "microseconds": 6.0, "why": ""},
        {"study": "levels", "point": "1024", "variant": "fused", "microseconds": 3.0, "why": ""},
        {"study": "levels", "point": "1024", "variant": "warp", "microseconds": None, "why": "no"},
        {"study": "incremental", "point": "512 keys a block", "variant": "incremental", "microseconds": 8.0, "why": ""},
        {"study": "incremental", "point": "512 keys a block", "variant": "whole", "microseconds": 10.0, "why": ""},
    ),
)


def test_bars_on_geometric_means():
    flash = judge_bar(RUN, Bar("redfuser", ("mha",), ("flash",), 1.4))
    assert flash.value == pytest.approx(math.sqrt(2.0)) and flash.met is True and flash.rows == 2
    assert judge_bar(RUN, Bar("redfuser", ("H*",), ("flash",), 1.5)).met is False
    others = [record(h, name, why="refused") for h in ("H1", "H2") for name in ("eager", "compile", "cudnn")]
    full = results(*RUN.records, *(r for r in others if (r.row, r.contender) != ("H1", "cudnn")))
    best = judge_bar(full, Bar("redfuser", ("mha",), (), 0.9))  # H1's best peer is cuDNN, H2's flash
    assert best.value == pytest.approx(math.sqrt(0.9)) and best.met is True and not best.without
    none = judge_bar(RUN, Bar("redfuser", ("mla",), ("compile",), 2.0))
    assert none.met is None and none.word == "not measured" and math.isnan(none.value)
    assert judge_bar(RUN, Bar("redfuser", ("moe routing",), (), 2.0)).met is None  # a product alone is no peer


def test_a_row_that_tilefold_fails_misses_the_bar():
    run = results(
        record("H1", "tilefold", 10.0, over=1.0), record("H1", "flash", 90.0, over=9.0),
        record("H2", "tilefold", why="wrong"), record("H2", "flash", 10.0),
    )  # fmt: skip
    verdict = judge_bar(run, Bar("redfuser", ("mha",), ("flash",), 1.3))
    assert verdict.met is False and verdict.missing == ("H2",) and verdict.value == pytest.approx(9.0)
    only = judge_bar(results(*run.records[2:]), Bar("redfuser", ("mha",), ("flash",), 1.3))
    assert only.met is False and only.rows == 0


def test_a_row_without_one_of_the_peers_is_left_out_by_name():
    one = judge_bar(RUN, Bar("redfuser", ("mha",), ("flash", "cudnn"), 0.5))
    assert one.met is True and one.rows == 1 and one.without == ("H2 (cudnn)",)
    rows = [record("X1", "tilefold", 9.0, over=1.0, family="softmax"), record("X1", "compile", 99.0, family="softmax")]
    absent = record("X1", "quack", family="softmax", why="UnsupportedError: QuACK cannot be imported: no module")
    for run in (results(*rows), results(*rows, absent)):
        never = judge_bar(run, Bar("redfuser", ("softmax",), ("compile", "quack"), 0.5))
        assert never.met is None and never.word == "not judged, peers missing" and never.without == ("X1 (quack)",)
        assert "left out, a peer lacks: X1 (quack)" in report._missing(never)
    tried = results(*rows, record("X1", "quack", family="softmax", why="OutOfMemoryError: too much"))
    assert judge_bar(tried, Bar("redfuser", ("softmax",), ("compile", "quack"), 0.5)).met is True


def test_the_less_flattering_repetition_counts():
    ours = record("H1", "tilefold", 10.0, over=1.0)
    assert against(record("H1", "flash", 20.0, over=1.5), ours) == 1.5
    assert against(record("H1", "flash", 20.0), ours) == 2.0
    assert math.isnan(geometric_mean([])) and geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_the_bars_of_the_issue():
    bars = {(b.suite, b.rows, b.peers): b.least for b in BARS}
    assert bars["redfuser", ("mha",), ("flash",)] == 1.3 and bars["redfuser", ("mha",), ("cudnn",)] == 0.9
    assert bars["redfuser", ("mha decode",), ()] == 0.97
    assert bars["redfuser", ("mla",), ("compile",)] == bars["redfuser", ("moe routing",), ("compile",)] == 2.0
    assert bars["redfuser", ("quant gemm",), ("compile",)] == 1.1
    assert bars["redfuser", ("inertia",), ("compile",)] == 3.5
    assert bars["neptune", ("softcap prefill",), ("flex",)] == 1.8
    for name in ("global", "causal", "gqa", "window", "alibi"):
        assert bars["neptune", (f"{name} prefill",), ("flex",)] == 1.15
    for name in ("l2 norm", "rmsnorm max", "performer"):
        assert bars["neptune", (name,), ("compile",)] == 1.2


def test_bandwidth_and_first_call_bars():
    fast = {"family": "softmax", "nbytes": 3e9}

    def on_an_h100(*records):
        return replace(results(*records), device={"name": "NVIDIA H100 80GB HBM3"})

    without = on_an_h100(record("X1", "tilefold", 1000.0, over=1.0, first_call=4.0, **fast))
    verdicts = {v.name: v for v in judge_all(without)}
    stated = "softmax: 2,800 GB/s (92% of an H100's memory rate)"
    assert verdicts[stated].met is True  # 3e9 bytes in 1010 us, no QuACK to compare with
    assert verdicts["slowest first call: under 3 s"].met is False
    with_quack = on_an_h100(*without.records, record("X1", "quack", 900.0, over=0.9, **fast))
    names = {v.name: v.met for v in judge_all(with_quack)}
    assert names["softmax: 0.95x quack"] is False and stated not in names
    decode = {"suite": "neptune", "family": "gqa decode", "nbytes": 1e9}
    long = record("gqa-decode-32768", "tilefold", 400.0, over=1.0, **{**decode, "length": 32768})
    short = record("gqa-decode-128", "tilefold", 4e6, over=1.0, **{**decode, "length": 128})
    found = next(
        v for v in judge_all(on_an_h100(long, short)) if v.name.startswith("* decode from 32K keys: 2,550 GB/s")
    )
    assert found.rows == 1 and found.value == pytest.approx(1e9 / 404e-6 / 1e9) and found.met is False


def test_bandwidth_is_asked_for_in_proportion_elsewhere():
    """2,800 GB/s of an H100 are 92% of its memory rate: 3,947 GB/s of a device of 4,300."""
    row = record("X1", "tilefold", 1e6 * 3.9e9 / 3.9e12 / 1.01, over=1.0, family="softmax", nbytes=3.9e9)
    run = replace(results(row), device={"name": "NVIDIA H200"}, rates={"f16": 8e14, "f8": 1e15, "memory": 4.3e12})
    found = next(v for v in judge_all(run) if v.name.startswith("softmax"))
    assert found.name == "softmax: 3,948 GB/s (92% of the memory rate, as 2,800 GB/s on an H100)"
    assert found.met is False and found.value == pytest.approx(3900)
    assert bandwidth_here(replace(run, device={"name": "NVIDIA H100 80GB HBM3"}), 2.8e12)[0] == 2.8e12


def test_startup_bars():
    figures = {"capture": 0.25, "imports": 4.5, "tuning": 21.0}
    entries = (
        {"row": "H2", "cold": 2.5, "warm": 0.7, "host_us": 8.0, "fuse_us": 20.0, "torch_us": 5.0, **figures, "why": ""},
        {"row": "L2", "cold": 2.9, "warm": 0.3, "host_us": None, **figures, "why": "died"},
    )
    found = {v.name: v for v in judge_startup(results(startup=entries))}
    assert judge_startup(RUN) == ()
    assert found["first call, empty caches: under 3 s"].met is True and found["quick tuning: under 30 s"].met is True
    warm = found["first call of a second process: under 0.5 s"]
    assert warm.met is False and warm.missing == ("H2",) and warm.value == 0.7
    assert found["host, warm call of the custom operator: under 10 us"].missing == ("L2",)
    page = report.markdown(results(startup=entries))
    assert "| H2 | 2.5 | 0.7 | 0.25 | 21 | 4.5 | 8 | 20 | 5 |  |" in page
    assert "| L2 | 2.9 | 0.3 | 0.25 | 21 | 4.5 | - | - | - | died |" in page
    assert "| first call of a second process: under 0.5 s | 0.70 | 2 | MISSED (H2) |" in page
    assert "in a process that has imported torch" in page
    old = ({"row": "H2", "cold": 2.5, "warm": 0.3, "host_us": 8.0, "why": ""},)  # a file from before tuning was timed
    verdicts = {v.name: v.met for v in judge_startup(results(startup=old))}
    assert verdicts[
        "quick tuning: under 30 s"
    ] is None and "| H2 | 2.5 | 0.3 | - | - | - | 8 | - | - |  |" in report.markdown(results(startup=old))


def test_a_section_for_each_device_the_h100_first():
    other = replace(RUN, device={"name": "NVIDIA A100"})
    first = replace(RUN, device={"name": "NVIDIA H100 80GB HBM3"})
    page = report.markdown(other, first)
    assert [ln for ln in page.splitlines() if ln.startswith("### ")] == ["### NVIDIA H100 80GB HBM3", "### NVIDIA A100"]
    assert page.count("#### redfuser: bars") == 2 and page.count("How to read it") == 1


def test_results_of_all_devices_and_no_dry_runs(tmp_path):
    for name, device in (("h200", {"name": "H200", "multiprocessors": 132}), ("dry-run", {"name": "x86_64"})):
        save(replace(RUN, device=device), tmp_path / f"{name}.json")
    assert [r.device["name"] for r in load_all(tmp_path)] == ["H200"]


def test_means_are_by_operator_and_of_the_suite():
    found = {(f, name): (mean, n) for f, name, mean, n in report.means(RUN, "redfuser")}
    assert found["mha", "flash"] == (pytest.approx(math.sqrt(2.0)), 2)
    assert found["mha", "best peer"] == (pytest.approx(math.sqrt(0.9)), 2)
    assert found["all", "flash"][1] == 2 and ("moe routing", "best peer") not in found
    assert found["moe routing", "gemm"] == (pytest.approx(0.4), 1)


def test_the_page_has_every_row_losers_and_failures_included():
    page = report.markdown(RUN)
    assert "| H1 | 8 x 8 | 10.0 | 5.0 | 50% | 20.0 (2.00x) | 9.0 (0.90x) | - | 1e-03 (2e-03) |" in page
    assert "| H2 | 8 x 8 | 10.0 |" in page and "- H2: eager: OutOfMemoryError: too much [of it]" in page
    assert "| mha: 1.3x flash | 1.41 | 2 | met |" in page and "| mla: 2x compile | - | 0 | not measured |" in page
    assert "a GPU; torch 2.11; f16 products 800 TFLOP/s, e4m3 1,300 TFLOP/s, memory 3,000 GB/s; 2026-11-21" in page
    assert "| causal-prefill-2048 | Flex | 1e-05 | 2e-05 | 3e-05 |" in page
    assert "| 1024 | 6.0 (1.00) | 3.0 (0.50) | - | warp: no |" in page
    assert "| 512 keys a block | 8.0 (0.80) | 10.0 (1.00) |  |" in page


def test_rows_stand_in_the_order_of_the_suite_however_they_were_measured():
    names = ("H3", "R2", "H1", "unknown", "R1", "H2")
    measured = results(*(record(n, "tilefold", 5.0, family="moe routing" if n[0] == "R" else "mha") for n in names))
    shown = [records[0].row for records in report.by_row(measured, "redfuser")]
    assert [n for n in shown if n[0] == "H"] == ["H1", "H2", "H3"] and shown[-1] == "unknown"
    assert [n for n in shown if n[0] == "R"] == ["R1", "R2"]


def test_tables_for_a_terminal():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.table(RUN, "redfuser", frozenset({"H1", "H2"})))
    console.print(report.means_table(RUN, "redfuser"))
    console.print(report.bars_table(judge_all(RUN)))
    for study in report.studies(RUN):
        console.print(study)
    text = console.export_text()
    assert "cuDNN 9.0" in text and "flash SDPA 2.00x" in text and "too much [of it]" in text and "R1" not in text
    assert "1.41x (2)" in text and "0.95x (2)" in text  # means over flash and the best peers
    assert "met" in text and "not measured" in text and "levels" in text and "causal-prefill-2048" in text


def test_each_part_of_the_page_keeps_the_other(tmp_path):
    path = tmp_path / "docs" / "b.md"
    write_part(path, "gpu", "gpu one\n")
    assert path.read_text() == f"# Benchmarks\n\n{MARKS['gpu']}\n\ngpu one\n"
    write_part(path, CPU, "# Benchmarks\n\ncpu\n")
    write_part(path, "gpu", "gpu two\n")
    assert path.read_text() == f"# Benchmarks\n\ncpu\n\n{MARKS['gpu']}\n\ngpu two\n"
    write_part(path, CPU, "# Benchmarks\n\nnew\n")
    assert path.read_text() == f"# Benchmarks\n\nnew\n\n{MARKS['gpu']}\n\ngpu two\n"


def test_rows_of_other_commits_are_left_out_by_name():
    new, old = (
        record(row, n, 2.0, commit=c, over=1.0) for row, c in (("H1", "abc"), ("H2", "old")) for n in ("tilefold",)
    )
    page = report.markdown(results(old, new))
    assert "Commit abc." in page and "measured at others: H2." in page and "| H2 |" not in page and "| H1 |" in page


def test_plots_of_every_operator(tmp_path):
    pytest.importorskip("matplotlib")
    lengths = [
        record(f"causal-prefill-{n}", name, float(n), suite="neptune", family="causal prefill", over=1.0,
               **{"length": n, "flops": 1e9 * n})
        for n in (128, 256, 512) for name in ("tilefold", "flex")
    ]  # fmt: skip
    run = results(*RUN.records, *lengths, record("L1", "tilefold", why="failed", family="mla"))
    names = {p.name for p in plots.draw(run, tmp_path)}
    assert names == {"redfuser-mha.png", "redfuser-moe-routing.png", "neptune-causal-prefill.png"}
    assert all((tmp_path / n).stat().st_size > 1000 for n in names)
    assert plots.over_length([run.row("neptune", f"causal-prefill-{n}") for n in (128, 256, 512)])
    assert not plots.over_length([run.row("redfuser", n) for n in ("H1", "H2", "R1")])
    assert plots.throughput(lengths[0], True) == pytest.approx(1e9 * 128 / 128 / 1e6)


def test_plots_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="need matplotlib"):
        plots.draw(RUN, tmp_path)
