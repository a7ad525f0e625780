"""`tilefold bench` of the GPU suites, run dry."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.cli import invoke
from tilefold.errors import TilefoldError
from tilefold.suites import bench_cpu
from tilefold.suites.page import MARKS


def test_a_dry_run_writes_results_page_and_plots(tmp_path):
    pytest.importorskip("matplotlib")
    out, docs, charts = tmp_path / "r.json", tmp_path / "b.md", tmp_path / "plots"
    words = ["bench", "redfuser", "--device", "cpu", "--small", "--rows", "V-small", "--peers", "eager,torch.var"]
    done = invoke([*words, "--budget", "0.1", "--json", str(out), "--docs", str(docs), "--plots", str(charts)])
    assert done.exit_code == 0, done.output
    assert "V-small" in done.stdout and ("MISSED" in done.stdout or "met" in done.stdout)
    data = json.loads(out.read_text())
    assert {r["contender"] for r in data["records"]} == {"tilefold", "eager", "torch.var"}
    assert all(r["microseconds"] and r["error"] < 1e-5 for r in data["records"])
    assert MARKS["gpu"] in docs.read_text() and "V-small" in docs.read_text()
    assert (charts / "redfuser-variance.png").is_file()


def test_programs_run_dry(tmp_path):
    out, docs = tmp_path / "r.json", tmp_path / "b.md"
    words = ["bench", "programs", "--device", "cpu", "--small", "--rows", "pointwise: one small tensor"]
    done = invoke(
        [*words, "--peers", "eager", "--workers", "1", "--commit", "abc", "--json", str(out), "--docs", str(docs)]
    )
    assert done.exit_code == 0, done.output
    assert "one small tensor | pointwise" in done.stdout and "commit: abc" in docs.read_text()
    assert MARKS["programs"] in docs.read_text() and "one small tensor | pointwise" in (tmp_path / "r.txt").read_text()


@pytest.mark.parametrize(("suite", "rows"), [("programs", "241"), ("models", "20"), ("redfuser", "11")])
def test_rows_that_are_not_begun_are_counted(suite, rows, tmp_path):
    words = ["bench", suite, "--device", "cpu", "--small", "--seconds", "0", "--json", str(tmp_path / "r.json")]
    done = invoke(words)
    assert done.exit_code == 0, done.output
    said = re.sub(r"\s+", " ", done.stdout)
    assert re.search(rf"{rows} of {rows} rows were not begun before --seconds had passed: .* and \d+ more hint: ", said)
    assert "--resume goes on from here" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "no benchmarks for 'nothing'\n  hint: cpu, planner, startup, curve, page, redfuser"),
        (["curve", "--rows", "L1"], "bench curve takes no --rows\n  hint: it takes --commit, --device, --docs, --json"),
        (["cpu", "--row-seconds", "3"], "bench cpu takes no --row-seconds"),
        (["programs", "--plots", "charts"], "bench programs takes no --plots"),
        (["neptune", "--only", "a"], "bench neptune takes no --only"),
        (["redfuser", "--device", "tpu"], "no benchmarks on 'tpu'"),
        (["redfuser", "--device", "cpu", "--rows", "Z9"], "no row of redfuser is called Z9"),
        (["programs", "--device", "cpu", "--classes", "nothing"], "no row of programs is called nothing"),
        (["models", "--device", "tpu"], "no benchmarks on 'tpu'"),
        (["neptune", "--device", "cpu", "--study", "luck"], "no study 'luck'"),
    ],
)
def test_mistakes_end_with_a_message(words, message, tmp_path):
    result = invoke(["bench", *words, "--json", str(tmp_path / "r.json")])
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize("option", ["--json", "--docs"])
def test_results_that_cannot_be_written_are_not_measured(option, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_cpu, "run", lambda *_, **__: pytest.fail("measured in vain"))
    (tmp_path / "file").write_text("kept")
    for place in (tmp_path, tmp_path / "file" / "r.json"):
        result = invoke(["bench", "cpu", option, str(place)])
        assert result.exit_code == 2 and re.search("Is a directory|Not a directory|exists", result.stderr), (
            result.output
        )
    assert [x.name for x in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


def test_where_results_will_be_is_left_as_it_is_until_then(tmp_path, monkeypatch):
    def run(*_, **__):
        assert [(x.name, x.read_text()) for x in tmp_path.iterdir()] == [("old", "kept")]
        raise TilefoldError("stopped here")

    monkeypatch.setattr(bench_cpu, "run", run)
    (tmp_path / "old").write_text("kept")
    result = invoke(["bench", "cpu", "--json", str(tmp_path / "new"), "--docs", str(tmp_path / "old")])
    assert result.exit_code == 2 and "stopped here" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_way_out_is_shown(tmp_path):
    result = invoke(["bench", "neptune", "--json", str(tmp_path / "r.json")])
    assert result.exit_code == 2 and "no CUDA device" in result.stderr and "--device cpu --small" in result.stderr
