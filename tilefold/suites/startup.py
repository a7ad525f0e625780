"""`tilefold bench startup`: what the first call of a model costs, in a first and in a second process, and its memory.

Each figure is from a process of its own, `python -m tilefold.suites.startup ROW CONTENDER LAYERS DEVICE`. The first one
of a contender finds all caches empty (Tilefold's, Inductor's, Triton's), the second as the first left them. Before a
call, torch and the compiler are imported, and the model and its arguments exist; it ends with the result, in training
with the gradients. The contenders take turns. On a CPU models are small (`suites.models`): the time of a compilation
hardly depends on widths; on a GPU they have their sizes, and a later step's peak of memory is measured as well.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from tilefold.errors import TilefoldError
from tilefold.frontend import torch_compile  # noqa: F401 (imported before a call is timed)
from tilefold.suites.gpu.environment import commit_here, device_facts
from tilefold.suites.gpu.exact import training_step
from tilefold.suites.gpu.measure import CudaTimer
from tilefold.suites.gpu.report import grid
from tilefold.suites.gpu.row import settle
from tilefold.suites.gpu.startup import run_process
from tilefold.suites.models.all import MODELS, MODES
from tilefold.suites.page import write_report

PART = "startup"
ROWS = tuple(f"{name} {mode}" for name in ("llama", "bert", "qwen3") for mode in MODES)
CONTENDERS = ("tilefold", "inductor")
#: Layers of the models, and seconds that one process may take.
LAYERS, PROCESS_SECONDS = 4, 900.0
#: Where each contender keeps what it compiled.
_CACHES = {"TILEFOLD_CACHE_DIR": "tilefold", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@dataclass(frozen=True, slots=True)
class First:
    """A first call, in seconds: from the call to the result, and of all processors that this took, child processes
    too; bytes that a later call has at most. None where it was not measured."""

    wall: float | None
    processor: float | None
    peak: float | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of one contender. `why`: what went wrong, "" if nothing did."""

    row: str
    contender: str
    cold: First
    warm: First
    why: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Entries, and where they are from: `kind` cpu or cuda, and the device's name."""

    entries: tuple[Entry, ...]
    layers: int
    commit: str
    kind: str
    device: str
    threads: int
    torch: str
    busy: float


def run(
    rows: Sequence[str] | None = None,
    *,
    device: str = "cpu",
    layers: int = LAYERS,
    workers: int = 1,
    seconds: float = PROCESS_SECONDS,
    commit: str | None = None,
    progress: Callable[[str], None] = lambda what: None,
    keep: Callable[[Report], None] = lambda so_far: None,
) -> Report:
    """Measure rows (patterns of names, as `llama*`; None: ROWS), so many at once. TilefoldError where none is meant.

    keep: is given the report of the rows that have ended whenever one has: a run that is cut short loses one row."""
    names = [f"{m.name} {mode}" for mode in MODES for m in MODELS]
    chosen = [n for n in names if (n in ROWS if rows is None else any(fnmatch(n, r) for r in rows))]
    if not chosen:
        raise TilefoldError(f"no model is called {', '.join(rows or ())}", hint=f"there are: {', '.join(names)}")
    found: dict[str, list[Entry]] = {}
    commit, name, threads = commit or commit_here(), str(device_facts(device)["name"]), torch.get_num_threads()

    def so_far() -> Report:
        entries = tuple(e for row in chosen for e in found.get(row, ()))
        busy = round(os.getloadavg()[0], 1)
        return Report(entries, layers, commit, device, name, threads, torch.__version__, busy)

    with ThreadPoolExecutor(workers) as pool:
        rows_ = {pool.submit(_row, row, device, layers, seconds, progress): row for row in chosen}
        for done in as_completed(rows_):
            found[rows_[done]] = done.result()
            keep(so_far())
    return so_far()


def _row(row: str, device: str, layers: int, seconds: float, progress: Callable[[str], None]) -> list[Entry]:
    found: dict[str, list[First]] = {c: [] for c in CONTENDERS}
    why = dict.fromkeys(CONTENDERS, "")
    with tempfile.TemporaryDirectory() as folder:
        caches = ("env", *(f"{variable}={folder}/{name}" for variable, name in _CACHES.items()))
        for part in ("cold", "warm"):
            for contender in CONTENDERS:
                progress(f"{row}: {contender}, {part}")
                words = (sys.executable, "-m", "tilefold.suites.startup", row, contender, str(layers), device)
                ran = run_process((*caches, *words), seconds)
                first = First(*(ran.found.get(n) for n in ("wall", "processor", "peak")))
                found[contender].append(first)
                progress(f"{row}: {contender}, {part}: {_seconds(first.wall)}, processor {_seconds(first.processor)}")
                why[contender] = why[contender] or ran.why
    return [Entry(row, c, found[c][0], found[c][1], why[c]) for c in CONTENDERS]


def cells(report: Report) -> list[tuple[str, ...]]:
    """A line a row: Tilefold's seconds and, in brackets, Inductor's; of a GPU megabytes too."""
    lines = []
    for row in dict.fromkeys(e.row for e in report.entries):
        ours, theirs = (next(e for e in report.entries if (e.row, e.contender) == (row, c)) for c in CONTENDERS)
        pairs = [
            _pair(getattr(getattr(ours, part), what), getattr(getattr(theirs, part), what))
            for what in ("wall", "processor")
            for part in ("cold", "warm")
        ]
        a, b = (None if e.warm.peak is None else e.warm.peak / 1e6 for e in (ours, theirs))
        whys = (f"{e.contender}: {e.why}" for e in (ours, theirs) if e.why)
        lines.append((row, *pairs, _pair(a, b, places=0), "; ".join(whys)))
    return lines


def _seconds(figure: float | None) -> str:
    return "not measured" if figure is None else f"{figure:.1f} s"


def _pair(ours: float | None, theirs: float | None, places: int = 1) -> str:
    a, b = ("-" if x is None else f"{x:.{places}f}" for x in (ours, theirs))
    return f"{a} ({b})"


HEADS = ("model", "cold s", "warm s", "cold, processor s", "warm, processor s", "peak MB", "notes")


def markdown(*reports: Report) -> str:
    """This part of the page: a table a device."""
    lines = [
        "## First calls",
        "",
        "Tilefold's seconds, Inductor's in brackets; bfloat16. *cold*: all caches empty; *warm*: a second process. "
        "*processor*: of all cores together, compilers that were started among that: on a machine that others use too "
        "it says more than the clock. *peak*: of a later step's memory on a GPU.",
    ]
    for r in reports:
        widths = "small widths" if r.kind == "cpu" else "the widths of `tilefold bench models`"
        where = f"{r.device}, torch {r.torch} with {r.threads} threads, commit {r.commit} (load {r.busy} at the end)"
        lines += ["", f"{where}: {r.layers} layers, {widths}.", "", *grid(HEADS, cells(r))]
    return "\n".join(lines)


def write(report: Report, *, json_path: Path | None = None, docs_path: Path | None = None) -> None:
    """Write the JSON and, with those of other devices beside it, the part of the page."""
    write_report(
        report, PART, json_path, docs_path, lambda folder: markdown(*(load_all(folder) if folder else (report,)))
    )


def load_all(folder: Path) -> tuple[Report, ...]:
    """The reports of a folder, a file a device."""
    return tuple(_report(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json")))


def _report(data: dict[str, Any]) -> Report:
    entries = [e | {part: First(**e[part]) for part in ("cold", "warm")} for e in data["entries"]]
    return Report(**(data | {"entries": tuple(Entry(**e) for e in entries)}))


def _processor() -> float:
    """Seconds of all processors that this process and its ended children have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main(arguments: Sequence[str]) -> None:
    """A process's own part: one first call."""
    row, contender, layers, device = arguments
    name, mode = row.split()
    (model,) = [m for m in MODELS if m.name == name]
    case = model.case("train" if mode == "train" else "infer", small=device == "cpu", layers=int(layers))
    case = case.placed(device)
    args = case.args(device)
    compiled = torch.compile(case.fn, backend=contender)
    call = training_step(compiled, case.fn) if case.train else compiled

    def step() -> None:
        call(*args)
        if device == "cuda":
            torch.cuda.synchronize()

    with torch.set_grad_enabled(case.train):
        wall, processor = time.perf_counter(), _processor()
        step()
        found = {"wall": time.perf_counter() - wall, "processor": _processor() - processor}
        if device == "cuda":
            settle(step, ours=contender == "tilefold")  # the first steps hold what they may run again
            found["peak"] = float(CudaTimer().peak(step))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
