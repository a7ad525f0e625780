"""Kernels compiled side by side, in processes, while the program that needs them is still being planned.

Triton compiles under Python's lock, so threads gain nothing. One server process a program imports Triton once and
forks for every job (`serve`): a fork starts in milliseconds, where a fresh interpreter takes seconds. What a child
compiles lands in Triton's own cache; the parent waits for the kernels that it needs and loads them from there, so that
a server that dies, or cannot be started, costs time and nothing else. What no child has begun when it is needed, the
parent compiles itself: while the server starts, and at the other end of the list from where the server works.

Considered: `multiprocessing` (its children import the user's main module again) and Inductor's pool of compiling
processes (private to torch, and different in each of its versions).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tilefold import config

#: Kernels that are compiled where they are asked for, unless a server runs already: one takes half a second to start.
FEW = 2
#: Seconds after which a kernel is compiled where it is needed.
LONGEST = 180.0


class Server:
    """Jobs given to the server process, and which of them are done. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._open: set[str] = set()
        self._begun: set[str] = set()
        self._waiting: list[tuple[str, Mapping[str, Any]]] = []
        self._process: subprocess.Popen[str] | None = None
        self._messages: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._dead = False

    def submit(self, key: str, job: Mapping[str, Any]) -> None:
        """Compile a job, once for all that have its key."""
        with self._lock:
            if self._dead or key in self._open or any(k == key for k, _ in self._waiting):
                return
            self._waiting.append((key, job))
            if self._process is None and len(self._waiting) > FEW:
                self._start()
            if self._process is not None:
                self._send()

    def expect(self, target: Sequence[object]) -> None:
        """Start the server before there are jobs: it is ready for this target when the first ones are planned."""
        with self._lock:
            if self._process is None and not self._dead:
                self._start()
                self._say({"target": list(target)})

    def waited(self, key: str) -> bool:
        """Wait until a job that was submitted is done; False, at once, for one that no process has begun, and none
        will."""
        with self._lock:
            self._waiting = [(k, j) for k, j in self._waiting if k != key]
            if key not in self._open:
                return key in self._begun
            if key not in self._begun:
                self._open.discard(key)
                self._say({"key": key})
                return False
            done = self._lock.wait_for(lambda: self._dead or key not in self._open, timeout=LONGEST)
            return done and not self._dead

    def close(self) -> None:
        """End the server; children end with their jobs."""
        with self._lock:
            process, self._process, self._dead = self._process, None, True
        self._messages.put(None)
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):  # it died before
                process.stdin.close()
            process.terminate()
            process.wait()

    def _start(self) -> None:
        processes = config.load().compile_processes
        if processes < 2:
            self._dead = True
            return
        command = [sys.executable, "-m", "tilefold.backends.triton.serve", str(processes)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self._dead = True
            return
        atexit.register(self.close)
        for work in (self._listen, self._write):
            threading.Thread(target=work, args=(self._process,), daemon=True).start()

    def _send(self) -> None:
        for key, job in self._waiting:
            self._open.add(key)
            self._say({"key": key, **job})
        self._waiting.clear()

    def _say(self, message: Mapping[str, Any]) -> None:
        """A job, a key alone to take one back, or a target alone of jobs to come."""
        self._messages.put(json.dumps(message) + "\n")

    def _write(self, process: subprocess.Popen[str]) -> None:
        """Hand messages on: a server that still imports Triton reads none, and a pipe holds few."""
        assert process.stdin is not None
        while (message := self._messages.get()) is not None:
            try:
                process.stdin.write(message)
                process.stdin.flush()
            except (OSError, ValueError):  # it died, or its input was closed
                with self._lock:
                    self._dead = True
                    self._lock.notify_all()
                return

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                match line.split():
                    case ["begun", key]:
                        self._begun.add(key)
                    case ["done", key]:
                        self._open.discard(key)
                    case _:
                        continue  # what a library prints
                self._lock.notify_all()
        with self._lock:
            self._dead = True
            self._lock.notify_all()


_server = Server()


def expect(target: Sequence[object]) -> None:
    """`Server.expect` of this process's server."""
    _server.expect(target)


def submit(key: str, job: Mapping[str, Any]) -> None:
    """`Server.submit` of this process's server."""
    _server.submit(key, job)


def waited(key: str) -> bool:
    """`Server.waited` of this process's server."""
    return _server.waited(key)
