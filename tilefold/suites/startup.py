"""`tilefold bench startup`: what the first call of a model costs on this CPU, in a first and in a second process.

Each figure is from a process of its own, `python -m tilefold.suites.startup ROW CONTENDER LAYERS`. The first one of a
contender finds all caches empty (Tilefold's, Inductor's, Triton's), the second as the first left them. Before a call,
torch and the compiler are imported, and the model and its arguments exist; it ends with the result, in training with
the gradients. The contenders take turns. The models are small (`suites.models`): the time of a compilation hardly
depends on widths. GPUs have `tilefold bench redfuser --study startup`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch

from tilefold.errors import TilefoldError
from tilefold.frontend import torch_compile  # noqa: F401 (imported before a call is timed)
from tilefold.suites.gpu.environment import commit_here, cpu_name
from tilefold.suites.gpu.report import grid
from tilefold.suites.gpu.startup import run_process
from tilefold.suites.models.all import MODELS, MODES
from tilefold.suites.page import write_part

PART = "startup"
ROWS = ("llama infer", "bert infer", "qwen3 infer", "llama train")
CONTENDERS = ("tilefold", "inductor")
#: Layers of the models, and seconds that one process may take.
LAYERS, PROCESS_SECONDS = 4, 900.0
#: Where each contender keeps what it compiled.
_CACHES = {"TILEFOLD_CACHE_DIR": "tilefold", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@dataclass(frozen=True, slots=True)
class First:
    """A first call, in seconds: from the call to the result, and of all processors that this took, child processes
    too; None where it was not measured."""

    wall: float | None
    processor: float | None


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
    """Entries, and where they are from."""

    entries: tuple[Entry, ...]
    layers: int
    commit: str
    cpu: str
    threads: int
    torch: str
    busy: float


def run(
    rows: Sequence[str] | None = None,
    *,
    layers: int = LAYERS,
    seconds: float = PROCESS_SECONDS,
    commit: str | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Report:
    """Measure rows (patterns of names, as `llama*`; None: ROWS). TilefoldError where none is meant."""
    names = [f"{m.name} {mode}" for mode in MODES for m in MODELS]
    chosen = [n for n in names if (n in ROWS if rows is None else any(fnmatch(n, r) for r in rows))]
    if not chosen:
        raise TilefoldError(f"no model is called {', '.join(rows or ())}", hint=f"there are: {', '.join(names)}")
    entries = tuple(e for row in chosen for e in _row(row, layers, seconds, progress))
    cpu = cpu_name()
    threads, busy = torch.get_num_threads(), os.getloadavg()[0]
    return Report(entries, layers, commit or commit_here(), cpu, threads, torch.__version__, round(busy, 1))


def _row(row: str, layers: int, seconds: float, progress: Callable[[str], None]) -> Iterator[Entry]:
    found: dict[str, list[First]] = {c: [] for c in CONTENDERS}
    why = dict.fromkeys(CONTENDERS, "")
    with tempfile.TemporaryDirectory() as folder:
        caches = ("env", *(f"{variable}={folder}/{name}" for variable, name in _CACHES.items()))
        for part in ("cold", "warm"):
            for contender in CONTENDERS:
                progress(f"{row}: {contender}, {part}")
                words = (sys.executable, "-m", "tilefold.suites.startup", row, contender, str(layers))
                ran = run_process((*caches, *words), seconds)
                found[contender].append(First(ran.found.get("wall"), ran.found.get("processor")))
                why[contender] = why[contender] or ran.why
    for contender in CONTENDERS:
        cold, warm = found[contender]
        yield Entry(row, contender, cold, warm, why[contender])


def cells(report: Report) -> list[tuple[str, ...]]:
    """A line a row: Tilefold's seconds and, in brackets, Inductor's."""
    lines = []
    for row in dict.fromkeys(e.row for e in report.entries):
        ours, theirs = (next(e for e in report.entries if (e.row, e.contender) == (row, c)) for c in CONTENDERS)
        pairs = [
            _pair(getattr(getattr(ours, part), what), getattr(getattr(theirs, part), what))
            for what in ("wall", "processor")
            for part in ("cold", "warm")
        ]
        whys = (f"{e.contender}: {e.why}" for e in (ours, theirs) if e.why)
        lines.append((row, *pairs, "; ".join(whys)))
    return lines


def _pair(ours: float | None, theirs: float | None) -> str:
    a, b = ("-" if x is None else f"{x:.1f}" for x in (ours, theirs))
    return f"{a} ({b})"


HEADS = ("model", "cold s", "warm s", "cold, processor s", "warm, processor s", "notes")


def markdown(report: Report) -> str:
    """This part of the page."""
    return "\n".join(
        [
            "## First calls on a CPU",
            "",
            f"Tilefold's seconds, Inductor's in brackets; {report.layers} layers, small widths, bfloat16; commit "
            f"{report.commit}, {report.cpu}, torch {report.torch} with {report.threads} threads. *cold*: all caches "
            "empty; *warm*: a second process. *processor*: of all cores together, compilers that were started among "
            f"that: on a machine that others use too (load {report.busy} at the end) it says more than the clock.",
            "",
            *grid(HEADS, cells(report)),
        ]
    )  # fmt: skip


def write(report: Report, *, json_path: Path | None = None, docs_path: Path | None = None) -> None:
    """Write the JSON and the part of the page where asked."""
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    if docs_path is not None:
        write_part(docs_path, PART, markdown(report))


def _processor() -> float:
    """Seconds of all processors that this process and its ended children have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main(arguments: Sequence[str]) -> None:
    """A process's own part: one first call."""
    row, contender, layers = arguments
    name, mode = row.split()
    (model,) = [m for m in MODELS if m.name == name]
    case = model.case("train" if mode == "train" else "infer", small=True, layers=int(layers)).placed("cpu")
    args = case.args()
    compiled = torch.compile(case.fn, backend=contender)
    with torch.set_grad_enabled(case.train):
        wall, processor = time.perf_counter(), _processor()
        out = compiled(*args)
        if case.train:
            out.backward()
        found = {"wall": time.perf_counter() - wall, "processor": _processor() - processor}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
