"""Many workers: shares, records kept although workers die, and a device that is one's own while one times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.suites.gpu.fixtures import record, results
from tilefold.errors import TilefoldError
from tilefold.suites.gpu.cases import select
from tilefold.suites.gpu.results import load, save
from tilefold.suites.gpu.turns import Turns
from tilefold.suites.gpu.worker import Job
from tilefold.suites.programs import run

ROWS = ("pooling: maximum 2x2", "pooling: mean 2x2", "pooling: mean of the image")


def job(tmp_path, **more):
    fixed = {"suite": "programs", "results": str(tmp_path / "r.json"), "status": "", "device": "cpu", "rows": ROWS}
    return Job(**fixed, small=True, only=("eager",), seconds=0.01, rounds=3, **more)


def test_every_program_is_in_one_share():
    shares = run._shares(select("programs"))
    names = [n for s in shares for n in s]
    assert sorted(names) == sorted(c.row for c in select("programs"))
    assert max(map(len, shares)) == run.SHARE and min(map(len, shares)) >= run.SHARE - 1
    assert run._shares(()) == []


def _worker(body):
    """A worker's command that runs `body` with its job."""
    head = "import sys; from tilefold.suites.gpu.worker import *; job = Job.from_text(sys.argv[1])\n"
    return lambda job: (sys.executable, "-c", head + body, job.to_text())


_RECORDS = """
from tests.suites.gpu.fixtures import record, results
said = lambda row, doing: Path(job.status).write_text(json.dumps(asdict(Status(row, "tilefold", doing, time.time()))))
known = load(Path(job.results))
for case in job.cases():
    if (case.suite, case.row) in known.done: continue
    said(case.row, "compiling")
    if case.row.endswith("mean 2x2") and not known.row(case.suite, case.row): os.abort()
    found = [record(case.row, "tilefold", 2.0, suite="programs"), *known.row(case.suite, case.row)]
    known = replace(known.finished((case.suite, case.row), found), device={"name": "a GPU"})
    save(known, Path(job.results))
"""


def test_a_worker_that_dies_costs_what_it_was_doing(tmp_path):
    found = run.run(job(tmp_path), workers=2, commit="abc", words=_worker("import os\n" + _RECORDS))
    assert {r for _, r in found.done} == set(ROWS) and found.policy["commit"] == "abc"
    assert {r.commit for r in found.records} == {"abc"}
    died = found.row("programs", ROWS[1])
    assert any("signal 6" in r.why for r in died)
    assert not any(r.why for r in found.row("programs", ROWS[0]))


def _workers(fails):
    """Commands of workers, whose work is done here: of those of a share for which `fails`, no row is begun."""

    def words(job):
        if fails(job.rows[0]):
            return ("sh", "-c", "echo no memory; exit 1")
        known = load(Path(job.results))
        for case in job.cases():
            known = known.finished((case.suite, case.row), [record(case.row, "tilefold", 2.0, suite="programs")])
        save(replace(known, device={"name": "a GPU"}), Path(job.results))
        return ("true",)

    return words


def test_a_share_that_cannot_begin_is_tried_once_more(tmp_path):
    begun, told = [], []
    words = _workers(lambda row: begun.append(row) or (row == ROWS[1] and begun.count(row) == 1))
    found = run.run(job(tmp_path), workers=2, share=1, progress=told.append, words=words)
    assert {r for _, r in found.done} == set(ROWS) and not any(r.why for r in found.records)
    assert [t for t in told if "1 rows are tried once more: the benchmark cannot begin: " in t and "no memory" in t]


def test_rows_that_never_begin_are_recorded_with_the_reason(tmp_path):
    begun = []
    words = _workers(lambda row: begun.append(row) or row == ROWS[1])
    found = run.run(job(tmp_path), workers=2, share=1, words=words)
    assert {r for _, r in found.done} == set(ROWS) and run.not_begun(job(tmp_path), found) == ()
    lost = found.row("programs", ROWS[1])
    assert {r.contender for r in lost} == {"tilefold", "eager"} and not any(r.microseconds for r in lost)
    assert all("cannot begin" in r.why and "no memory" in r.why for r in lost) and begun.count(ROWS[1]) == 2


def test_a_process_that_cannot_be_started_is_no_row_less(tmp_path):
    good = _workers(lambda row: False)
    found = run.run(
        job(tmp_path),
        workers=1,
        share=1,
        words=lambda job: ("/absent/command",) if job.rows[0] == ROWS[1] else good(job),
    )
    assert all("No such file" in r.why for r in found.row("programs", ROWS[1])) and len(found.done) == len(ROWS)


def test_no_worker_begins_after_the_deadline(tmp_path):
    late = job(tmp_path, deadline=1.0)
    found = run.run(late, workers=2, share=1, words=lambda _: pytest.fail("begun in vain"))
    assert not found.done and run.not_begun(late, found) == ROWS


def test_what_is_known_is_kept_only_on_request(tmp_path):
    known = results(record(ROWS[0], "tilefold", 7.0, suite="programs"))
    save(known, tmp_path / "r.json")
    nothing = _worker("raise SystemExit('never to be seen')")
    kept = run.run(job(tmp_path, deadline=0.0), workers=1, resume=True, words=_worker(""))
    assert [r.best_us for r in kept.row("programs", ROWS[0])] == [7.0]
    with pytest.raises(TilefoldError, match=r"cannot begin: .*never to be seen"):
        run.run(job(tmp_path), workers=1, words=nothing)
    assert load(tmp_path / "r.json").done == ()


def test_a_run_that_has_all_its_rows_begins_no_worker(tmp_path):
    asked = job(tmp_path)
    known = [record(c.row, "tilefold", 7.0, suite="programs") for c in asked.cases()]
    save(results(*known), tmp_path / "r.json")
    kept = run.run(asked, workers=2, resume=True, words=lambda _: pytest.fail("begun in vain"))
    assert len(kept.records) == len(known)


def test_rates_are_measured_once_and_alone(tmp_path):
    """The first share begins them, and the others are given them."""
    body = """
from tests.suites.gpu.fixtures import record, results
known = load(Path(job.results))
rates = known.rates or {"f16": 1.0, "f8": 1.0, "memory": float(os.getpid())}
for case in job.cases():
    mine = record(case.row, "tilefold", rates["memory"])
    known = replace(known.finished((case.suite, case.row), [mine]), device={"name": "a GPU"}, rates=rates)
save(known, Path(job.results))
"""
    rows = ("V-small", "I-small", "X-small", "N-small")
    asked = replace(job(tmp_path), suite="redfuser", rows=rows)
    found = run.run(asked, workers=3, share=1, commit="abc", words=_worker("import os\n" + body))
    assert len({r.best_us for r in found.records}) == 1 and len(found.records) == 4
    assert found.rates["memory"] == found.records[0].best_us


def _state(process):
    """As the kernel has it: T is stopped."""
    with open(f"/proc/{process.pid}/stat") as file:
        return file.read().rsplit(") ", 1)[1][0]


def _eventually(process, states):
    for _ in range(200):
        if _state(process) in states:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_others_are_stopped_meanwhile(tmp_path, sleeper):
    turns = Turns(tmp_path)
    turns.join("me")
    (tmp_path / "other.pid").write_text(str(sleeper.pid))
    with turns.alone():
        assert _eventually(sleeper, "T")
        assert int((tmp_path / "me.pid").read_text()) == os.getpid()
        turns.release()  # somebody is timing: they stay stopped
        assert _eventually(sleeper, "T")
    assert _eventually(sleeper, "SRD")
    sleeper.send_signal(signal.SIGSTOP)  # as by one that died while it timed
    assert _eventually(sleeper, "T")
    turns.release()
    assert _eventually(sleeper, "SRD")
    turns.leave("other")
    with turns.alone():
        assert _state(sleeper) != "T"


def test_a_worker_that_is_gone_is_nobody(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "gone.pid").write_text(str(gone.pid))
    with Turns(tmp_path).alone():
        pass
