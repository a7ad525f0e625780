"""The exceptions Tilefold raises at its users. `assert` is for our own bugs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceLoc:
    """Where in the user's program a value was computed.

    `file` and `line` locate the statement, `text` is the stripped source line.
    """

    file: str
    line: int
    text: str = ""

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


class BackendError(TilefoldError):
    """A back end cannot compile or run a kernel (no compiler, compile failure, ...)."""


class CacheError(TilefoldError):
    """The on-disk cache cannot be used."""


class PlanError(TilefoldError):
    """The planner finds no plan for a program, or the program is too large to plan at once."""
