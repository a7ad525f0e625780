"""The programs for people: who is wrong or fails first, then who loses, then the rest; means by class; a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tilefold.suites.gpu.bars import against, geometric_mean
from tilefold.suites.gpu.peers import GRAPHED, OURS, OURS_GRAPHED
from tilefold.suites.gpu.report import grid
from tilefold.suites.gpu.results import Record, Results
from tilefold.suites.programs.all import CLASSES, PROGRAMS
from tilefold.suites.programs.program import SUITE

#: Below this Tilefold loses to torch.compile.
LOST = 0.9
#: Characters of a commit that a page shows.
SHOWN_OF_COMMIT = 8
_HEADS = ("program", "class", "us", "Inductor", "eager", "compile s", "peak MB", "kernels", "error / eager's", "notes")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A program's records: Tilefold's, Inductor's (torch.compile, default mode), eager's, and Inductor's and
    Tilefold's with CUDA graphs of their own; None where unknown.
    """

    ours: Record | None
    inductor: Record | None
    eager: Record | None
    graphed: Record | None = None
    ours_graphed: Record | None = None

    @property
    def any(self) -> Record:
        """One that there is."""
        return next(r for r in (self.ours, self.inductor, self.eager) if r is not None)

    @property
    def failed(self) -> bool:
        """Tilefold is wrong, raises, or takes too long, where eager does not, or was not asked."""
        if self.eager is not None and _fails(self.eager):
            return False
        return self.ours is None or _fails(self.ours) or bool(self.ours.why)

    @property
    def speed(self) -> float:
        """Inductor's time over Tilefold's; NaN where one was not timed."""
        return _over(self.inductor, self.ours)

    @property
    def lost(self) -> bool:
        return self.speed < LOST


def _fails(r: Record | None) -> bool:
    return r is None or not r.microseconds


def _over(peer: Record | None, ours: Record | None) -> float:
    if peer is None or ours is None or not peer.microseconds or not ours.microseconds:
        return math.nan
    return against(peer, ours)


def outcomes(results: Results, suite: str = SUITE) -> list[Outcome]:
    """Of a suite's programs that the results have: failures, then by speed, the slowest first, then those without."""
    found = []
    for row in dict.fromkeys(r.row for r in results.records if r.suite == suite):
        by_name = {r.contender: r for r in results.row(suite, row)}
        found.append(Outcome(*(by_name.get(name) for name in (OURS, "compile", "eager", GRAPHED, OURS_GRAPHED))))
    return sorted(found, key=lambda o: (not o.failed, math.isnan(o.speed), o.speed if o.speed == o.speed else 0.0))


def means(found: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """A line a class and one of all: programs, failures, lost, geometric means against Inductor and eager, and the
    medians of the compile seconds' and peaks' ratios (Tilefold's over Inductor's).
    """
    lines: list[tuple[str, ...]] = []
    for name in (*dict.fromkeys((*CLASSES, *(o.any.family for o in found))), "all"):  # or a class of somebody else's
        mine = [o for o in found if name in (o.any.family, "all")]
        if not mine:
            continue
        speeds = [o.speed for o in mine if not math.isnan(o.speed)]
        eager = [x for x in (_over(o.eager, o.ours) for o in mine) if not math.isnan(x)]
        lines.append(
            (
                name,
                str(len(mine)),
                str(sum(o.failed for o in mine)),
                str(sum(o.lost for o in mine)),
                times(geometric_mean(speeds)),
                times(min(speeds, default=math.nan)),
                times(geometric_mean(eager)),
                times(_median([_part(o, "first_cpu") for o in mine])),
                times(_median([_part(o, "peak_bytes") for o in mine])),
            )
        )
    return lines


MEAN_HEADS = (
    "class", "programs", "failed", "lost", "vs Inductor", "least", "vs eager", "compile / Inductor's",
    "peak / Inductor's",
)  # fmt: skip


def _part(o: Outcome, name: str) -> float:
    """A figure of Tilefold's over Inductor's."""
    if o.ours is None or o.inductor is None:
        return math.nan
    mine, other = getattr(o.ours, name), getattr(o.inductor, name)
    return float(mine / other) if other else math.nan


def _median(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else math.nan


def cells(o: Outcome) -> tuple[str, ...]:
    """One program's line."""
    ours, inductor = o.ours, o.inductor
    return (
        o.any.row.split(": ", 1)[-1],
        o.any.family,
        _us(ours),
        f"{_us(inductor)} ({times(o.speed)})",
        f"{_us(o.eager)} ({times(_over(o.eager, ours))})",
        pair(ours, inductor, "first_cpu", 1.0, ".1f"),
        pair(ours, inductor, "peak_bytes", 2.0**-20, ".0f"),
        pair(ours, inductor, "kernels", 1.0, ".0f"),
        "-" if ours is None or math.isnan(ours.error) else f"{ours.error:.0e} / {ours.eager_error:.0e}",
        notes(o, (ours, inductor, o.eager)),
    )


def notes(o: Outcome, told: Sequence[Record | None]) -> str:
    """What Tilefold left to others, what went wrong, and who was timed in another way than the rest.

    Operators without a kernel are named; where a part of a graph failed, whose name has no dot, reasons are given.
    """
    left = []
    if o.ours is not None and o.ours.left:
        failed = any("." not in name for name in o.ours.left.split(", "))
        left = [f"left to others: {o.ours.left_why if failed and o.ours.left_why else o.ours.left}"]
    return "; ".join(left + [f"{r.contender}: {r.why or r.how}" for r in told if r is not None and said(r)])


def said(r: Record) -> bool:
    return bool(r.why) or "outside" in r.how


def _us(r: Record | None) -> str:
    return "-" if _fails(r) or r is None else f"{r.best_us:,.1f}"


def pair(a: Record | None, b: Record | None, name: str, scale: float, form: str) -> str:
    """Tilefold's figure / Inductor's."""
    values = [math.nan if r is None else getattr(r, name) * scale for r in (a, b)]
    return " / ".join("-" if math.isnan(v) else format(v, form) for v in values)


def times(x: float) -> str:
    return "-" if math.isnan(x) else f"{x:.2f}x"


def plain(results: Results) -> str:
    """Text for a log: the means, then a line a program."""
    found = outcomes(results)
    lines = [where(results), " | ".join(MEAN_HEADS), *(" | ".join(m) for m in means(found)), "", " | ".join(_HEADS)]
    return "\n".join([*lines, *(" | ".join(cells(o)) for o in found)]) + "\n"


def commits(results: Results) -> str:
    """The commits that rows were measured at, most rows first; the others with their rows."""
    found: dict[str, list[str]] = {}
    for row, commit in {r.row: r.commit for r in results.records if r.commit}.items():
        found.setdefault(commit[:SHOWN_OF_COMMIT], []).append(row)
    first, *others = sorted(found.items(), key=lambda x: -len(x[1])) or [("", [])]
    return ", ".join([first[0], *(f"{commit} ({', '.join(sorted(rows))})" for commit, rows in others)])


def where(results: Results) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in results.versions.items())
    policy = {**results.policy, "commit": commits(results) or results.policy.get("commit", "unknown")}
    about = "; ".join(f"{k}: {v}" for k, v in policy.items() if k in ("commit", "table"))
    return f"{results.device.get('name', 'unknown device')}; {versions}; {about}; {results.date[:10]}"


def markdown(*found: Results) -> str:
    """The programs' part of the page: a section a device."""
    lines = [
        "## Programs",
        "",
        "Written by `tilefold bench programs --docs docs/benchmarks.md`; do not edit.",
        "",
        f"{len(PROGRAMS)} plain functions and modules (`tilefold/suites/programs/`), each eagerly, with",
        '`torch.compile` (Inductor, `dynamic=False`) and with `backend="tilefold"`, in turn, as CUDA graphs.',
        "Times in microseconds, in brackets a peer's time over Tilefold's: above 1 Tilefold is faster. Failed: wrong,",
        f"raised, or out of time; lost: below {LOST} of Inductor's speed. Pairs are Tilefold's figure / Inductor's.",
        "Seconds of compilation are the processor's during the first call (one thread, empty caches, compilers that",
        "were started before). Errors are the largest relative ones against float64, beside eager's own in the same",
        "dtype, of which Tilefold's may be the double.",
        "",
    ]
    for results in found:
        listed = outcomes(results)
        lines += [f"### Programs on {results.device.get('name', 'an unknown device')}", "", f"{where(results)}.", ""]
        lines += [*grid(MEAN_HEADS, means(listed)), "", *grid(_HEADS, [cells(o) for o in listed]), ""]
    return "\n".join(lines)
