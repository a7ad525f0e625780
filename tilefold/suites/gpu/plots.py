"""Charts of a run (matplotlib, the `plots` extra): throughput over length, one file an operator, as in Neptune."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilefold.errors import UnsupportedError
from tilefold.suites.gpu.peers import OURS
from tilefold.suites.gpu.report import by_row, head
from tilefold.suites.gpu.results import Record, Results

_COLOURS = {OURS: "#d1495b", "eager": "#9aa5b1", "compile": "#5c6f82", "cudnn": "#66a182", "flash": "#2e4057"}


def draw(results: Results, folder: Path) -> tuple[Path, ...]:
    """Write `SUITE-OPERATOR.png` for every operator that was timed. UnsupportedError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (optional: the plots extra)
    except ImportError:
        raise UnsupportedError("plots need matplotlib", hint="pip install 'tilefold[plots]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for suite in dict.fromkeys(s for s, _ in results.done):
        rows = by_row(results, suite)
        for family in dict.fromkeys(records[0].family for records in rows):
            mine = [records for records in rows if records[0].family == family]
            if not any(r.microseconds for records in mine for r in records):
                continue
            figure = Figure(figsize=(max(6.4, 0.4 * len(mine)), 4.0), layout="constrained")
            axes = figure.add_subplot()
            if over_length(mine):
                _lines(axes, mine)
            else:
                _bars(axes, mine)
            axes.set_title(f"{suite}: {family} on {results.device.get('name', '')}", fontsize=10)
            figure.legend(fontsize=8, ncols=6, loc="outside lower center")
            path = folder / f"{suite}-{family.replace(' ', '-')}.png"
            figure.savefig(path, dpi=150)
            written.append(path)
    return tuple(written)


def over_length(rows: Sequence[Sequence[Record]]) -> bool:
    """Whether the rows differ in length alone, so that a line can be drawn."""
    lengths = [records[0].length for records in rows]
    return len(rows) > 2 and len(set(lengths)) == len(lengths) and rows[0][0].suite == "neptune"


def throughput(r: Record, flops: bool) -> float:
    """TFLOP/s, or GB/s."""
    return r.flops / r.best_us / 1e6 if flops else r.nbytes / r.best_us / 1e3


def counts_flops(r: Record) -> bool:
    """An operator with many flops a byte: prefill, products."""
    return r.flops > 100 * r.nbytes


def _lines(axes: Any, rows: Sequence[Sequence[Record]]) -> None:
    flops = counts_flops(rows[-1][0])
    for name in dict.fromkeys(r.contender for records in rows for r in records):
        timed = [r for records in rows for r in records if r.contender == name and r.microseconds]
        if timed:
            values = [throughput(r, flops) for r in timed]
            width = 2.4 if name == OURS else 1.3
            colour, lengths = _COLOURS.get(name), [r.length for r in timed]
            axes.plot(lengths, values, marker="o", lw=width, color=colour, label=head(name))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("length")
    axes.set_ylabel("TFLOP/s" if flops else "GB/s")
    axes.set_ylim(bottom=0)


def _bars(axes: Any, rows: Sequence[Sequence[Record]]) -> None:
    """Speed relative to eager (where it was not timed, to the slowest), a group of bars a row."""
    names = list(dict.fromkeys(r.contender for records in rows for r in records if r.microseconds))
    width = 0.8 / max(len(names), 1)
    for k, name in enumerate(names):
        at, values = [], []
        for n, records in enumerate(rows):
            base = _base(records)
            for r in records:
                if r.contender == name and r.microseconds:
                    at.append(n + (k - (len(names) - 1) / 2) * width)
                    values.append(base / r.best_us)
        axes.bar(at, values, width, color=_COLOURS.get(name), label=head(name))
    turned = 45 if len(rows) > 10 else 0
    axes.set_xticks(range(len(rows)), [records[0].row for records in rows], fontsize=8, rotation=turned)
    without = [
        records[0].row for records in rows if not any(r.contender == "eager" and r.microseconds for r in records)
    ]
    axes.set_ylabel("times as fast as eager" if not without else "times as fast as eager (else as the slowest)")


def _base(records: Sequence[Record]) -> float:
    timed = [r for r in records if r.microseconds]
    eager = next((r for r in timed if r.contender == "eager"), None)
    return eager.best_us if eager is not None else max((r.best_us for r in timed), default=1.0)
