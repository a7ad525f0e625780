"""Results survive a killed run, and a contender that kills or hangs its process is noted and left out."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.suites.gpu.fixtures import record, results
from tilefold.errors import TilefoldError
from tilefold.suites.gpu import numerics, supervise
from tilefold.suites.gpu.results import Results, load, save
from tilefold.suites.gpu.worker import Job, Status, read_status, work


def test_results_round_trip_and_nan_is_null(tmp_path):
    path = tmp_path / "new" / "r.json"
    made = results(
        record("H1", "tilefold", 12.5, over=1.0, error=1e-3),
        record("H1", "eager", why="out of memory"),
        numerics=({"row": "causal", "rms": 1e-5},),
    )
    save(made, path)
    back = load(path)
    assert back.row("redfuser", "H1")[0] == replace(
        made.records[0], eager_error=back.records[0].eager_error, **_nans(back)
    )
    assert back.done == made.done and back.numerics == made.numerics and back.device == made.device
    raw = json.loads(path.read_text())
    assert raw["records"][1]["ratio"] is None and math.isnan(back.records[1].best_us)
    assert len([ln for ln in path.read_text().splitlines() if '"contender"' in ln]) == 2  # a record is a line


def _nans(back):
    """NaN is not equal to itself: the fields that are."""
    r = back.records[0]
    return {n: getattr(r, n) for n in ("spread", "ratio", "first_call") if math.isnan(getattr(r, n))}


def test_other_files_and_other_versions_are_refused(tmp_path):
    path = tmp_path / "r.json"
    assert load(path) == Results()
    for text, message in (("{}", "not a file of results"), ("[1]", "not a file of results"), ("{", "not a file")):
        path.write_text(text)
        with pytest.raises(TilefoldError, match=message):
            load(path)
    save(results(record("H1", "eager", 1.0)), path)
    path.write_text(path.read_text().replace('"version": 1', '"version": 99'))
    with pytest.raises(TilefoldError, match="version 99"):
        load(path)


def test_a_row_replaces_what_was_known_of_it():
    made = results(record("H1", "eager", 1.0), record("H2", "eager", 2.0))
    again = made.finished(("redfuser", "H1"), [record("H1", "eager", 3.0)])
    assert [r.best_us for r in again.row("redfuser", "H1")] == [3.0] and len(again.records) == 2
    assert set(again.done) == set(made.done)
    assert made.without([("redfuser", "H1")]).done == (("redfuser", "H2"),)
    noted = made.failed(record("H3", "flex", why="died"))
    assert ("redfuser", "H3") not in noted.done and noted.row("redfuser", "H3")[0].why == "died"


@pytest.fixture
def job(tmp_path):
    return Job(
        "redfuser", str(tmp_path / "r.json"), str(tmp_path / "status"), device="cpu", rows=("V-small", "I-small"),
        small=True, only=("eager",), rounds=2, seconds=0.01,
    )  # fmt: skip


def test_jobs_travel_as_text(job):
    assert Job.from_text(job.to_text()) == job
    assert Job.from_text(replace(job, rows=None, study="numerics").to_text()).rows is None


def test_a_worker_measures_what_is_not_done(job):
    said = []
    first = work(job, said.append)
    assert first.done == (("redfuser", "V-small"), ("redfuser", "I-small"))
    assert {r.contender for r in first.records} == {"tilefold", "eager"} and all(r.microseconds for r in first.records)
    assert first.device["name"] and first.versions["torch"] and first.rates["memory"] > 0 and first.date
    assert any(s.row == "I-small" and s.contender == "eager" for s in said)
    assert read_status(Path(job.status)).row == "I-small"
    again = work(job)  # nothing is measured twice
    assert [r.microseconds for r in again.records] == [r.microseconds for r in load(Path(job.results)).records]
    assert [r.best_us for r in again.records] == pytest.approx([r.best_us for r in first.records], rel=1e-4)
    late = replace(job, results=job.results + "2", deadline=1.0)
    assert work(late).done == ()


def test_results_of_another_device_are_not_mixed(job, tmp_path):
    save(Results(device={"name": "another"}), tmp_path / "r.json")
    with pytest.raises(TilefoldError, match="was measured on another"):
        work(job)


#: A worker that dies, or hangs, at the contenders named in its second argument, and finishes every other row.
#: It knows the file's format instead of importing anything, and so starts at once.
FAKE = """
import json, os, sys, time
job, faults = json.loads(sys.argv[1]), dict(f.split("=") for f in sys.argv[2].split(","))

def say(row, contender, doing):
    with open(job["status"] + ".new", "w") as f:
        json.dump({"row": row, "contender": contender, "doing": doing, "since": time.time()}, f)
    os.replace(job["status"] + ".new", job["status"])

def read():
    with open(job["results"]) as f:
        return json.load(f)

for row in job["rows"]:
    if [job["suite"], row] in read()["done"]:
        continue
    known = [r["contender"] for r in read()["records"] if r["row"] == row]
    for contender in ("tilefold", "eager"):
        say(row, contender, "compiling")
        fault = faults.get(f"{row}/{contender}")
        if contender in known:
            continue
        if fault == "abort":
            print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
            os.abort()
        if fault == "hang":
            time.sleep(60)
    say(row, "", "timing")
    if faults.get(row) == "exit":
        sys.exit("no reference")
    data = read()
    blank = {"suite": job["suite"], "row": row, "family": "", "shape": "", "length": 0, "kind": "peer"}
    data["records"] += [{**blank, "contender": c} for c in ("tilefold", "eager") if c not in known]
    data["done"].append([job["suite"], row])
    with open(job["results"], "w") as f:
        json.dump(data, f)
"""


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "fake_worker.py"
    script.write_text(FAKE)
    return lambda faults: lambda job: (sys.executable, str(script), job.to_text(), faults)


def test_a_contender_that_kills_or_hangs_the_process_is_noted(job, fake):
    job = replace(job, row_seconds=0.0)
    said = []
    done = supervise.run(
        job, command=fake("V-small/eager=abort,I-small/tilefold=hang"), progress=said.append, grace=2.0
    )
    whys = {(r.row, r.contender): r.why for r in done.records}
    assert whys["V-small", "eager"] == "the process died (signal 6): CUDA error: an illegal memory access"
    assert whys["I-small", "tilefold"] == "took longer than 2 s: compiling"
    assert whys["V-small", "tilefold"] == whys["I-small", "eager"] == ""
    assert len(done.done) == 2 and any("I-small" in s for s in said)


#: A worker of the numerical study that dies at the flash contender of each row, and finishes the others.
STUDY = """
import json, os, sys, time
job = json.loads(sys.argv[1])
with open(job["results"]) as f:
    data = json.load(f)
known = {(e["row"], e["contender"]) for e in data["numerics"]}
for row in ("global-prefill-67", "causal-prefill-67"):
    for contender in ("tilefold", "flash"):
        if (row, contender) in known:
            continue
        with open(job["status"] + ".new", "w") as f:
            json.dump({"row": row, "contender": contender, "doing": "errors", "since": time.time()}, f)
        os.replace(job["status"] + ".new", job["status"])
        if contender == "flash":
            sys.exit("an illegal memory access")
        data["numerics"].append({"row": row, "contender": contender, "rms": 1e-5, "p90": 0, "p99": 0, "why": ""})
        with open(job["results"], "w") as f:
            json.dump(data, f)
"""


def test_a_study_survives_what_kills_its_process(job, tmp_path):
    script = tmp_path / "study.py"
    script.write_text(STUDY)
    job = replace(job, suite="neptune", rows=None, study="numerics")
    save(results(numerics=({"row": "old", "contender": "flex", "rms": 1.0, "p90": 1.0, "p99": 1.0, "why": ""},)),
         Path(job.results))  # fmt: skip
    done = supervise.run(job, command=lambda job: (sys.executable, str(script), job.to_text()))
    found = {(e["row"], e["contender"]): e["why"] for e in done.numerics}
    assert set(found) == {(r, c) for r in ("global-prefill-67", "causal-prefill-67") for c in ("tilefold", "flash")}
    assert found["causal-prefill-67", "tilefold"] == "" and "illegal memory" in found["causal-prefill-67", "flash"]
    stuck = "import sys; exec(open(sys.argv[2]).read().replace('if (row', 'if 0 and (row'))"
    with pytest.raises(TilefoldError, match="again and again"):
        supervise.run(job, command=lambda job: (sys.executable, "-c", stuck, job.to_text(), str(script)), resume=True)


def test_a_study_is_kept_as_it_goes_and_ends_in_time(job, monkeypatch):
    """One entry is begun though the time is over, for a run must give something; the rest is left."""
    monkeypatch.setattr(numerics, "errors_of", lambda case, *rest: [{"row": case.row, "contender": "tilefold"}])
    late = replace(job, suite="neptune", rows=None, study="numerics", deadline=1.0)
    assert len(work(late).numerics) == 1 and len(load(Path(late.results)).numerics) == 1
    again = work(late)
    assert len(again.numerics) == 2
    assert len(work(replace(late, deadline=None)).numerics) > 4


def test_a_row_that_fails_as_a_whole_is_finished_with_the_reason(job, fake):
    done = supervise.run(job, command=fake("V-small=exit"))
    assert all("no reference" in r.why for r in done.row("redfuser", "V-small"))
    assert len(done.done) == 2


def test_a_worker_that_cannot_begin_is_an_error(job):
    with pytest.raises(TilefoldError, match=r"cannot begin.*no such thing"):
        supervise.run(job, command=lambda job: (sys.executable, "-c", "raise SystemExit('no such thing')"))


def test_resume_keeps_finished_rows_and_a_new_run_does_not(job, fake, tmp_path):
    path = tmp_path / "r.json"
    first = supervise.run(job, command=fake("none=none"))
    marked = replace(first, records=tuple(replace(r, why="kept") for r in first.records))
    save(marked, path)
    assert {r.why for r in supervise.run(job, command=fake("none=none"), resume=True).records} == {"kept"}
    assert {r.why for r in supervise.run(job, command=fake("none=none")).records} == {""}
    assert str(Status("H1", "eager", "compiling", 0.0)) == "H1: eager compiling"


def test_a_table_is_of_one_commit():
    rows = [record("H1", "tilefold", 1.0, commit="new"), record("H2", "tilefold", 1.0, commit="old")]
    other = record("causal", "tilefold", 1.0, suite="neptune", commit="old")
    found = results(rows[1], other, rows[0])
    kept, commit, older = found.of_one_commit("redfuser")
    assert commit == "new" and older == ("H2",)
    assert kept.done == (("neptune", "causal"), ("redfuser", "H1")) and kept.records == (other, rows[0])
    assert found.of_one_commit("neptune") == (found, "old", ())
    assert Results().of_one_commit("neptune") == (Results(), "", ())
