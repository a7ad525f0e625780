"""The rows of all suites, and choosing among them by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

from tilefold.errors import TilefoldError
from tilefold.suites.gpu import neighbours, neptune, redfuser
from tilefold.suites.gpu.case import GpuCase
from tilefold.suites.models.all import SUITE as MODELS
from tilefold.suites.models.all import other, rows
from tilefold.suites.programs.all import PROGRAMS
from tilefold.suites.programs.program import SUITE

SUITES: dict[str, tuple[GpuCase, ...]] = {
    "redfuser": redfuser.ROWS,
    "neptune": neptune.ROWS,
    "neighbours": neighbours.ROWS,
    SUITE: tuple(p.case() for p in PROGRAMS),
    MODELS: rows(),
}
SMALL: dict[str, tuple[GpuCase, ...]] = {
    "redfuser": redfuser.SMALL,
    "neptune": neptune.SMALL,
    "neighbours": neighbours.SMALL,
    SUITE: tuple(p.case(small=True) for p in PROGRAMS),
    MODELS: rows(small=True),
}


def select(suite: str, patterns: Sequence[str] | None = None, *, small: bool = False) -> tuple[GpuCase, ...]:
    """Rows of a suite whose name or family matches one of the patterns (`H1`, `causal-*-4096`, `mla`; None: all).

    small: the suite's operators at small sizes instead. TilefoldError where nothing matches.
    """
    known = SMALL if small else SUITES
    if suite not in known:
        raise TilefoldError(f"no suite {suite!r}", hint=f"there is: {', '.join(known)}")
    more: tuple[GpuCase, ...] = ()
    if suite == MODELS:  # a network of torchvision may be named that is not in the list
        unlisted = [p.lower() for p in patterns or () if not any(_matches(c, p.lower()) for c in known[suite])]
        more = tuple(c for p in unlisted if (c := other(p, small=small)) is not None)
    return choose((*known[suite], *more), patterns, suite)


def choose(rows: Sequence[GpuCase], patterns: Sequence[str] | None, where: str) -> tuple[GpuCase, ...]:
    """Those of the rows that match one of the patterns (None: all); TilefoldError where none does."""
    wanted = None if patterns is None else [p.lower() for p in patterns]
    found = tuple(c for c in rows if wanted is None or any(_matches(c, p) for p in wanted))
    if not found:
        families = ", ".join(dict.fromkeys(c.family for c in rows))
        raise TilefoldError(f"no row of {where} is called {', '.join(patterns or ())}", hint=f"families: {families}")
    return found


def _matches(c: GpuCase, pattern: str) -> bool:
    return fnmatch(c.row.lower(), pattern) or fnmatch(c.family, pattern)
