"""First calls: what is run, cold and warm in caches of their own, and what the page says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli import invoke
from tilefold.suites import startup
from tilefold.suites.gpu.startup import Ran
from tilefold.suites.page import MARKS

ROW = "llama infer"


@pytest.fixture
def processes(monkeypatch):
    """The words that processes would be started with; each takes as many seconds as came before it."""
    seen: list[tuple[str, ...]] = []

    def run_process(words, seconds):
        seen.append(tuple(words))
        if "inductor" in words and len(seen) > 2:
            return Ran({}, "no compiler", "")
        return Ran({"wall": float(len(seen)), "processor": 0.5}, "", "")

    monkeypatch.setattr(startup, "run_process", run_process)
    return seen


def test_contenders_take_turns_and_the_second_process_has_the_caches_of_the_first(processes):
    report = startup.run(["llama infer"], layers=2, commit="abc")
    who = [words[-3] for words in processes]
    assert who == ["tilefold", "inductor", "tilefold", "inductor"]
    caches = {words[1:4] for words in processes}
    assert len(caches) == 1 and all(v.split("=")[1].startswith("/") for v in next(iter(caches)))
    assert len({Path(v.split("=")[1]) for v in next(iter(caches))}) == 3
    ours, theirs = report.entries
    assert (ours.cold.wall, ours.warm.wall, ours.why) == (1.0, 3.0, "")
    assert (theirs.cold.wall, theirs.warm.wall, theirs.why) == (2.0, None, "no compiler")
    assert startup.cells(report) == [
        (ROW, "1.0 (2.0)", "3.0 (-)", "0.5 (0.5)", "0.5 (-)", "- (-)", "inductor: no compiler")
    ]  # fmt: skip


def test_the_page_and_the_json_say_where_figures_are_from(processes, tmp_path):
    out, docs = tmp_path / "r.json", tmp_path / "b.md"
    words = ["bench", "startup", "--rows", ROW, "--commit", "abc", "--json", str(out), "--docs", str(docs)]
    done = invoke(words)
    assert done.exit_code == 0, done.output
    assert "commit abc" in done.stdout and "1.0 (2.0)" in done.stdout
    assert MARKS[startup.PART] in docs.read_text() and "1.0 (2.0)" in docs.read_text()
    data = json.loads(out.read_text())
    assert data["commit"] == "abc" and [e["contender"] for e in data["entries"]] == list(startup.CONTENDERS)


def test_reports_of_devices_stand_beside_each_other(processes, tmp_path):
    """A file a device, read back as it was; rows are measured at once where that is asked for."""
    report = startup.run(["llama infer", "bert *"], workers=2, commit="abc")
    assert [e.row for e in report.entries[::2]] == ["llama infer", "bert infer", "bert train"]
    gpu = replace(report, kind="cuda", device="some GPU", entries=(with_peak(report.entries[0]), *report.entries[1:]))
    for name, each in (("a", report), ("b", gpu)):
        startup.write(each, json_path=tmp_path / f"{name}.json", docs_path=tmp_path / "page.md")
    assert startup.load_all(tmp_path) == (report, gpu)
    page = (tmp_path / "page.md").read_text()
    assert page.index(report.device) < page.index("some GPU") and "| 12 (-) |" in page


def test_a_run_that_is_cut_short_keeps_the_rows_that_have_ended(monkeypatch, tmp_path):
    out, told = tmp_path / "r.json", []

    def run_process(words, seconds):
        if words[-4] != ROW:
            raise KeyboardInterrupt
        return Ran({"wall": 1.0, "processor": 2.0}, "", "")

    monkeypatch.setattr(startup, "run_process", run_process)
    with pytest.raises(KeyboardInterrupt):
        startup.run([ROW, "bert *"], progress=told.append, keep=lambda r: startup.write(r, json_path=out))
    assert [e["row"] for e in json.loads(out.read_text())["entries"]] == [ROW, ROW]
    assert f"{ROW}: tilefold, cold: 1.0 s, processor 2.0 s" in told


def with_peak(e):
    return replace(e, warm=replace(e.warm, peak=12e6))


def test_an_unknown_model_is_refused():
    done = invoke(["bench", "startup", "--rows", "nothing"])
    assert done.exit_code == 2 and "no model is called nothing" in done.stderr and "llama infer" in done.stderr


def test_a_process_says_what_its_first_call_took(monkeypatch, capsys, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    real = startup.torch.compile
    monkeypatch.setattr(startup.torch, "compile", lambda f, backend: real(f, backend={"tilefold": "eager"}[backend]))
    startup.main(["bert train", "tilefold", "1", "cpu"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.keys() == {"wall", "processor"} and min(found.values()) > 0
