"""`docs/benchmarks.md` has two parts, written by different runs on different machines: each replaces its own."""

from __future__ import annotations

from pathlib import Path

TITLE = "# Benchmarks"
#: Everything from this line on is the GPU part.
MARK = "<!-- The GPU part: written by `tilefold bench redfuser` and `tilefold bench neptune`; do not edit. -->"


def write_cpu_part(path: Path, text: str) -> None:
    """Put the CPU part, which begins with the title, before the GPU part that the page has (if any)."""
    _, mark, gpu = _read(path).partition(MARK)
    _write(path, text + ("\n" + mark + gpu if mark else ""))


def write_gpu_part(path: Path, text: str) -> None:
    """Put the GPU part after the CPU part that the page has (if none, after a title)."""
    cpu = _read(path).partition(MARK)[0].rstrip("\n") or TITLE
    _write(path, f"{cpu}\n\n{MARK}\n\n{text}")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
