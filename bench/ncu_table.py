"""A short table, in markdown, of what Nsight Compute measured: `python bench/ncu_table.py FILE.csv ...`

Files are what `ncu -i REPORT --csv --page raw` prints (or a run with `--csv --page raw`): a line of names, a line of
units, then a line a kernel. Metrics have other names on other chips and in other versions of ncu: the first that a
file has is taken, and "-" stands where it has none.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Column of the table -> metrics, of which the first that matches wholly is taken (of several, the largest).
METRICS: Mapping[str, tuple[str, ...]] = {
    "DRAM %": (
        r"gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed",
        r"dram__throughput\.avg\.pct_of_peak_sustained_elapsed",
    ),
    "L2 %": (
        r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",
        r"lts__t_sectors\.avg\.pct_of_peak_sustained_elapsed",
    ),
    "tensor pipe %": (
        r"sm__pipe_tensor\w*_cycles_active\.avg\.pct_of_peak_sustained_active",
        r"sm__inst_executed_pipe_tensor\w*\.avg\.pct_of_peak_sustained_active",
    ),
    "SM busy %": (
        r"sm__instruction_throughput\.avg\.pct_of_peak_sustained_active",
        r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed",
    ),
    "occupancy %": (r"sm__warps_active\.avg\.pct_of_peak_sustained_active",),
    "registers": (r"launch__registers_per_thread",),
}
DURATION = r"gpu__time_duration\.sum"
#: Warps that wait for a reason, on average, when an instruction is issued.
STALLED = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
#: Microseconds in ncu's units of time, as old and new versions call them.
MICROSECONDS = {
    "nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6,
}  # fmt: skip
TOP_STALLS = 3


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: its name, values and units by metric."""

    name: str
    values: Mapping[str, float]
    units: Mapping[str, str]

    def value(self, patterns: Sequence[str]) -> float | None:
        """Of the first pattern that any metric matches, the largest value; None: there is none."""
        for pattern in patterns:
            found = [x for name, x in self.values.items() if re.fullmatch(pattern, name)]
            if found:
                return max(found)
        return None

    @property
    def microseconds(self) -> float | None:
        """How long it ran. KeyError for a unit of time that is not known."""
        time = self.value((DURATION,))
        return None if time is None else time * MICROSECONDS[self.units["gpu__time_duration.sum"]]

    @property
    def stalls(self) -> list[tuple[str, float]]:
        """Why warps waited, each as a share of all that they waited or issued ("selected"), the most frequent first."""
        found = {m[1]: x for name, x in self.values.items() if (m := STALLED.fullmatch(name))}
        found = {reason: x for reason, x in found.items() if not reason.endswith("not_issued")}  # part of the others
        total = sum(found.values())
        shares = [(reason, x / total) for reason, x in found.items() if x and reason != "selected"]
        return sorted(shares, key=lambda s: -s[1])[:TOP_STALLS]


def kernels(text: str) -> list[Kernel]:
    """The launches of a raw page. ValueError where the text is none."""
    lines = [ln for ln in text.splitlines() if ln.startswith('"')]  # others are ncu's progress and the program's own
    rows = list(csv.reader(lines))
    if len(rows) < 2 or "Kernel Name" not in rows[0] or "Metric Name" in rows[0] or rows[1][0]:
        raise ValueError("not a raw page of ncu: print it with --csv --page raw")
    names, units = rows[0], dict(zip(rows[0], rows[1], strict=True))
    found = []
    for row in rows[2:]:
        cells = dict(zip(names, row, strict=True))
        values = {name: x for name, cell in cells.items() if (x := _number(cell)) is not None}
        found.append(Kernel(cells["Kernel Name"], values, units))
    return found


def _number(cell: str) -> float | None:
    """`1,234.5`; None for anything else."""
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


def table(found: Iterable[Kernel]) -> str:
    """A line a launch."""
    heads = ("kernel", "us", *METRICS, "warps wait for")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for k in found:
        stalls = ", ".join(f"{reason.replace('_', ' ')} {share:.0%}" for reason, share in k.stalls)
        cells = (_shown(k.microseconds), *(_shown(k.value(p)) for p in METRICS.values()), stalls or "-")
        lines.append(f"| {_plain(k.name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _shown(x: float | None) -> str:
    return "-" if x is None else f"{x:,.0f}" if x >= 100 or x == int(x) else f"{x:.1f}"


def _plain(name: str) -> str:
    """A kernel's name without its arguments and templates."""
    return re.split(r"[(<]", name.removeprefix("void "))[0].strip() or name


def main(paths: Sequence[str]) -> None:
    """See the module."""
    print(table(k for path in paths for k in kernels(Path(path).read_text(encoding="utf-8"))), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
