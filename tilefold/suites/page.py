"""`docs/benchmarks.md` has parts, written by different runs on different machines: each replaces its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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


def _parts(path: Path) -> dict[str, str]:
    """The texts of all parts of the page as it is, "" for those that it has not."""
    left = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = {}
    for name, mark in reversed(list(MARKS.items())):
        left, _, found[name] = left.partition(mark)
    return found | {CPU: left}
