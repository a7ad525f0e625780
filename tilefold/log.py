"""What Tilefold says without being asked: one summary a model, and a progress line while it compiles.

Everything goes to the logger `tilefold`. A program that has set up logging (`logging.basicConfig`,
`TORCH_LOGS=tilefold`) gets the summary there, at level INFO; for all others it is one line on standard error, as
warnings are. The progress line is for a terminal alone. `TILEFOLD_QUIET=1` turns both off; warnings stay.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tilefold import config

log = logging.getLogger("tilefold")

#: Seconds after which a compilation shows its progress, and between two lines of it.
PATIENCE_S = 2.0
EVERY_S = 0.25
#: To the first column, and clear the line.
_CLEAR = "\r\x1b[K"


def tell(message: str) -> None:
    """A line that users see unless they ask for quiet."""
    if config.load().quiet:
        log.debug("%s", message)
    elif log.hasHandlers():
        log.info("%s", message)
    else:
        print(f"tilefold: {message}", file=sys.stderr)


def warn(message: str, *values: object) -> None:
    """A warning, which `TILEFOLD_QUIET` does not turn off. Where no logging is set up, it names us as other lines do:
    Python's handler of last resort writes the message alone."""
    if log.hasHandlers():
        log.warning(message, *values)
    elif log.isEnabledFor(logging.WARNING):
        print(f"tilefold: {message % values}", file=sys.stderr)


class Progress:
    """What is compiled now, shown on a terminal once it takes longer than `PATIENCE_S`, by a thread of its own."""

    def __init__(self, title: str, out: TextIO):
        self.title, self.part, self.step = title, "", ""
        self._out, self._began = out, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="tilefold progress", daemon=True)
        self._thread.start()

    def line(self) -> str:
        """`tilefold: compiling graph0, part 3 of 12, planning (4 s)`."""
        where = ", ".join(filter(None, (f"compiling {self.title}", self.part, self.step)))
        return f"tilefold: {where} ({time.monotonic() - self._began:.0f} s)"

    def end(self) -> None:
        """Stop, and leave an empty line."""
        self._ended.set()
        self._thread.join()

    def _show(self) -> None:
        if self._ended.wait(PATIENCE_S):
            return
        while True:
            width = shutil.get_terminal_size().columns
            self._out.write(_CLEAR + self.line()[: width - 1])
            self._out.flush()
            if self._ended.wait(EVERY_S):
                break
        self._out.write(_CLEAR)
        self._out.flush()


#: The compilation that is shown.
_shown: list[Progress] = []


@contextmanager
def progress(title: str) -> Iterator[None]:
    """While something is compiled. What is compiled within it, or by another thread meanwhile, is a part of it."""
    out = sys.stderr
    if _shown or out is None or not out.isatty() or config.load().quiet:
        yield
        return
    mine = Progress(title, out)
    _shown.append(mine)
    try:
        yield
    finally:
        _shown.remove(mine)
        mine.end()


def at_part(what: str) -> None:
    """Which part of the model is compiled now."""
    for p in _shown:
        p.part, p.step = what, ""


def at_step(what: str) -> None:
    """What is done with it."""
    for p in _shown:
        p.step = what
