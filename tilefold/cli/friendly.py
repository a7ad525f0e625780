"""How a command ends that cannot do what was asked: with a message, never with a traceback.

| exit status | |
|---|---|
| 1 | what was verified is less right than eager |
| 2 | a mistake of the user, or an error that the user's own code raised |
| 3 | a defect of Tilefold: the message says so, and which file to report |
"""

from __future__ import annotations

import errno
import functools
import logging
import platform
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import ParamSpec

import typer
from rich.console import Console

from tilefold.errors import SourceLoc, TilefoldError
from tilefold.version import version

P = ParamSpec("P")
PACKAGE = Path(__file__).parents[1]
#: Where code is that is neither the user's nor ours.
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))

console = Console()
_stderr = Console(stderr=True)


@contextmanager
def friendly(doing: str | None = None) -> Iterator[None]:
    """Show `doing` as progress while the body runs; turn what it raises into a message and an exit status."""
    _hush()
    try:
        if doing is None:
            yield
        else:
            with console.status(doing):
                yield
    except (typer.Exit, typer.Abort, KeyboardInterrupt, GeneratorExit):
        raise
    except TilefoldError as err:
        _end("error", str(err))
    except OSError as err:
        if err.errno == errno.EPIPE:  # who reads has had enough, as `head`
            raise
        _end("error", f"{err.filename}: {err.strerror}" if err.filename else err.strerror or _named(err))
    except SystemExit as err:
        loc = user_line(err)
        if loc is None:
            raise
        _end("error", f"the user's code ends the program\n  at {loc}")
    except BaseException as err:  # whatever it is, the user sees whose it is instead of a traceback
        loc = user_line(err)
        if loc is None and sys.__stdout__ is not None and sys.__stdout__.closed:
            _end("error", "something, as the file that was imported, has closed the standard output")
        if loc is None:
            _end("internal error", _report(err), status=3)
        _end("error", f"the user's code raises {_named(err)}\n  at {loc}")


def _hush() -> None:
    """torch logs a traceback of what a function's arguments make impossible, which the message that ends the command
    says. A level that somebody has set stays."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    if log.level == logging.NOTSET:
        log.setLevel(logging.CRITICAL)


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """A command, all of which is `friendly`."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with friendly():
            command(*args, **kwargs)

    return run


def user_line(err: BaseException) -> SourceLoc | None:
    """The line of the user's code that raised an error, directly or in a library that it called; None if we did."""
    for frame in reversed(traceback.extract_tb(err.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            return None
        if not frame.filename.startswith("<") and not any(path.is_relative_to(p) for p in _LIBRARIES):
            return SourceLoc(frame.filename, frame.lineno or 0, frame.line or "")
    return None


def _end(kind: str, text: str, *, status: int = 2) -> None:
    _stderr.print(f"[bold red]{kind}:[/] ", end="")
    _stderr.print(_visible(text), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status) from None


def _visible(text: str) -> str:
    """Text of files and of errors, in which what would steer the terminal is written out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _named(err: BaseException) -> str:
    first = next((line for line in str(err).splitlines() if line.strip()), "")
    return f"{type(err).__name__}: {first}" if first else type(err).__name__


def _report(err: BaseException) -> str:
    """Says that the fault is ours; everything that finding it takes is in a file."""
    versions = f"tilefold {version()}, torch {metadata.version('torch')}"
    head = f"command: {' '.join(sys.argv)}\nversions: {versions}, Python {platform.python_version()}, {sys.platform}\n"
    text = f"{_named(err)}\n  this is a defect of Tilefold, not a mistake of yours"
    try:
        with tempfile.NamedTemporaryFile("w", prefix="tilefold-error-", suffix=".txt", delete=False) as f:
            f.write(head + "\n" + "".join(traceback.format_exception(err)))
    except OSError:
        return text + "\n  please report it with these versions: " + versions
    return text + f"\n  please report it with this file: {f.name} (command, versions, traceback)"
