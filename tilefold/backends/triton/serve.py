"""The server of `ahead`: a line of JSON a job on standard input; its key on standard output, once `begun` and `done`.
A line of a target alone says what jobs to come are for.

The longest source comes first, which takes longest to compile (attention's groups of warps three seconds, a map a tenth
of one): what is left to the end should be short. Of equal ones the latest, for those that came earlier are needed
earlier, and may be taken back (a line of a key alone).
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from tilefold.backends.triton.build import Declared, Job, Target, built, prepare, told
from tilefold.backends.triton.words import build_own, build_shared
from tilefold.errors import BackendError


def job_from(line: Mapping[str, Any]) -> tuple[Job, Target]:
    """A job and what it is to be compiled for."""
    job = line["job"]
    return Job(**{**job, "vectors": tuple((n, d) for n, d in job["vectors"])}), Target(*line["target"])


@cache
def prepared(*target: Any) -> None:
    """`build.prepare` for a target, before the first child that compiles for it is forked; another child compiles what
    launches kernels."""
    prepare(Target(*target))
    if target[0] == "cuda":
        in_child(build_shared)


def compile_in_child(line: Mapping[str, Any]) -> int:
    """Fork a child that compiles one job, and what launches it; its process number."""

    def work() -> None:
        told(line["settings"])
        job, target = job_from(line)
        src = Declared(job.name, job.types)  # as the call has it

        def launcher(done: Any) -> None:
            build_own(SimpleNamespace(src=src, metadata=done.metadata))

        built(job, target, beside=launcher if target.backend == "cuda" else None)

    return in_child(work)


def in_child(work: Callable[[], None]) -> int:
    """Fork a child that does this; its process number."""
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(2, 1)  # standard output is the server's: what Triton prints of a kernel that fails is no answer
        work()
    except BackendError:
        pass  # whoever needs the kernel compiles it again, and says why it cannot
    finally:
        os._exit(0)


def longest(jobs: Sequence[Mapping[str, Any]]) -> int:
    """Position of the job with the longest source, of several the last."""
    return max(range(len(jobs)), key=lambda n: (len(jobs[n]["job"]["source"]), n))


def main(processes: int) -> None:
    """Read jobs and keep at most so many children at work, until standard input ends."""
    jobs: list[dict[str, Any]] = []
    running: dict[int, str] = {}
    text = b""
    gc.disable()  # children end with their jobs, and what they collected they would have to copy first
    os.set_blocking(0, False)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    ended = False
    while not ended:
        selector.select(timeout=0.02 if running else None)
        while chunk := _read():
            text += chunk
        ended = chunk == b""
        *lines, text = text.split(b"\n")
        for line in map(json.loads, lines):
            if "job" in line:
                jobs.append(line)
            elif "target" in line:
                prepared(*line["target"])
            else:
                jobs = [j for j in jobs if j["key"] != line["key"]]
        while running and (done := os.waitpid(-1, os.WNOHANG)[0]):
            if (key := running.pop(done, None)) is not None:
                print("done", key, flush=True)
        while jobs and len(running) < processes:
            line = jobs.pop(longest(jobs))
            prepared(*line["target"])
            print("begun", line["key"], flush=True)
            running[compile_in_child(line)] = line["key"]


def _read() -> bytes | None:
    """What is on standard input: empty at its end, None where nothing is there yet."""
    try:
        return os.read(0, 1 << 20)
    except BlockingIOError:
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
