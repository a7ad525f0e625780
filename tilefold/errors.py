"""The exceptions Tilefold raises at its users. `assert` is for our own bugs."""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True, slots=True)
class SourceLoc:
    """Where in the user's program a value was computed.

    `file` and `line` locate the statement, `text` is the stripped source line.
    """

    file: str
    line: int
    text: str = ""

    @staticmethod
    def of_caller(*skip: str) -> SourceLoc | None:
        """The line that is running, in the innermost frame outside of this file and of paths that start so."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith((__file__, *skip)):
            frame = frame.f_back
        if frame is None:
            return None
        file, line = frame.f_code.co_filename, frame.f_lineno
        return SourceLoc(file, line, linecache.getline(file, line).strip())

    def __str__(self) -> str:
        tail = f": {self.text}" if self.text else ""
        return f"{self.file}:{self.line}{tail}"


class TilefoldError(Exception):
    """Base of every error that a user can cause or act on.

    `loc` is the user's line, `hint` the way out; both are part of the message.
    """

    def __init__(self, message: str, *, loc: SourceLoc | None = None, hint: str | None = None):
        self.message, self.loc, self.hint = message, loc, hint
        parts = [message]
        if loc is not None:
            parts.append(f"  at {loc}")
        if hint:
            parts.append(f"  hint: {hint}")
        super().__init__("\n".join(parts))


class ParseError(TilefoldError):
    """A text form (tensor, block or tile IR, or a `derive` formula) cannot be read."""


class VerifyError(TilefoldError):
    """An IR breaks its own rules; raised by the verifiers."""


class UnsupportedError(TilefoldError):
    """An operator or dtype that Tilefold does not cover."""


class NotFusibleError(TilefoldError):
    """A cascade for which no Fold exists (or none that is safe); the message says why.

    `reduction` names the first reduction that cannot join the ones before it.
    """

    def __init__(
        self,
        message: str,
        *,
        reduction: str | None = None,
        loc: SourceLoc | None = None,
        hint: str | None = None,
    ):
        self.reduction = reduction
        super().__init__(message, loc=loc, hint=hint)


class ScheduleError(TilefoldError):
    """A step of a schedule that would change what the program computes, or that names nothing in it.

    `dependency` is what forbids it, as "producer -> consumer"; None where no dependency does.
    """

    def __init__(
        self,
        message: str,
        *,
        dependency: str | None = None,
        loc: SourceLoc | None = None,
        hint: str | None = None,
    ):
        self.dependency = dependency
        super().__init__(message, loc=loc, hint=hint)


class BackendError(TilefoldError):
    """A back end cannot compile or run a kernel (no compiler, compile failure, ...)."""


class NoRoomError(BackendError):
    """No folder takes the files of a compilation: a full or read-only disk, or a limit on the size of files."""


class CacheError(TilefoldError):
    """The on-disk cache cannot be used."""


class PlanError(TilefoldError):
    """The planner finds no plan for a program, or the program is too large to plan at once."""
