"""`docs/benchmarks.md` has three parts, written by different runs on different machines: each replaces its own."""

from __future__ import annotations

from pathlib import Path

TITLE = "# Benchmarks"
#: From this line on: how well the planner predicts.
PLANNER_MARK = "<!-- The planner's part: written by `tilefold bench planner`; do not edit. -->"
#: Everything from this line on is the GPU part.
MARK = "<!-- The GPU part: written by `tilefold bench redfuser` and `tilefold bench neptune`; do not edit. -->"


def write_cpu_part(path: Path, text: str) -> None:
    """Put the CPU part, which begins with the title, first."""
    _, planner, gpu = _parts(path)
    _write(path, text, planner, gpu)


def write_planner_part(path: Path, text: str) -> None:
    """Put the planner's part after the CPU part that the page has (if none, after a title)."""
    cpu, _, gpu = _parts(path)
    _write(path, cpu, text, gpu)


def write_gpu_part(path: Path, text: str) -> None:
    """Put the GPU part last."""
    cpu, planner, _ = _parts(path)
    _write(path, cpu, planner, text)


def _parts(path: Path) -> tuple[str, str, str]:
    """The texts of the CPU, the planner's and the GPU part of the page as it is."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    text, _, gpu = text.partition(MARK)
    cpu, _, planner = text.partition(PLANNER_MARK)
    return cpu, planner, gpu


def _write(path: Path, cpu: str, planner: str, gpu: str) -> None:
    """The parts in order, each that is there after its mark."""
    out = cpu.strip("\n") or TITLE
    for mark, part in ((PLANNER_MARK, planner), (MARK, gpu)):
        if part.strip("\n"):
            body = part.strip("\n")
            out += f"\n\n{mark}\n\n{body}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(out + "\n", encoding="utf-8")
