"""Processes that share a device: the one that times something stops the others meanwhile.

Several workers compile and check at once, which is most of a run's time. A figure, however, is only worth
something while nothing else runs on the device: whoever is about to time takes a lock and stops every other
worker (SIGSTOP), and lets them go on afterwards. The lock dies with its holder; whoever sees a worker end calls
`release`, so that nobody stays stopped.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Seconds for kernels that were queued before their process was stopped.
SETTLE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Turns:
    """Workers that share a device, each with a file of its process id in `folder`."""

    folder: Path

    def join(self, name: str) -> None:
        """This process is worker `name` from now on, in place of an earlier one of that name."""
        whole = self.folder / f"{name}.new"
        whole.write_text(str(os.getpid()))
        whole.replace(self.folder / f"{name}.pid")

    def leave(self, name: str) -> None:
        """There is no worker of that name any more."""
        (self.folder / f"{name}.pid").unlink(missing_ok=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What is inside runs while all others are stopped; waits for one that is timing already."""
        with self._lock().open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._send(signal.SIGSTOP)
            try:
                time.sleep(SETTLE_SECONDS)
                yield
            finally:
                self._send(signal.SIGCONT)

    def release(self) -> None:
        """Lets everybody go on, unless somebody is timing, who does so afterwards."""
        with self._lock().open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            self._send(signal.SIGCONT)

    def _lock(self) -> Path:
        return self.folder / "lock"

    def _send(self, number: signal.Signals) -> None:
        """To every other worker that still runs."""
        for file in self.folder.glob("*.pid"):
            pid = int(file.read_text())
            if pid == os.getpid():
                continue
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
