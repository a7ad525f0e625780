"""`tilefold verify --suite blocks`: what the block programs, laws, schedules and planner have to show."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from tilefold.errors import TilefoldError
from tilefold.suites.blocks import coda, paper, planned, schedules
from tilefold.suites.blocks.case import BlockCase, Outcome


@dataclass(frozen=True, slots=True)
class Shown:
    """A case and what came of it, in seconds."""

    case: BlockCase
    outcome: Outcome
    seconds: float


def cases() -> tuple[BlockCase, ...]:
    """All cases, group by group."""
    return (*paper.cases(), *schedules.cases(), *coda.cases(), *planned.cases())


def run(progress: Callable[[str], None] = lambda name: None) -> list[Shown]:
    """Every case; an error that Tilefold or torch raises, or a failed assertion, makes its case fail."""
    shown = []
    for c in cases():
        progress(c.name)
        start = time.perf_counter()
        try:
            outcome = c.run()
        except (TilefoldError, RuntimeError, AssertionError, LookupError, ValueError, TypeError) as err:
            outcome = Outcome(False, f"{type(err).__name__}: {err}")
        shown.append(Shown(c, outcome, time.perf_counter() - start))
    return shown


def table(shown: list[Shown]) -> Table:
    """One line a case."""
    out = Table(title="Block programs", show_lines=False)
    for name in ("group", "case", "", "evidence", "s"):
        out.add_column(name, overflow="fold")
    last = ""
    for s in shown:
        mark = "[green]ok[/]" if s.outcome.ok else "[red]FAILS[/]"
        group = s.case.group if s.case.group != last else ""
        out.add_row(group, s.case.name, mark, s.outcome.detail, f"{s.seconds:.1f}")
        last = s.case.group
    return out
