"""Keeps a worker going: a contender that hangs, or takes the process with it, is noted and not tried again.

An illegal access or a hung kernel leaves a CUDA context that can measure nothing more. The worker then ends
(or is killed), what it was doing becomes a record with the reason, and a new worker goes on from there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilefold.errors import TilefoldError
from tilefold.suites.gpu.results import Results, load, save
from tilefold.suites.gpu.row import blank_record, failed_records
from tilefold.suites.gpu.worker import Job, Status, ended, read_status

Command = Callable[[Job], Sequence[str]]
POLL_SECONDS = 0.2
#: Lines of a dead worker's messages that are kept.
LAST_LINES = 3
#: Seconds that a step may take beyond the row's time before the worker is killed.
GRACE_SECONDS = 30.0


def command(job: Job) -> Sequence[str]:
    """The worker of a job."""
    return (sys.executable, "-m", "tilefold.suites.gpu.worker", job.to_text())


def run(
    job: Job,
    *,
    resume: bool = False,
    progress: Callable[[str], None] | None = None,
    command: Command = command,
    grace: float = GRACE_SECONDS,
) -> Results:
    """Measure the job's rows. resume: keep those that the file has finished, else they are measured again.

    TilefoldError where nothing matches the job's patterns, or a worker cannot begin.
    """
    path = Path(job.results)
    cases = job.cases()
    results = load(path)
    if not resume:
        fresh = results.without((c.suite, c.row) for c in cases) if job.study is None else results.afresh(job.study)
        save(fresh, path)
    tell = progress or (lambda _: None)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        job = replace(job, status=str(Path(folder) / "status"))
        while True:
            Path(job.status).unlink(missing_ok=True)
            reason = _watch(command(job), job, log, tell, grace)
            if reason is None or (job.study is None and all((c.suite, c.row) in load(path).done for c in cases)):
                return load(path)
            _note(job, reason)


def _watch(words: Sequence[str], job: Job, log: Path, tell: Callable[[str], None], grace: float) -> str | None:
    """Run one worker to its end; None if it did all it had to, else what happened."""
    with log.open("w") as errors:
        process = subprocess.Popen(words, stdout=errors, stderr=errors)
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                status = read_status(Path(job.status))
                if status is None:
                    continue
                tell(str(status))
                if time.time() - status.since > job.row_seconds + grace:
                    return f"took longer than {job.row_seconds + grace:.0f} s: {status.doing}"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode == 0:
        return None
    lines = [
        ln.strip() for ln in log.read_text(errors="replace").splitlines() if ln.strip() and not ln.startswith("[W")
    ]
    last = " | ".join(lines[-LAST_LINES:])[-300:] or "no message"
    how = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
    return f"the process died ({how}): {last}"


def _note(job: Job, reason: str) -> None:
    """Blame the contender at hand; the row itself where it was none's turn. TilefoldError where no row was begun."""
    status = read_status(Path(job.status))
    if job.study is not None and status is not None and status.row:
        _note_study(job, status, reason)
        return
    case = next((c for c in job.cases() if status is not None and c.row == status.row), None)
    if status is None or case is None:
        raise TilefoldError(f"the benchmark cannot begin: {reason}")
    path = Path(job.results)
    results = load(path)
    if (case.suite, case.row) in results.done:
        return
    peers = job.peers(case)
    if status.contender:
        (peer,) = (p for p in peers if p.name == status.contender)
        save(results.failed(replace(blank_record(case, peer), why=reason)), path)
    else:
        save(results.finished((case.suite, case.row), failed_records(case, peers, reason)), path)


def _note_study(job: Job, status: Status, reason: str) -> None:
    """The same of a study: what is noted is not tried again."""
    path = Path(job.results)
    results = load(path)
    assert job.study is not None
    known = results.entries(job.study)
    entries = [e for e in ended(job, status.row, status.contender, reason) if not _noted(e, known)]
    if not entries:
        raise TilefoldError(f"the study ends at {status.row} again and again: {reason}")
    save(results.studied(job.study, entries), path)


def _noted(entry: dict[str, Any], known: Sequence[dict[str, Any]]) -> bool:
    """Whether there is an entry of the same row and contender."""
    names = ("row", "contender", "study", "point", "variant")
    return any(all(entry.get(n) == e.get(n) for n in names) for e in known)
