"""Find the fastest configuration of a kernel that is also right.

Candidates are compiled in CPU processes (those that do not compile or need more shared memory than
there is are dropped), then run by a worker process that compares results before it times. A worker
that dies or falls silent is replaced; the candidate at fault is recorded and not tried again.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.space import Effort, space
from tilefold.block.ir import Block
from tilefold.block.text import show
from tilefold.runtime.tuner.table import Tuned, to_json

#: Seconds of silence after which a worker is taken to hang; the first answer may take longer.
SILENCE, START = 12.0, 60.0
#: Seconds that compiling one candidate may take.
COMPILE = 25.0

#: Processes kept for the next kernel: importing takes longer than most of what they do.
_waiting: list[subprocess.Popen[str]] = []
_compilers: list[_Compiler] = []

#: Told (done, of how many, what) as tuning goes on.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate and what became of it: microseconds, or why it has none."""

    config: TritonConfig
    microseconds: float | None = None
    why: str = ""


def tune(
    block: Block,
    sizes: Mapping[str, int],
    syms: Mapping[str, int],
    effort: Effort,
    progress: Progress = lambda done, of, what: None,
) -> tuple[Tuned, tuple[Trial, ...]]:
    """The winner for extents `sizes`, and all trials. The default wins where nothing is faster or right."""
    candidates = space(block, sizes, effort)
    failed = compile_all(block, sizes, candidates, progress)
    kept = [n for n in range(len(candidates)) if n not in failed]
    if 0 not in kept:
        kept.insert(0, 0)
    trials = {n: Trial(candidates[n], None, why) for n, why in failed.items() if n != 0}
    job = {"block": show(block), "sizes": dict(sizes), "syms": dict(syms)}
    chosen = [candidates[n] for n in kept]
    first = 0
    while first < len(kept):
        first = _work(job, first, kept, chosen, trials, progress)
    timed = [t for t in trials.values() if t.microseconds is not None]
    default = trials.get(0)
    base = default.microseconds if default is not None and default.microseconds is not None else float("inf")
    best = min(timed, key=lambda t: t.microseconds or 0.0, default=Trial(candidates[0], base))
    won = Tuned(best.config, best.microseconds or base, base, block.name)
    return won, tuple(trials[n] for n in sorted(trials))


def _next_worker() -> subprocess.Popen[str]:
    """A worker that waits for its job; another is started meanwhile, for the next one."""
    ready = _waiting.pop() if _waiting else _process("worker")
    _waiting.append(_process("worker"))
    return ready


def _process(module: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tilefold.runtime.tuner.{module}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


@atexit.register
def dismiss() -> None:
    """End the processes that wait."""
    while _waiting:
        _waiting.pop().kill()
    while _compilers:
        _compilers.pop().end()


def _work(
    job: Mapping[str, object],
    begin: int,
    kept: Sequence[int],
    chosen: Sequence[TritonConfig],
    trials: dict[int, Trial],
    progress: Progress,
) -> int:
    """One worker's life; the index to go on from. The default is always run again first: it is the reference."""
    given = [to_json(c) for c in (chosen[0], *chosen[max(begin, 1) :])]
    offset = max(begin, 1) - 1
    process = _next_worker()
    assert process.stdin is not None and process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    out = process.stdout

    def read() -> None:
        for line in out:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    process.stdin.write(json.dumps({**job, "candidates": given}))
    process.stdin.close()
    at, patience = 0, START
    while True:
        try:
            line = lines.get(timeout=patience)
        except queue.Empty:
            line = None
            trials[kept[at + offset if at else 0]] = Trial(chosen[at + offset if at else 0], None, "hangs")
        if line is None:
            process.kill()
            process.wait()
            here = at + offset if at else 0
            if here < len(kept) and kept[here] not in trials:
                trials[kept[here]] = Trial(chosen[here], None, f"the process ended ({process.returncode})")
            return len(kept) if here == 0 else max(begin, here) + 1  # without a reference nothing can be checked
        said = json.loads(line)
        if "start" in said:
            at, patience = said["start"], SILENCE if said["start"] else START
            continue
        here = at + offset if at else 0
        trials[kept[here]] = Trial(chosen[here], said.get("microseconds"), said.get("why", ""))
        progress(here + 1, len(kept), str(chosen[here]))
        if at + 1 == len(given):
            process.wait()
            return len(kept)


def compile_all(
    block: Block, sizes: Mapping[str, int], candidates: Sequence[TritonConfig], progress: Progress
) -> dict[int, str]:
    """Compile in processes side by side, into Triton's cache. Candidate -> why it cannot serve."""
    text = show(block)
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for n in range(len(candidates)):
        todo.put(n)
    found: dict[int, str] = {}

    def serve(_: int) -> None:
        try:
            compiler = _compilers.pop()
        except IndexError:
            compiler = _Compiler()
        while True:
            try:
                n = todo.get_nowait()
            except queue.Empty:
                break
            found[n] = compiler.ask({"block": text, "sizes": dict(sizes), "candidate": to_json(candidates[n])})
            progress(len(found), len(candidates), "compiling")
        _compilers.append(compiler)

    side_by_side = max(1, min((os.cpu_count() or 2) - 1, len(candidates)))
    with ThreadPoolExecutor(max_workers=side_by_side) as pool:
        list(pool.map(serve, range(side_by_side)))
    return {n: why for n, why in found.items() if why}


class _Compiler:
    """A process that compiles; one that dies or takes too long is replaced when it is next asked."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, job: Mapping[str, object]) -> str:
        """Why the candidate cannot serve; empty if it can."""
        if self.process is None:
            self.process = _process("compiler")
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        watch = threading.Timer(START + COMPILE, process.kill)
        watch.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            said = process.stdout.readline()
        except OSError:
            said = ""
        finally:
            watch.cancel()
        if said:
            return str(json.loads(said))
        self.end()
        return "the compiler died"

    def end(self) -> None:
        """Stop the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
