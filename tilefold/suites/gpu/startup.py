"""What a user waits for: the first call with empty caches, that of a second process, and the host's time a call.

Each is measured in a process of its own: `python -m tilefold.suites.gpu.startup SUITE ROW DEVICE small|full`
prints one entry as JSON. The caches of Tilefold and Triton are directories that the first process finds empty and the
second as the first left them. Importing and the device's own start are not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from tilefold.errors import TilefoldError
from tilefold.frontend.fuse import fuse
from tilefold.suites.gpu.cases import select
from tilefold.suites.gpu.measure import timer_for
from tilefold.suites.gpu.row import Tell

ROWS: tuple[tuple[str, str], ...] = (
    ("redfuser", "H2"),
    ("redfuser", "L2"),
    ("redfuser", "R7"),
    ("neptune", "causal-prefill-4096"),
    ("neptune", "gqa-decode-4096"),
)
SMALL: tuple[tuple[str, str], ...] = (("redfuser", "V-small"),)
#: Warm calls that the host's time is averaged over: fewer than a stream's queue takes without waiting.
CALLS = 200
PROCESS_SECONDS = 120.0


def study(device: str, tell: Tell, *, small: bool = False) -> tuple[dict[str, Any], ...]:
    """An entry for each row: `row`, `cold` and `warm` (seconds of the first call), `host_us` (a call), `why`."""
    return tuple(_entry(suite, row, device, tell, small) for suite, row in (SMALL if small else ROWS))


def _entry(suite: str, row: str, device: str, tell: Tell, small: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"row": row, "cold": None, "warm": None, "host_us": None, "why": ""}
    words = (sys.executable, "-m", "tilefold.suites.gpu.startup", suite, row, device, "small" if small else "full")
    with tempfile.TemporaryDirectory() as folder:
        caches = ("env", f"TILEFOLD_CACHE_DIR={folder}/tilefold", f"TRITON_CACHE_DIR={folder}/triton")
        for name in ("cold", "warm"):
            tell("tilefold", f"{row}, {name} first call")
            try:
                found = run_process((*caches, *words))
            except TilefoldError as error:
                return entry | {"why": error.message}
            entry |= {name: found["first_call"], "host_us": found["host_us"]}
    return entry


def run_process(words: Sequence[str]) -> dict[str, float]:
    """What the last line that a process prints says. TilefoldError where it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PROCESS_SECONDS)
    except subprocess.TimeoutExpired:
        raise TilefoldError(f"took longer than {PROCESS_SECONDS:.0f} s") from None
    lines = [ln for ln in (done.stdout if done.returncode == 0 else done.stderr).splitlines() if ln.strip()]
    if done.returncode != 0 or not lines:
        raise TilefoldError(f"the process failed: {lines[-1][:300] if lines else 'no message'}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def first_calls(suite: str, row: str, device: str, *, small: bool) -> dict[str, float]:
    """Seconds of this process's first call, and the host's microseconds of a warm one."""
    (case,) = select(suite, [row], small=small)
    timer = timer_for(device, "cold")
    run, args = fuse(case.fn), case.args(device)
    with torch.no_grad():
        args[0].sum().item()  # the device is awake
        first = timer.once(lambda: run(*args))
        for _ in range(3):
            run(*args)
        timer.release()
        begin = time.perf_counter()
        for _ in range(CALLS):
            run(*args)
        host = time.perf_counter() - begin
        timer.release()
    return {"first_call": first, "host_us": 1e6 * host / CALLS}


def main(arguments: Sequence[str]) -> None:
    """The process's own part."""
    suite, row, device, size = arguments
    print(json.dumps(first_calls(suite, row, device, small=size == "small")))


if __name__ == "__main__":
    main(sys.argv[1:])
