"""`docs/benchmarks.md` has parts, written by different runs on different machines: each replaces its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TITLE = "# Benchmarks"
#: What a part begins with, in the order of the page; the CPU's, which has none, is first.
MARKS: Mapping[str, str] = {
    "planner": "<!-- The planner's part: written by `tilefold bench planner`; do not edit. -->",
    "startup": "<!-- First calls: written by `tilefold bench startup`; do not edit. -->",
    "programs": "<!-- The programs' part: written by `tilefold bench programs`; do not edit. -->",
    "models": "<!-- The models' part: written by `tilefold bench models`; do not edit. -->",
    "curve": "<!-- A decoder that learns: written by `tilefold bench curve`; do not edit. -->",
    "gpu": "<!-- The GPU part: written by `tilefold bench redfuser` and `tilefold bench neptune`; do not edit. -->",
}
CPU = "cpu"


def write_part(path: Path, name: str, text: str) -> None:
    """Put a part ("cpu", or one of MARKS) in its place, the others as they are; a title where there is no CPU part."""
    parts = _parts(path) | {name: text}
    out = parts[CPU].strip("\n") or TITLE
    for mark in MARKS:
        body = parts[mark].strip("\n")
        if body:
            out += f"\n\n{MARKS[mark]}\n\n{body}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(out + "\n", encoding="utf-8")


def write_report(
    report: DataclassInstance,
    part: str,
    json_path: Path | None,
    docs_path: Path | None,
    text_of: Callable[[Path | None], str],
) -> None:
    """Write a report of one device as JSON, and its part of the page, where asked. text_of: the part, of all reports in
    a folder; None: of this one alone."""
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    if docs_path is not None:
        write_part(docs_path, part, text_of(None if json_path is None else json_path.parent))


def _parts(path: Path) -> dict[str, str]:
    """The texts of all parts of the page as it is, "" for those that it has not."""
    left = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = {}
    for name, mark in reversed(list(MARKS.items())):
        left, _, found[name] = left.partition(mark)
    return found | {CPU: left}
