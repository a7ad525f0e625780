"""`tilefold verify --suite`: every program of a suite compiled, and compared with float64.

A row is right where the results are (`frontend.verify`, on random and on hostile arguments), the
cascade was derived or refused as expected, and it took no more kernels than it should.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from tilefold.errors import TilefoldError
from tilefold.frontend.fuse import fuse, trace
from tilefold.frontend.hostile import variants
from tilefold.frontend.verify import verify
from tilefold.pipeline import compile_program
from tilefold.suites.cascades import CASCADES
from tilefold.suites.case import Case

SUITES: dict[str, tuple[Case, ...]] = {"cascades": CASCADES}


@dataclass(frozen=True, slots=True)
class Row:
    """One program. Errors are relative to float64 (`frontend.verify` has the measure).

    `outcome`: "fold", "refused" (with `reasons`) or "error". `hostile`: right ones of all tried;
    `worst` the worst of them. `seconds`: compiling, running and comparing.
    """

    name: str
    source: str
    ok: bool
    outcome: str
    kernels: int
    folds: int
    max_rel_err: float
    eager_rel_err: float
    hostile: tuple[int, int]
    seconds: float
    reasons: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Structure:
    """How a function was fused: kernels, folds and the reasons of what was not."""

    kernels: int
    folds: int
    rejections: tuple[str, ...]


def structure(case: Case) -> Structure:
    """How the case's program is fused where fusion is wished for (no product left to a library)."""
    compiled = compile_program(trace(case.fn, *case.args()).program, goal="fused", load=False)
    kernels = compiled.fused.kernels
    stages = [s for k in kernels for s in k.plan.stages]
    reasons = tuple(r.reason for k in kernels for r in k.plan.rejections)
    return Structure(len(kernels), len(stages), tuple(dict.fromkeys(reasons)))


def suite_cases(name: str) -> tuple[Case, ...]:
    """The programs of a suite; TilefoldError where there is none of that name."""
    if name not in SUITES:
        raise TilefoldError(f"no suite {name!r}", hint=f"there is: {', '.join(SUITES)}, blocks")
    return SUITES[name]


def run_suite(name: str, *, progress: Callable[[str], None] | None = None) -> list[Row]:
    """A row for each program; `progress` is told the name of each before it starts."""
    rows = []
    for case in suite_cases(name):
        if progress is not None:
            progress(case.name)
        rows.append(run_case(case))
    return rows


def run_case(case: Case) -> Row:
    """Compile, run and compare one program. Refusals by the compiler become a row that is not right."""
    start = time.perf_counter()
    try:
        shape = structure(case)
        args = case.args()
        derived = variants(args) if case.derived_hostile else ()
        report = verify(case.fn, *args, compiled=fuse(case.fn), hostile=(*derived, *case.hostile_args()))
    except TilefoldError as error:
        seconds = time.perf_counter() - start
        nan = float("nan")
        return Row(case.name, case.source, False, "error", 0, 0, nan, nan, (0, 0), seconds, (), error.message)
    outcome = "refused" if shape.rejections else "fold"
    wrong = [c for c in report.hostile if not c.ok]
    faults = []
    if outcome != case.expect:
        faults.append(f"expected {case.expect}")
    if shape.kernels > case.kernels:
        faults.append(f"at most {case.kernels} kernel(s) expected")
    if not report.given.ok:
        faults.append(report.given.why)
    faults += [f"{c.name}: {c.why} (max {c.max_rel_err:.1e}, bound {c.bound:.1e})" for c in wrong]
    return Row(
        name=case.name,
        source=case.source,
        ok=not faults,
        outcome=outcome,
        kernels=shape.kernels,
        folds=shape.folds,
        max_rel_err=report.max_rel_err,
        eager_rel_err=report.eager_rel_err,
        hostile=(len(report.hostile) - len(wrong), len(report.hostile)),
        seconds=time.perf_counter() - start,
        reasons=shape.rejections,
        why="; ".join(faults),
    )


def table(rows: Iterable[Row]) -> Table:
    """The rows for a terminal."""
    out = Table(title="cascades", title_justify="left")
    out.add_column("cascade")
    for head in ("", "derived", "kernels", "error", "eager's", "hostile", "s"):
        out.add_column(head, justify="right")
    out.add_column("notes", overflow="fold")
    for r in rows:
        mark = "[green]ok[/]" if r.ok else "[red]FAIL[/]"
        right, tried = r.hostile
        notes = r.why or "; ".join(r.reasons)
        out.add_row(
            r.name,
            mark,
            r.outcome,
            str(r.kernels),
            f"{r.max_rel_err:.1e}",
            f"{r.eager_rel_err:.1e}",
            f"{right}/{tried}",
            f"{r.seconds:.1f}",
            notes.replace("[", "\\["),
        )
    return out


def summary(rows: Sequence[Row]) -> str:
    """One line: how many are right, and the slowest."""
    right = sum(r.ok for r in rows)
    inputs = sum(r.hostile[1] for r in rows)
    return f"{right} of {len(rows)} right, on random arguments and on {inputs} hostile ones"
