"""One entry of `tilefold verify --suite blocks`: something shown, with its evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case found. `detail` is one line of numbers for the table."""

    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class BlockCase:
    """`run` shows what `name` says; an error it raises counts as a failure."""

    group: str
    name: str
    run: Callable[[], Outcome]
