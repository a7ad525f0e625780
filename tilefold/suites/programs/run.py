"""Runs programs on one device with many workers: they compile and check at once, and time alone (see `turns`).

The programs are dealt out in small shares. Each share is a job of the GPU suites' supervisor with a file of its
own, whose records go to the run's file when the share is done, so that a run that is killed keeps its rows.
A share of which no worker can begin is tried once more, after the others; then its rows are recorded with the reason.
Every worker begins with empty caches and compiles with one thread: what a first call costs is counted in seconds
of the processor, which neither the other workers nor their turns change.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilefold.errors import TilefoldError
from tilefold.suites.gpu import supervise
from tilefold.suites.gpu.case import GpuCase
from tilefold.suites.gpu.environment import commit_here, shipped_table
from tilefold.suites.gpu.results import Results, load, save
from tilefold.suites.gpu.row import failed_records
from tilefold.suites.gpu.turns import Turns
from tilefold.suites.gpu.worker import Job

#: Programs of a share: as many as make the start of a process (importing torch) small beside them.
SHARE = 8
#: Seconds beyond a program's own after which its worker is killed.
GRACE_SECONDS = 10.0
#: What starts a worker; tests replace it.
Words = Callable[[Job], Sequence[str]]


def run(
    job: Job,
    *,
    workers: int,
    share: int = SHARE,
    resume: bool = False,
    progress: Callable[[str], None] | None = None,
    commit: str | None = None,
    words: Words = supervise.command,
) -> Results:
    """Measure the job's programs in shares; `job.results` grows by each. resume: keep the programs that it has.

    `share`: programs that one process takes on, where every worker has some. `commit`: what is measured, where this is
    no checkout of git's.

    TilefoldError where no program is chosen, or no worker can begin.
    """
    path = Path(job.results)
    chosen = job.cases()
    results = load(path)
    if not resume:
        results = results.without((c.suite, c.row) for c in chosen)
        save(results, path)
    todo = [c for c in chosen if (c.suite, c.row) not in results.done]
    with tempfile.TemporaryDirectory() as folder:
        about = {"commit": commit or commit_here(), "table": shipped_table(job.device)}
        team = _Team(job, Path(folder), words, progress or (lambda _: None), about)
        shares = _shares(todo, max(1, min(share, -(-len(todo) // workers))))
        if shares and not results.rates and any(c.work is not None for c in todo):
            team.measure(shares[:1], 1)  # alone: it measures the device's rates, for all
            shares = shares[1:]
        team.measure(shares, workers)
    if team.failures and not team.grown:
        raise next(iter(team.failures.values()))
    team.record_failures()
    return load(path)


def not_begun(job: Job, results: Results) -> tuple[str, ...]:
    """The job's rows that the results do not have."""
    return tuple(c.row for c in job.cases() if (c.suite, c.row) not in results.done)


def _shares(cases: Sequence[GpuCase], share: int = SHARE) -> list[tuple[str, ...]]:
    """Names of programs that one process takes on, neighbours apart: the slow ones of a class stand together.

    The last classes (networks) take longest and come first.
    """
    names = [c.row for c in reversed(cases)]
    count = -(-len(names) // share)
    return [tuple(names[n::count]) for n in range(count)]


@dataclass(frozen=True, slots=True)
class _Share:
    """Rows for one process. `why`: what ended an earlier one before it began a row."""

    rows: tuple[str, ...]
    why: TilefoldError | None = None


@dataclass(slots=True)
class _Team:
    """Threads that supervise one worker each, and what they have in common.

    `about`: what the results' policy says besides; `grown`: whether a program is done; `failures`: rows of
    shares in which no worker could begin, twice, and why.
    """

    job: Job
    folder: Path
    words: Words
    tell: Callable[[str], None]
    about: dict[str, str]
    grown: bool = False
    failures: dict[tuple[str, ...], TilefoldError] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def turns(self) -> Turns:
        """The workers' folder."""
        return Turns(self.folder)

    def measure(self, shares: Sequence[tuple[str, ...]], workers: int) -> None:
        waiting: queue.SimpleQueue[_Share] = queue.SimpleQueue()
        for rows in shares:
            waiting.put(_Share(rows))
        threads = [
            threading.Thread(target=self._supervise, args=(f"w{n}", waiting)) for n in range(min(workers, len(shares)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def record_failures(self) -> None:
        """Rows that no worker could begin, each with the reason: the results are of all rows, or say of which not."""
        for rows, why in self.failures.items():
            job = replace(self.job, rows=rows)
            found = Results()
            for case in job.cases():
                found = found.finished((case.suite, case.row), failed_records(case, job.peers(case), why.message))
            self._keep(found)

    def _supervise(self, name: str, waiting: queue.SimpleQueue[_Share]) -> None:
        """Take shares until there are none, or no time. One that failed goes to the end of the queue, for whoever is
        free then.
        """
        while self.job.deadline is None or time.time() <= self.job.deadline:
            try:
                share = waiting.get_nowait()
            except queue.Empty:
                return
            why = self._share(name, share.rows)
            if why is None:
                continue
            with self.guard:
                done = load(Path(self.job.results)).done
            left = tuple(row for row in share.rows if (self.job.suite, row) not in done)
            if not left:
                continue
            if share.why is None:
                self.tell(f"{name}: {len(left)} rows are tried once more: {why.message}")
                waiting.put(_Share(left, why))
            else:
                self.failures[left] = why

    def _share(self, name: str, rows: tuple[str, ...]) -> TilefoldError | None:
        """Measure rows; why no worker could begin them, or the rest of them."""
        own = self.folder / f"{name}.json"
        with self.guard:
            known = load(Path(self.job.results))
        save(Results(device=known.device, rates=known.rates) if known.rates else Results(), own)
        job = replace(self.job, rows=rows, results=str(own), turns=str(self.folder), name=name)
        try:
            supervise.run(job, resume=True, progress=self._said(name, own), command=self._command, grace=GRACE_SECONDS)
        except TilefoldError as error:
            return error
        except OSError as error:  # no process can be started
            return TilefoldError(f"the benchmark cannot begin: {error}")
        finally:
            self.turns.leave(name)
            self.turns.release()
            self._keep(load(own))
        return None

    def _keep(self, found: Results) -> None:
        """Put a share's records into the run's file."""
        with self.guard:
            path = Path(self.job.results)
            results = load(path)
            for key in found.done:
                rows = [replace(r, commit=self.about["commit"]) for r in found.row(*key)]
                results = results.finished(key, rows)
                self.grown = True
            if found.device:
                policy = found.policy | self.about
                rates = results.rates or found.rates
                results = replace(
                    results, device=found.device, versions=found.versions, policy=policy, rates=rates, date=found.date
                )
            save(results, path)

    def _command(self, job: Job) -> Sequence[str]:
        """A worker, in place of one that has perhaps just died while it timed."""
        self.turns.leave(job.name)
        self.turns.release()
        caches = Path(tempfile.mkdtemp(dir=self.folder, prefix=f"{job.name}-"))
        return ("env", *_settings(caches), *self.words(job))

    def _said(self, name: str, own: Path) -> Callable[[str], None]:
        """Says what is new, and keeps what is done."""
        last = [""]

        def said(text: str) -> None:
            if text != last[0]:
                last[0] = text
                self._keep(load(own))
                self.tell(f"{name}: {text}")

        return said


def _settings(caches: Path) -> tuple[str, ...]:
    """The environment of a worker: caches of its own, one thread."""
    return (
        f"TORCHINDUCTOR_CACHE_DIR={caches / 'inductor'}",
        f"TRITON_CACHE_DIR={caches / 'triton'}",
        f"TILEFOLD_CACHE_DIR={caches / 'tilefold'}",
        "TORCHINDUCTOR_COMPILE_THREADS=1",
        "TILEFOLD_COMPILE_PROCESSES=0",
        "OMP_NUM_THREADS=1",
    )
