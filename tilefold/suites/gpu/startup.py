"""What a user waits for: first calls with empty caches and in a second process, quick tuning, the host in a warm call.

Each is measured in a process of its own, `python -m tilefold.suites.gpu.startup PART SUITE ROW DEVICE small|full`, with
caches of Tilefold and Triton that the first process finds empty and the second as the first left them. It prints what
it found, a line of JSON a step, so that a process that is ended for its time has said what it knew.

A first call is timed from the call to its result, waited for. Before it are imported torch, Triton and Tilefold (and
with it torch's capture), the arguments exist and the device is awake. `capture` is what is not Tilefold's: the first
call of `torch.compile` with a backend that does nothing, in a process like the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilefold.frontend.fuse import fuse, own_copy
from tilefold.frontend.registered.custom_op import custom_op
from tilefold.frontend.tune import tune
from tilefold.suites.gpu.case import GpuCase
from tilefold.suites.gpu.cases import select
from tilefold.suites.gpu.measure import Timer, timer_for
from tilefold.suites.gpu.row import Said, Tell

ROWS: tuple[tuple[str, str], ...] = (
    ("redfuser", "H2"),
    ("redfuser", "L2"),
    ("redfuser", "R7"),
    ("neptune", "causal-prefill-4096"),
    ("neptune", "gqa-decode-4096"),
)
SMALL: tuple[tuple[str, str], ...] = (("redfuser", "V-small"),)
#: Warm calls of a series, fewer than a stream's queue takes without waiting, and series.
CALLS, SERIES = 100, 10
#: Seconds that one process may take.
PROCESS_SECONDS = 100.0
#: Figures of the host.
HOST = ("host_us", "fuse_us", "torch_us")
#: Characters of a process's messages that are kept.
KEPT = 400
#: Processes of a row, each with the figure of an entry that it finds. The second needs what the first left.
PARTS = ("cold", "warm", "capture", "tuning")

Entry = dict[str, Any]


def study(
    device: str,
    said: Said,
    *,
    small: bool = False,
    known: Sequence[Entry] = (),
    seconds: float = PROCESS_SECONDS,
    rows: Sequence[str] | None = None,
) -> Iterator[list[Entry]]:
    """An entry for each row that is not known, each as soon as it is complete.

    `row`; in seconds `cold` and `warm` (first calls), `capture` (torch's part of one), `tuning` (quick) and `imports`
    (of the processor); in microseconds of the host a warm call: `host_us` of the custom operator, `fuse_us` of the
    fused function (with torch's guards), `torch_us` of one of torch's own operators. What was not measured is None,
    `why` says why, and `output` has the last messages of each process that failed. rows: patterns of names (None: all).
    """
    done = {e["row"] for e in known}
    for suite, row in SMALL if small else ROWS:
        wanted = rows is None or any(fnmatch(row.lower(), r.lower()) for r in rows)
        if wanted and row not in done:
            yield [_entry(suite, row, device, partial(said, row), small, min(seconds, PROCESS_SECONDS))]


def blank(row: str, contender: str, why: str, *, small: bool = False) -> list[Entry]:
    """The entry of a row on which the study itself was ended."""
    names = ("cold", "warm", "capture", "tuning", "imports", *HOST)
    return [{"row": row, **dict.fromkeys(names), "why": why, "output": {}}]


def _entry(suite: str, row: str, device: str, tell: Tell, small: bool, seconds: float) -> Entry:
    (entry,) = blank(row, "", "")
    why = []
    with tempfile.TemporaryDirectory() as folder:
        caches = ("env", f"TILEFOLD_CACHE_DIR={folder}/tilefold", f"TRITON_CACHE_DIR={folder}/triton")
        for part in PARTS:
            if part == "warm" and entry["cold"] is None:
                continue  # there is nothing to find
            if part == "tuning" and device != "cuda":
                continue
            tell("tilefold", f"{part} process")
            words = (sys.executable, "-m", "tilefold.suites.gpu.startup", part, suite, row, device)
            ran = run_process((*caches, *words, "small" if small else "full"), seconds)
            entry |= {name: ran.found.get(name, entry[name]) for name in (part, "imports", *HOST)}
            if ran.why:
                why.append(f"{part}: {ran.why}")
                entry["output"][part] = ran.output
    return entry | {"why": "; ".join(why)}


@dataclass(frozen=True, slots=True)
class Ran:
    """What a process found, what went wrong ("" if nothing did), and its last messages."""

    found: Mapping[str, float]
    why: str
    output: str


def run_process(words: Sequence[str], seconds: float) -> Ran:
    """Run a process for so long at most, then end it and those that it started; lines of JSON are what it found."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "stdout", Path(folder) / "stderr"
        with said[0].open("w") as out, said[1].open("w") as errors:
            process = subprocess.Popen(words, stdout=out, stderr=errors, start_new_session=True)
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
        text, messages = (p.read_text(errors="replace") for p in said)
    if status is None:
        why = f"longer than {seconds:.0f} s"
    else:
        why = "" if status == 0 else _last(messages) or f"status {status}"
    return Ran(_figures(text), why, messages.strip()[-KEPT:])


def _figures(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in text.splitlines():
        try:
            data = json.loads(line)
        except ValueError:
            continue  # a library's own message
        found |= data if isinstance(data, dict) else {}
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its group: the tuner's workers are processes too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last(text: str) -> str:
    lines = [ln.strip() for ln in text.splitlines() if ln.strip()]
    return lines[-1][:300] if lines else ""


def _say(**found: float) -> None:
    print(json.dumps(found), flush=True)


def _first_call(case: GpuCase, device: str, name: str) -> None:
    """The first call of this process, then the host's time of warm ones."""
    timer = timer_for(device, "cold")
    run, args = fuse(case.fn), case.args(device)
    args[0].sum().item()  # the device is awake
    _say(**{name: timer.once(lambda: run(*args))})
    _say(fuse_us=_host(timer, lambda: run(*args)), torch_us=_host(timer, lambda: torch.neg(args[0])))
    operator = custom_op(case.fn, *args)
    _say(host_us=_host(timer, lambda: operator(*args)))


def _host(timer: Timer, call: Callable[[], object]) -> float:
    """Microseconds of the host a warm call: the quickest of some series, for the host is shared with others."""
    series = []
    for _ in range(SERIES):
        call()
        timer.release()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        series.append(time.perf_counter() - begin)
    timer.release()
    return 1e6 * min(series) / CALLS


def _capture(case: GpuCase, device: str) -> None:
    """What torch's capture takes of a first call; the operator itself is small next to it."""
    timer = timer_for(device, "cold")
    run, args = torch.compile(own_copy(case.fn), backend="eager", fullgraph=True), case.args(device)
    case.fn(*args)  # libraries are loaded
    _say(capture=timer.once(lambda: run(*args)))


def _tuning(case: GpuCase, device: str) -> None:
    args = case.args(device)
    begin = time.perf_counter()
    tune(case.fn, *args, again=True)
    _say(tuning=time.perf_counter() - begin)


def main(arguments: Sequence[str], imports: float | None = None) -> None:
    """The process's own part. `imports`: seconds that importing took."""
    part, suite, row, device, size = arguments
    if imports is not None:
        _say(imports=imports)
    (case,) = select(suite, [row], small=size == "small")
    do: Mapping[str, Callable[[], None]] = {
        "cold": lambda: _first_call(case, device, "cold"),
        "warm": lambda: _first_call(case, device, "warm"),
        "capture": lambda: _capture(case, device),
        "tuning": lambda: _tuning(case, device),
    }
    with torch.no_grad():
        do[part]()


if __name__ == "__main__":
    main(sys.argv[1:], time.process_time())
