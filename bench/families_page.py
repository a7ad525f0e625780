"""Tables of `bench/families.py --json` for people: inference and training, each of one commit.

    python bench/families_page.py FILE.json ... [--docs docs/how-to/transformers.md]

A mode's table replaces what stands between `<!-- families: MODE -->` and `<!-- end -->` on the page; a mode that no
file has stays as it is. Without a page, the tables are printed. Rows of a mode may come from several files (its
families measured apart), if those are of one device, commit and versions.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilefold.suites.gpu.bars import geometric_mean
from tilefold.suites.gpu.report import grid
from tilefold.suites.programs.report import times

#: What a mode is called, and whose error is given.
MODES = {
    "infer": ("Inference", "the largest error of the logits against float32"),
    "train": (
        "A training step",
        "loss and all gradients, no optimizer; the largest error of logits and gradients against float32",
    ),
}
BASE, OURS = "eager", "apply"
NAMES = {"apply": "`apply`", "inductor": "Inductor", "tilefold": "the back end", "liger": "Liger"}
Row = Mapping[str, Any]


def tables(files: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Markdown by mode. ValueError: a mode's rows are of several commits, devices or versions."""
    rows: dict[str, list[Row]] = {}
    where: dict[str, tuple[str, ...]] = {}
    for found in files:
        here = tuple(found[k] for k in ("device", "versions", "commit"))
        for row in found["rows"]:
            mode = row["mode"]
            if where.setdefault(mode, here) != here:
                raise ValueError(f"{mode} was measured twice: {', '.join(where[mode])}; {', '.join(here)}")
            rows.setdefault(mode, []).append(row)
    return {mode: _table(mode, where[mode], found) for mode, found in rows.items()}


def write(page: Path, made: Mapping[str, str]) -> None:
    """Put tables between their marks. ValueError: the page has no place for one."""
    text = page.read_text(encoding="utf-8")
    for mode, table in made.items():
        place = re.compile(rf"(<!-- families: {mode} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"{page} has no place for {mode}: <!-- families: {mode} --> ... <!-- end -->")
        text = place.sub(lambda m, table=table: f"{m[1]}\n{table}\n\n{m[2]}", text)  # type: ignore[misc]
    page.write_text(text, encoding="utf-8")


def _table(mode: str, where: Sequence[str], rows: Sequence[Row]) -> str:
    title, error = MODES[mode]
    device, versions, commit = where
    by_family: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_family.setdefault(row["family"], {})[row["contender"]] = row
    measured = dict.fromkeys(r["contender"] for r in rows if not r["why"])
    names = [n for n in measured if n != BASE]
    heads = ["family", "GPU ms: eager", *(_name(n) for n in names), "step ms: eager", *(_name(n) for n in names)]
    heads += ["error: eager", *(_name(n) for n in names), "parts fused / left"]
    what = (
        f"{title} on {device} (commit {commit}, {versions}): the sum of the kernels' times, and a plain call until its "
        f"last kernel has ended; in brackets eager's time over it, above 1 where it is faster; {error}."
    )
    lines = [
        *textwrap.wrap(what, 120),
        "",
        *grid(heads, [_cells(family, found, names) for family, found in by_family.items()]),
        "",
        *(_mean(n, list(by_family.values())) for n in names),
        *_missing(rows),
    ]
    return "\n".join(lines)


def _name(contender: str) -> str:
    return NAMES.get(contender, contender)


def _cells(family: str, found: Mapping[str, Row], names: Sequence[str]) -> list[str]:
    cells = [family]
    for figure in ("gpu_ms", "step_ms"):
        cells += [_ms(found.get(BASE), figure), *(_ratio(found, n, figure) for n in names)]
    cells += [_of(found.get(n), "error", "{:.1e}") for n in (BASE, *names)]
    parts = found[OURS]["rows"] if OURS in found else []
    fused = sum(p.split()[1] == "fused" for p in parts)
    return [*cells, f"{fused} / {len(parts) - fused}" if parts else "-"]


def _of(row: Row | None, figure: str, how: str) -> str:
    return how.format(row[figure]) if row is not None and not row["why"] else "-"


def _ms(row: Row | None, figure: str) -> str:
    return _of(row, figure, "{:.2f}")


def _ratio(found: Mapping[str, Row], name: str, figure: str) -> str:
    shown = _ms(found.get(name), figure)
    base = found.get(BASE)
    if shown == "-" or base is None or base["why"]:
        return shown
    return f"{shown} ({times(base[figure] / found[name][figure])})"


def _mean(name: str, families: Sequence[Mapping[str, Row]]) -> str:
    """Geometric means over the families in which a contender and eager were measured."""
    pairs = [(f[BASE], f[name]) for f in families if all(n in f and not f[n]["why"] for n in (BASE, name))]
    gpu, step = (geometric_mean([a[k] / b[k] for a, b in pairs]) for k in ("gpu_ms", "step_ms"))
    return (
        f"- {_name(name)}: {times(gpu)} eager's speed on the GPU, {times(step)} in plain calls ({len(pairs)} families)."
    )


def _missing(rows: Sequence[Row]) -> list[str]:
    """Contenders that are left out, by name and with the reason."""
    together: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        if r["why"]:
            together.setdefault((r["contender"], r["why"].rpartition("TimeoutError: ")[2]), []).append(r["family"])
    return [f"- Not measured: {_name(n)} of {', '.join(fs)} ({why})." for (n, why), fs in together.items()]


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("files", nargs="+", type=Path)
    ask.add_argument("--docs", type=Path, help="the page whose tables are replaced")
    a = ask.parse_args()
    made = tables(json.loads(f.read_text(encoding="utf-8")) for f in a.files)
    if a.docs is not None:
        write(a.docs, made)
    else:
        print("\n\n".join(made.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
