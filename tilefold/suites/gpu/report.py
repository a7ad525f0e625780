"""The GPU benchmarks for people: tables for a terminal, and their part of `docs/benchmarks.md`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from tilefold.suites.gpu.ablation import with_relative
from tilefold.suites.gpu.bars import STATED_FOR, Verdict, against, geometric_mean, judge_all, judge_startup
from tilefold.suites.gpu.cases import SUITES
from tilefold.suites.gpu.peers import OURS, PEERS
from tilefold.suites.gpu.results import Record, Results

_HEADS = {
    "tilefold": "Tilefold", "untuned": "Tilefold, nothing tuned", "compile": "torch.compile",
    "compile-max": "max-autotune", "cudnn": "cuDNN", "flash": "flash SDPA", "flex": "Flex",
    "flex-max": "Flex, autotuned", "quack": "QuACK", "liger": "Liger",
}  # fmt: skip


def head(contender: str) -> str:
    """A contender's name for people."""
    return _HEADS.get(contender, contender)


def machine_line(results: Results) -> str:
    """Device, versions, ceilings, date."""
    versions = ", ".join(f"{name} {v}" for name, v in results.versions.items())
    r = results.rates
    rates = (
        f"f16 products {r['f16'] / 1e12:,.0f} TFLOP/s, e4m3 {r['f8'] / 1e12:,.0f} TFLOP/s, "
        f"memory {r['memory'] / 1e9:,.0f} GB/s"
        if r
        else "ceilings not measured"
    )
    return f"{results.device.get('name', 'unknown device')}; {versions}; {rates}; {results.date[:10]}"


def by_row(results: Results, suite: str, rows: frozenset[str] | None = None) -> list[tuple[Record, ...]]:
    """The records of each row of a suite, in the suite's order, then the file's; `rows`: only those."""
    place = {c.row: n for n, c in enumerate(SUITES.get(suite, ()))}
    names = dict.fromkeys(r.row for r in results.records if r.suite == suite)
    ordered = sorted(names, key=lambda n: place.get(n, len(place)))
    return [results.row(suite, n) for n in ordered if rows is None or n in rows]


def table(results: Results, suite: str, rows: frozenset[str] | None = None) -> Table:
    """Every row for a terminal. Ratios above 1: Tilefold is faster."""
    out = Table(title=f"{suite}: {machine_line(results)}", title_justify="left")
    out.add_column("row")
    for name in ("us", "floor", "of floor", "best peer"):
        out.add_column(name, justify="right")
    out.add_column("peer's time / Tilefold's", overflow="fold")
    out.add_column("error (eager's)", justify="right")
    out.add_column("notes", overflow="fold", style="dim")
    for records in by_row(results, suite, rows):
        ours, peers = _split(records)
        best = best_peer(records)
        out.add_row(
            records[0].row,
            _us(ours),
            f"{records[0].floor_us:.1f}",
            _of_floor(ours),
            "-" if best is None else f"{head(best.contender)} {_us(best)}",
            ", ".join(f"{head(p.contender)} {ratio(p, ours)}" for p in peers if p.microseconds),
            _errors(ours),
            "; ".join(_notes(records)).replace("[", "\\["),
        )
    return out


def bars_table(verdicts: Iterable[Verdict]) -> Table:
    """What had to be reached, and whether it was."""
    out = Table(title="bars", title_justify="left")
    for name in ("suite", "bar", "reached", "rows", ""):
        out.add_column(name, justify="right" if name in ("reached", "rows") else "left")
    for v in verdicts:
        colour = {True: "green", False: "red", None: "yellow"}[v.met]
        out.add_row(v.suite, v.name, _number(v.value), str(v.rows), f"[{colour}]{v.word}[/]{_missing(v)}")
    return out


def means_table(results: Results, suite: str) -> Table:
    """Geometric means for a terminal: a line an operator, then the whole suite."""
    out = Table(title=f"{suite}: geometric means of a peer's time over Tilefold's (rows)", title_justify="left")
    found = means(results, suite)
    names = list(dict.fromkeys(name for _, name, _, _ in found))
    out.add_column("operator")
    for name in names:
        out.add_column(head(name), justify="right")
    by_name = {(family, name): f"{mean:.2f}x ({n})" for family, name, mean, n in found}
    for family in dict.fromkeys(f for f, _, _, _ in found):
        out.add_row(family, *(by_name.get((family, name), "") for name in names))
    return out


def means(results: Results, suite: str) -> list[tuple[str, str, float, int]]:
    """Family, contender, geometric mean of its time over Tilefold's, rows; then the whole suite ("all")."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for records in by_row(results, suite):
        ours, others = _split(records)
        if ours is None or not ours.microseconds:
            continue
        timed = [(p.contender, against(p, ours)) for p in others if p.microseconds]
        peers = [x for name, x in timed if PEERS[name].kind == "peer"]
        if peers:
            timed.append(("best peer", min(peers)))
        for name, x in timed:
            for family in (ours.family, "all"):
                ratios.setdefault((family, name), []).append(x)
    listed = [(f, name, geometric_mean(xs), len(xs)) for (f, name), xs in ratios.items()]
    return sorted(listed, key=lambda m: m[0] == "all")


def markdown(*found: Results) -> str:
    """The GPU part of the page, made of nothing but results: a section a device, the H100 first."""
    lines = ["## On a GPU", ""]
    for results in sorted(
        found, key=lambda r: (STATED_FOR not in str(r.device.get("name")), str(r.device.get("name")))
    ):
        lines += _device(results)
    return "\n".join([*lines, *_how_to_read()]) + "\n"


def _device(results: Results) -> list[str]:
    lines = [f"### {results.device.get('name', 'unknown device')}", "", f"Measured on {machine_line(results)}."]
    lines += [f"{results.policy.get('how', '')}.", ""]
    for suite in dict.fromkeys(s for s, _ in results.done):
        mine, commit, older = results.of_one_commit(suite)
        about = [f"Commit {commit}.", ""] if commit else []
        if older:
            about = [*about[:1], f"Left out, for they were measured at others: {', '.join(older)}.", ""]
        verdicts = judge_all(mine, [suite])
        if verdicts:
            lines += [f"#### {suite}: bars", "", *about, *_bars(verdicts), ""]
        lines += [f"#### {suite}: geometric means", "", *([] if verdicts else about), *_means(mine, suite), ""]
        lines += [f"#### {suite}: rows", "", *_rows(mine, suite)]
    for title, heads, rows in _studies(results):
        lines += [f"#### {title}", "", *grid(heads, rows), ""]
    if results.startup:
        lines += [*_bars(judge_startup(results)), "", *_how_startup_is_measured(), ""]
    return lines


def _bars(verdicts: Sequence[Verdict]) -> list[str]:
    rows = [(v.name, _number(v.value), str(v.rows), v.word + _missing(v)) for v in verdicts]
    return grid(("bar", "reached", "rows", ""), rows)


def _means(results: Results, suite: str) -> list[str]:
    rows = [(f, head(name), f"{mean:.2f}x", str(n)) for f, name, mean, n in means(results, suite)]
    return grid(("operator", "peer", "its time / Tilefold's", "rows"), rows)


def _rows(results: Results, suite: str) -> list[str]:
    """A table for each family, with a column for each of its peers."""
    lines: list[str] = []
    rows = by_row(results, suite)
    for family in dict.fromkeys(records[0].family for records in rows):
        mine = [records for records in rows if records[0].family == family]
        names = dict.fromkeys(r.contender for records in mine for r in records if r.contender != OURS)
        heads = ("row", "shape", "Tilefold us", "floor us", "of floor", *(head(n) for n in names), "error (eager's)")
        cells = [_cells(records, tuple(names)) for records in mine]
        lines += [f"**{family}**", "", *grid(heads, cells), ""]
        notes = [f"- {records[0].row}: {note}" for records in mine for note in _notes(records)]
        lines += [*notes, ""] if notes else []
    return lines


def _cells(records: Sequence[Record], names: Sequence[str]) -> tuple[str, ...]:
    ours, others = _split(records)
    by_name = {r.contender: r for r in others}
    timed = [by_name.get(n) for n in names]
    return (
        records[0].row,
        records[0].shape,
        _us(ours),
        f"{records[0].floor_us:.1f}",
        _of_floor(ours),
        *(f"{_us(r)} ({ratio(r, ours)})" if r is not None and r.microseconds else "-" for r in timed),
        _errors(ours),
    )


def studies(results: Results, only: str | None = None) -> list[Table]:
    """The studies for a terminal, those that there are; `only`: the one of that name."""
    found = []
    if only is not None:
        others: dict[str, Any] = {name: () for name in ("numerics", "ablations", "startup") if name != only}
        results = replace(results, **others)
    for title, heads, rows in _studies(results):
        out = Table(*heads, title=title, title_justify="left")
        for row in rows:
            out.add_row(*(cell.replace("[", "\\[") for cell in row))
        found.append(out)
    return found


def _studies(results: Results) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Title, heads and cells."""
    found: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = []
    if results.numerics:
        heads: tuple[str, ...] = ("operator", "contender", "RMS", "90th %", "99th %", "notes")
        cells = [
            (str(n["row"]), head(str(n["contender"])), *_study(n, "rms", "p90", "p99"), str(n["why"]))
            for n in results.numerics
        ]
        found.append(("Absolute error against float64", heads, cells))
    found += [(f"Ablation: {name}", *_ablation(results, name)) for name in _ablations(results)]
    if results.startup:
        figures = ("cold", "warm", "capture", "tuning", "imports", "host_us", "fuse_us", "torch_us")
        heads = ("row", "first call s", "second process s", "torch's capture s", "quick tuning s", "imports s",
                 "host us: custom operator", "fuse()", "torch.neg", "notes")  # fmt: skip
        cells = [(str(e["row"]), *_study(e, *figures), str(e["why"])) for e in results.startup]
        found.append(("First calls, quick tuning, and the host's time of a warm call", heads, cells))
    return found


def _ablations(results: Results) -> list[str]:
    return list(dict.fromkeys(str(a["study"]) for a in results.ablations))


def _ablation(results: Results, name: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and cells: a line a point, a column a variant with its time and, in brackets, that relative to the base."""
    entries = [a for a in with_relative(results.ablations) if a["study"] == name]
    variants = list(dict.fromkeys(str(a["variant"]) for a in entries))
    rows = []
    for point in dict.fromkeys(str(a["point"]) for a in entries):
        mine = {str(a["variant"]): a for a in entries if a["point"] == point}
        notes = "; ".join(f"{v}: {a['why']}" for v, a in mine.items() if a["why"])
        rows.append((point, *(_relative_time(mine.get(v)) for v in variants), notes))
    return ("point", *(f"{v} us" for v in variants), "notes"), rows


def _relative_time(entry: dict[str, Any] | None) -> str:
    if entry is None or not entry["microseconds"]:
        return "-"
    relative = "" if entry["relative"] is None else f" ({entry['relative']:.2f})"
    return f"{entry['microseconds']:.1f}{relative}"


def _study(entry: dict[str, object], *names: str) -> tuple[str, ...]:
    values = (entry.get(n) for n in names)
    return tuple("-" if not isinstance(v, int | float) else f"{v:.3g}" for v in values)


def _how_startup_is_measured() -> list[str]:
    return [
        "A first call is timed from the call to its result, in a process that has imported torch, Triton and Tilefold",
        "and has its arguments on the device. torch's capture is the first call of `torch.compile` with a backend that",
        "does nothing, in a process like the others: the part of a first call that is not Tilefold's. Imports: seconds",
        "of the processor from the start of the process.",
    ]


def _how_to_read() -> list[str]:
    return [
        "How to read it:",
        "",
        "- A peer's column has its time in microseconds and, in brackets, that over Tilefold's: above 1 Tilefold is",
        "  faster. All contenders of a row take turns in one process on the same random arguments; times are medians,",
        "  the series is done twice, and the less flattering ratio is given.",
        "- *floor*: bytes, each counted once, over the measured bandwidth, or flops over the measured rate of the",
        "  library's product, whichever is longer. Contenders called gemm are the product alone.",
        "- *error*: maximum relative error against float64 beside eager's own in the same dtype. Tilefold's may be",
        "  twice eager's; a contender that is wrong is not timed.",
        "- Ablations: microseconds and, in brackets, those over the first variant's of the same line (levels), or over",
        "  the slowest of the table (incremental).",
    ]


def best_peer(records: Sequence[Record]) -> Record | None:
    """The fastest that computes the whole operator; None where none was timed."""
    timed = [r for r in records if r.kind == "peer" and r.microseconds]
    return min(timed, key=lambda r: r.best_us, default=None)


def ratio(peer: Record, ours: Record | None) -> str:
    """`1.52x`; "-" where Tilefold was not timed."""
    return f"{against(peer, ours):.2f}x" if ours is not None and ours.microseconds else "-"


def _split(records: Sequence[Record]) -> tuple[Record | None, list[Record]]:
    ours = next((r for r in records if r.contender == OURS), None)
    return ours, [r for r in records if r.contender != OURS]


def _us(r: Record | None) -> str:
    return "-" if r is None or not r.microseconds else f"{r.best_us:.1f}"


def _of_floor(ours: Record | None) -> str:
    return "-" if ours is None or not ours.microseconds else f"{ours.floor_us / ours.best_us:.0%}"


def _errors(ours: Record | None) -> str:
    return "-" if ours is None or math.isnan(ours.error) else f"{ours.error:.0e} ({ours.eager_error:.0e})"


def _notes(records: Sequence[Record]) -> list[str]:
    """What went wrong, and who was timed in another way than the rest."""
    said = [(r.contender, r.why or (r.how if "outside" in r.how else "")) for r in records]
    return [f"{head(name)}: {note}" for name, note in said if note]


def _missing(v: Verdict) -> str:
    without = f"; left out, a peer lacks: {', '.join(v.without)}" if v.without else ""
    return (f" ({', '.join(v.missing)})" if v.missing else "") + without


def _number(x: float) -> str:
    return "-" if math.isnan(x) else f"{x:,.2f}"


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in markdown."""
    cells = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows]
    return ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *cells]
