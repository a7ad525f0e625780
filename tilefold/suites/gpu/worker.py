"""The process that measures: row after row, each written before the next is begun.

`python -m tilefold.suites.gpu.worker JOB` with a job as JSON. What it is doing at any moment stands in the
job's status file, so that the supervisor knows which contender hangs, or was running when the process died.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tilefold.errors import TilefoldError
from tilefold.suites import own
from tilefold.suites.gpu import ablation, numerics, startup
from tilefold.suites.gpu.case import GpuCase
from tilefold.suites.gpu.cases import choose, select
from tilefold.suites.gpu.environment import device_facts, versions
from tilefold.suites.gpu.floors import Rates, measure_rates
from tilefold.suites.gpu.measure import Cache, Timer, timer_for
from tilefold.suites.gpu.peers import Peer, contenders, start_compilers
from tilefold.suites.gpu.results import Results, load, save
from tilefold.suites.gpu.row import Alone, Effort, Said, Tell, measure_row
from tilefold.suites.gpu.turns import Turns

Study = Literal["numerics", "ablations", "startup"]


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure and where to write it.

    `rows`: patterns (None: all). `only`: peers (None: all). `seconds` and `rounds`: of a repetition;
    `row_seconds`: of a row, or of one step of it. `deadline`: no row is begun after it (seconds since the epoch).
    `study`: done instead of the rows. `file`: the user's, whose programs in these `modes` are the rows. `turns`: a
    folder that workers of one device share (see `turns`), where this one is called `name`.
    """

    suite: str
    results: str
    status: str
    device: str = "cuda"
    rows: tuple[str, ...] | None = None
    small: bool = False
    cache: Cache = "cold"
    only: tuple[str, ...] | None = None
    autotune: bool = False
    rounds: int = 100
    seconds: float = 0.5
    row_seconds: float = 120.0
    deadline: float | None = None
    study: Study | None = None
    turns: str | None = None
    name: str = ""
    file: str | None = None
    modes: tuple[str, ...] = own.MODES[:1]

    def cases(self) -> tuple[GpuCase, ...]:
        """The rows, finished ones included."""
        if self.file is not None:
            return choose(own.rows(Path(self.file), self.modes), self.rows, self.file)
        return select(self.suite, self.rows, small=self.small)

    def peers(self, case: GpuCase) -> tuple[Peer, ...]:
        """The contenders of a row."""
        return contenders(case, only=None if self.only is None else frozenset(self.only), autotune=self.autotune)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Job:
        data = json.loads(text)
        for name in ("rows", "only", "modes"):
            data[name] = None if data[name] is None else tuple(data[name])
        return Job(**data)


@dataclass(frozen=True, slots=True)
class Status:
    """What the worker is doing. `since`: seconds since the epoch; `row` and `contender` may be ""."""

    row: str
    contender: str
    doing: str
    since: float

    def __str__(self) -> str:
        return f"{self.row}{': ' if self.row else ''}{self.contender}{' ' if self.contender else ''}{self.doing}"


def read_status(path: Path) -> Status | None:
    """None where the worker has not come so far."""
    return Status(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def work(job: Job, tell: Callable[[Status], None] | None = None) -> Results:
    """Measure what is not done yet. Returns all that the file then holds."""
    path = Path(job.results)

    def said(row: str, contender: str, doing: str) -> None:
        status = Status(row, contender, doing, time.time())
        _write_status(Path(job.status), status)
        if tell is not None:
            tell(status)

    alone: Alone = nullcontext
    if job.turns is not None:
        turns = Turns(Path(job.turns))
        turns.join(job.name)
        alone = turns.alone
    said("", "", "looking at the device")
    timer = timer_for(job.device, job.cache)
    results, rates = _begun(load(path), job, timer)
    save(results, path)
    if job.study is not None:
        return _studied(results, job, timer, said)
    cases = job.cases()
    if job.device == "cuda" and any(c.planned and "compile" in c.peers for c in cases):
        said("", "", "starting the compilers")
        start_compilers(job.device)
    for case in cases:
        if (case.suite, case.row) in results.done:
            continue
        if job.deadline is not None and time.time() > job.deadline:
            break
        known = {r.contender: r for r in results.row(case.suite, case.row)}
        records = measure_row(
            case,
            job.peers(case),
            timer,
            rates,
            job.device,
            effort=Effort(job.rounds, job.seconds, job.row_seconds),
            known=known,
            tell=_teller(said, case.row),
            alone=alone,
        )
        results = replace(results.finished((case.suite, case.row), records), date=_now())
        save(results, path)
    return results


def _studied(results: Results, job: Job, timer: Timer, said: Said) -> Results:
    """With what the study finds, kept entry by entry; those that the file has are not made again."""
    assert job.study is not None
    for entries in _entries(results, job, timer, said):
        results = replace(results.studied(job.study, entries), date=_now())
        save(results, Path(job.results))
        if job.deadline is not None and time.time() > job.deadline:
            break
    return results


def _entries(results: Results, job: Job, timer: Timer, said: Said) -> Iterator[list[dict[str, Any]]]:
    known = results.entries(job.study or "")
    if job.study == "numerics":
        return numerics.study(job.device, said, small=job.small, known=known)
    if job.study == "startup":
        return startup.study(job.device, said, small=job.small, known=known, seconds=job.row_seconds, rows=job.rows)
    return ablation.study(job.device, timer, said, small=job.small, known=known)


def ended(job: Job, row: str, contender: str, why: str) -> list[dict[str, Any]]:
    """Entries of a study's row on which the process ended."""
    blank = {"numerics": numerics.blank, "startup": startup.blank, "ablations": ablation.blank}[job.study or ""]
    return blank(row, contender, why, small=job.small)


def _teller(said: Said, row: str) -> Tell:
    return lambda contender, doing: said(row, contender, doing)


def _begun(results: Results, job: Job, timer: Timer) -> tuple[Results, Rates]:
    """With the device's facts and rates. TilefoldError where the file is of another device."""
    facts = device_facts(job.device)
    if results.device and results.device != facts:
        raise TilefoldError(
            f"{job.results} was measured on {results.device.get('name')}, this is {facts['name']}",
            hint="choose another --json",
        )
    if results.rates:
        rates = Rates(**results.rates)
    elif job.study is None and all(c.work is None for c in job.cases()):
        rates = Rates(0.0, 0.0, math.inf)  # no row has a floor
    else:
        rates = measure_rates(job.device, timer)
    policy: dict[str, Any] = {"cache": job.cache, "how": timer.policy, "rounds": job.rounds, "seconds": job.seconds}
    known = asdict(rates) if math.isfinite(rates.memory) else {}
    return replace(results, device=facts, versions=versions(), policy=policy, rates=known, date=_now()), rates


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write_status(path: Path, status: Status) -> None:
    whole = path.with_name(path.name + ".new")
    whole.write_text(json.dumps(asdict(status)), encoding="utf-8")
    whole.replace(path)


if __name__ == "__main__":
    work(Job.from_text(sys.argv[1]))
