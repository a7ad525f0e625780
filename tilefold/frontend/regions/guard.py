"""The one place where automatic use outlives a failure of Tilefold.

`torch.compile(model, backend="tilefold")` must not raise what eager does not. What fails is run elsewhere, in as small
a part as possible; the failure is recorded, and logged once with its reason and the user's line. An exception that is
no TilefoldError is a bug of ours and is called one. `TILEFOLD_STRICT=1` raises all of them instead.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

from tilefold import config
from tilefold.errors import SourceLoc, TilefoldError, UnsupportedError
from tilefold.frontend.regions.replay import recorded
from tilefold.runtime.recorder import Recorder
from tilefold.runtime.writing import has_written

log = logging.getLogger("tilefold")
T = TypeVar("T")
#: What torch raises for an error that a device reports; before 2.8 a RuntimeError with that text.
_DeviceError: type[Exception] = getattr(torch, "AcceleratorError", TorchDynamoException)
#: Failures that were logged in this process.
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Fallback:
    """Something that Tilefold left to another compiler: which node (or region), why, and the user's line. `meant`:
    PyTorch's library computes it by choice."""

    node: str
    reason: str
    loc: SourceLoc | None = None
    meant: bool = False

    def __str__(self) -> str:
        at = f" at {self.loc}" if self.loc else ""
        return f"{self.node}: {self.reason}{at}"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a graph that may run elsewhere if it fails. `loc`: its line, for errors that know none. `fallbacks`:
    where failures are recorded. `by`: who compiles it; strictness is about Tilefold's failures alone. `instead`: what
    runs where it fails; eager is worth a warning, whatever the reason."""

    name: str
    fallbacks: list[Fallback]
    loc: SourceLoc | None = None
    by: Literal["Tilefold", "Inductor"] = "Tilefold"
    instead: Literal["in smaller parts", "by another compiler", "in eager mode"] = "in eager mode"

    def attempt(self, make: Callable[[], T]) -> T | None:
        """What `make` returns; None, and a record, where it fails."""
        try:
            return make()
        # Hidden: every bug and every limit of the compiler. Eager (or another compiler) runs the part instead, so that
        # a user's program neither stops nor changes; it is slower, and the log says so.
        except Exception as err:
            if not self.survives(err):
                raise
            self.note(err)
            return None

    def survives(self, err: Exception) -> bool:
        """Whether the part may run elsewhere after this.

        Not once arguments have been written over; not after an error of a device, which leaves it unusable (a kernel
        that wrote out of bounds); not after what Dynamo raises to steer itself; and nothing of ours with
        TILEFOLD_STRICT=1.
        """
        steers = isinstance(err, TorchDynamoException) and not isinstance(err, BackendCompilerFailed)
        if steers or has_written(err) or (self.by == "Tilefold" and config.load().strict):
            return False
        return not (isinstance(err, _DeviceError) or "CUDA error" in str(err))

    def note(self, err: Exception) -> None:
        """Record a failure, and log it if it is new."""
        reason, loc = f"{type(err).__name__}: {first_line(err)}", self.loc
        if self.by != "Tilefold":
            reason = f"{self.by} failed: {reason}"
        elif isinstance(err, TilefoldError):
            reason, loc = f"{type(err).__name__}: {err.message}", err.loc or loc
        else:
            reason = f"internal error: {reason}"
        self.fallbacks.append(Fallback(self.name, reason, loc))
        usual = self.instead != "in eager mode" and isinstance(err, UnsupportedError)
        if say_once(logging.INFO if usual else logging.WARNING, f"{self.name} runs {self.instead}", reason, loc):
            log.debug("where it happened", exc_info=err)


def say_once(level: int, what: str, reason: str, loc: SourceLoc | None) -> bool:
    """Log what happened and why, unless the same reason was given for the same line; whether it was new."""
    said = f"{reason} {loc}"
    if said in _said:
        return False
    _said.add(said)
    log.log(level, "%s: %s", what, f"{reason} at {loc}" if loc else reason)
    return True


def first_line(err: Exception) -> str:
    """The beginning of an error's message."""
    return re.sub(r"\s+", " ", str(err).splitlines()[0]) if str(err) else ""


class Guarded:
    """A compiled part. Where a call fails, that call runs op by op, and later ones run what `instead` makes.

    What op by op fails as well is the caller's mistake (an index out of range): eager's error is raised, and the
    part stays as it is.
    """

    def __init__(
        self,
        part: Part,
        run: Callable[..., object],
        by_operators: Callable[..., object],
        instead: Callable[[], Callable[..., object]] | None = None,
    ):
        self.part, self.run, self.by_operators = part, run, by_operators
        self.instead = instead or (lambda: by_operators)

    def __call__(self, *args: object) -> object:
        try:
            return self.run(*args)
        # Hidden: as in `attempt`, of kernels that are built when they are first needed. Arguments are as they were, or
        # the error is marked (`runtime.writing`), so that a call can be repeated.
        except Exception as err:
            if not self.part.survives(err):
                raise
            failed = err
        made = self.by_operators(*args)
        if not isinstance(failed, torch.OutOfMemoryError):  # another process may have held the memory
            self.part.note(failed)
            self.run = self.instead()
        return made

    def record(self, args: Sequence[object], recorder: Recorder) -> object:
        """A call as `run` alone makes it, written down (`regions.replay.recorded`)."""
        return recorded(self.run, args, recorder)

    def boxed(self, args: list[object]) -> object:
        """A call whose caller gives its arguments up: the list is emptied. Where the part has `replay`, arguments are
        freed while it runs, so that this call cannot be repeated: its error is raised."""
        replay: Callable[[list[object]], object] | None = getattr(self.run, "replay", None)
        made = None if replay is None else replay(args)
        if made is None:
            given = tuple(args)
            args.clear()
            made = self(*given)
        return made
