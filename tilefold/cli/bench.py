"""`tilefold bench`: cpu, planner, startup, curve, programs, a suite of GPU rows, or a user's own file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from json import dumps
from pathlib import Path
from types import ModuleType
from typing import Annotated, get_args

import torch
import typer
from rich.status import Status

from tilefold.cli.friendly import console, friendly
from tilefold.errors import TilefoldError
from tilefold.plan.hardware import gpu_here
from tilefold.suites import bench_cpu, bench_planner, bench_planner_gpu, bench_report, own, planner_report, startup
from tilefold.suites.gpu import plots, report, supervise
from tilefold.suites.gpu.bars import judge_all, judge_startup
from tilefold.suites.gpu.cases import SUITES
from tilefold.suites.gpu.measure import CudaTimer
from tilefold.suites.gpu.results import Results, load_all
from tilefold.suites.gpu.worker import Job, Study
from tilefold.suites.models import all as models
from tilefold.suites.models import curve
from tilefold.suites.models import report as models_report
from tilefold.suites.page import write_part
from tilefold.suites.programs import report as programs_report
from tilefold.suites.programs import run as programs
from tilefold.suites.programs.program import SUITE

_GPU, _PROGRAMS = "GPU suites", "programs"
#: Rounds and seconds of a repetition of a program: there are hundreds of them.
PROGRAM_ROUNDS, PROGRAM_SECONDS = 30, 0.05
#: Suites that many workers measure: rows that a process takes on, and the report.
_TEAMS: dict[str, tuple[int, ModuleType]] = {
    SUITE: (programs.SHARE, programs_report),
    models.SUITE: (1, models_report),
}
#: Rows of the papers' suites that a process takes on.
ROW_SHARE = 3
_GPU_OPTIONS = frozenset({"device", "rows", "peers", "budget", "seconds", "row_seconds", "resume", "hot", "autotune"})
_GPU_OPTIONS |= {"small", "workers", "commit"}
#: The options that a suite takes besides --json and --docs.
_OPTIONS: dict[str, frozenset[str]] = {
    "cpu": frozenset({"only", "budget", "commit"}),
    "planner": frozenset({"only", "device", "commit"}),
    startup.PART: frozenset({"rows", "device", "workers", "commit"}),
    curve.PART: frozenset({"peers", "device", "commit"}),
    "page": frozenset(),
    **dict.fromkeys(SUITES, _GPU_OPTIONS | {"study", "plots"}),
    **dict.fromkeys(_TEAMS, _GPU_OPTIONS | {"classes", "modes"}),
    own.INPUTS: _GPU_OPTIONS - {"small"} | {"modes"},
}
#: Rows not begun that are named.
MOST_NAMED = 5
#: A file a device.
RESULTS = Path("bench/results")


def bench(
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Argument(
            help="cpu, planner, startup, curve, programs, models, redfuser, neptune, neighbours, "
            "FILE.py: your own, or page: what was measured"
        ),
    ] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help="part of a workload's name; may be repeated (cpu)")] = None,
    budget: Annotated[float, typer.Option(help="seconds a repetition of one workload", min=0.1)] = 6.0,
    json: Annotated[Path | None, typer.Option(help="where everything measured is written as JSON")] = None,
    docs: Annotated[Path | None, typer.Option(help="also write this suite's part of the page of results")] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda; cpu is a dry run; of planner, curve: cpu or cuda", rich_help_panel=_GPU)
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="names or families, as H1,causal-*-4096,mla", rich_help_panel=_GPU)
    ] = None,
    peers: Annotated[str | None, typer.Option(help="as eager,cudnn; without it all", rich_help_panel=_GPU)] = None,
    seconds: Annotated[float | None, typer.Option(help="no row is begun after these", rich_help_panel=_GPU)] = None,
    row_seconds: Annotated[float, typer.Option(help="of a row, compilation included", rich_help_panel=_GPU)] = 120.0,
    resume: Annotated[bool, typer.Option(help="keep the rows that the JSON has", rich_help_panel=_GPU)] = False,
    hot: Annotated[bool, typer.Option(help="caches hot instead of flushed", rich_help_panel=_GPU)] = False,
    autotune: Annotated[
        bool, typer.Option(help="also contenders that tune themselves, and nothing tuned", rich_help_panel=_GPU)
    ] = False,
    small: Annotated[bool, typer.Option(help="the same operators at small sizes", rich_help_panel=_GPU)] = False,
    study: Annotated[
        str | None, typer.Option(help="numerics, ablations or startup; no rows", rich_help_panel=_GPU)
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="as norms,cnns; without it all", rich_help_panel=_PROGRAMS)
    ] = None,
    modes: Annotated[str | None, typer.Option(help="infer, train (models; FILE.py)", rich_help_panel=_PROGRAMS)] = None,
    workers: Annotated[
        int, typer.Option(help="processes that compile at once; one core each", min=1, rich_help_panel=_PROGRAMS)
    ] = 4,
    commit: Annotated[
        str | None, typer.Option(help="what is measured, where git cannot tell", rich_help_panel=_PROGRAMS)
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plots", help="folder for charts", rich_help_panel=_GPU)] = None,
) -> None:
    """Time Tilefold next to eager, torch.compile and library kernels, the contenders taking turns."""
    _check_options(context, suite)
    for place in (docs,) if suite == "page" else (json, docs):
        _check_writable(place)
    if suite == "cpu":
        _cpu(only, budget, json, docs, commit)
        return
    if suite == "planner":
        _planner(only, json, docs, device or "cpu", commit)
        return
    if suite == startup.PART:
        at_once = workers if "workers" in _given(context) else 1
        _startup(_names(rows), json, docs, device or "cpu", at_once, commit)
        return
    if suite == curve.PART:
        _curve(_names(peers), json, docs, device or "cpu", commit)
        return
    device = device or "cuda"
    if suite == "page":
        _page(json, docs)
        return
    job = partial(
        Job,
        suite=suite,
        status="",
        small=small,
        cache="hot" if hot else "cold",
        only=_names(peers),
        autotune=autotune,
        row_seconds=row_seconds,
        deadline=None if seconds is None else time.time() + seconds,
    )
    if _is_file(suite):
        job = partial(job, suite=own.SUITE, file=suite, modes=_names(modes) or own.MODES[:1])
        suite, classes, modes, json = own.SUITE, None, None, json or Path(suite).with_suffix(".bench.json")
    if suite in _TEAMS:
        chosen = job(
            results="",
            device=device,
            rows=_chosen(_names(classes), _names(modes), _names(rows)),
            rounds=PROGRAM_ROUNDS,
            seconds=min(budget, PROGRAM_SECONDS),
        )
        _programs(chosen, json, docs, workers, resume, commit)
        return
    with friendly():
        chosen = job(
            results=str(json or _results_path(device)),
            device=_checked_device(device),
            rows=_names(rows),
            seconds=min(budget, 0.5),
            study=_study(study),
        )
        with console.status("starting") as status:
            tell = _progress(status)
            if chosen.study is not None:
                results = supervise.run(chosen, resume=resume, progress=tell)
            else:
                results = programs.run(
                    chosen, workers=workers, share=ROW_SHARE, resume=resume, progress=tell, commit=commit
                )
        if docs is not None:
            write_part(docs, "gpu", report.markdown(*_all(Path(chosen.results), results)))
        if plot is not None:
            plots.draw(results, plot)
    _show(chosen, results)


def _check_options(context: typer.Context, suite: str) -> None:
    """Say which options a suite does not take: it would run as if they had not been given."""
    given = _given(context)
    with friendly():
        if _is_file(suite) and not Path(suite).is_file():
            raise TilefoldError(f"not a file: {suite}" if Path(suite).exists() else f"no such file: {suite}")
        known = own.INPUTS if _is_file(suite) else suite
        if known not in _OPTIONS or suite == own.INPUTS:
            raise TilefoldError(f"no benchmarks for {suite!r}", hint=", ".join(n for n in _OPTIONS if n != own.INPUTS))
        taken = {"suite", "json", "docs", *_OPTIONS[known]}
        if vain := sorted(given - taken):
            said = (f"--{n.replace('_', '-')}" for n in sorted(taken - {"suite"}))
            raise TilefoldError(
                f"bench {suite} takes no --{vain[0].replace('_', '-')}", hint=f"it takes {', '.join(said)}"
            )


def _given(context: typer.Context) -> frozenset[str]:
    """The options of the command line, by their names there."""
    names = {p.name: max(p.opts, key=len).removeprefix("--") for p in context.command.params if p.name is not None}
    source = context.get_parameter_source
    given = [n for n in names if (s := source(n)) is not None and s.name == "COMMANDLINE"]
    return frozenset(names[n].replace("-", "_") for n in given)


def _is_file(suite: str) -> bool:
    return suite.endswith(".py")


def _check_writable(place: Path | None) -> None:
    """Say before anything is measured that its results could not be written."""
    if place is None:
        return
    new = not place.exists()
    with friendly():
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("a"):
            pass
        if new:
            place.unlink()


def _cpu(only: list[str] | None, budget: float, json: Path | None, docs: Path | None, commit: str | None) -> None:
    with friendly():
        with console.status("") as status:
            result = bench_cpu.run(only or None, budget=budget, commit=commit, progress=status.update)
        bench_report.write(result, json_path=json, docs_path=docs)
    console.print(bench_report.table(result))


def _planner(only: list[str] | None, json: Path | None, docs: Path | None, device: str, commit: str | None) -> None:
    if device != "cpu":
        _planner_of_gpu(only, json, device)
        return
    with friendly():
        with console.status("") as status:
            result = bench_planner.run(only or None, commit=commit, progress=status.update)
        planner_report.write(result, json_path=json, docs_path=docs)
    if result.rows:
        console.print(planner_report.table(result))
        console.print(planner_report.summary(result), highlight=False)
    for line in planner_report.planning(result):
        console.print(line, highlight=False)


def _planner_of_gpu(only: list[str] | None, path: Path | None, device: str) -> None:
    with friendly():
        _checked_device(device)
        with console.status("") as status:
            found = bench_planner_gpu.run(gpu_here(), CudaTimer(), names=only or None, progress=status.update)
        if path is not None:
            path.write_text(dumps(asdict(found), indent=1) + "\n")
    console.print(bench_planner_gpu.table(found))
    for line in bench_planner_gpu.summary(found):
        console.print(line, highlight=False)


def _startup(
    rows: tuple[str, ...] | None, json: Path | None, docs: Path | None, device: str, workers: int, commit: str | None
) -> None:
    with friendly():
        _checked_device(device)
        with console.status("") as status:
            keep, tell = partial(startup.write, json_path=json), _progress(status)
            report_ = startup.run(rows, device=device, workers=workers, commit=commit, progress=tell, keep=keep)
        startup.write(report_, json_path=json, docs_path=docs)
    console.print(startup.markdown(report_), markup=False, highlight=False, soft_wrap=True)


def _curve(
    peers: tuple[str, ...] | None, json: Path | None, docs: Path | None, device: str, commit: str | None
) -> None:
    with friendly():
        _checked_device(device)
        contenders = curve.CONTENDERS if peers is None else ("tilefold", *peers)
        with console.status("") as status:
            found = curve.run(device, contenders=contenders, commit=commit, progress=_progress(status))
        curve.write(found, json_path=json, docs_path=docs)
    console.print(curve.markdown(found), markup=False, highlight=False, soft_wrap=True)


def _programs(job: Job, json: Path | None, docs: Path | None, workers: int, resume: bool, commit: str | None) -> None:
    """Programs in classes, many workers at once; the table, as text, goes beside the JSON."""
    with friendly():
        _checked_device(job.device)
        path = json or RESULTS / job.suite / _results_path(job.device).name
        share, report_ = _TEAMS[job.suite]
        job = replace(job, results=str(path))
        with console.status("starting") as status:
            results = programs.run(
                job, workers=workers, share=share, resume=resume, progress=_progress(status), commit=commit
            )
        text = report_.plain(results)
        path.with_suffix(".txt").write_text(text, encoding="utf-8")
        if docs is not None:
            write_part(docs, job.suite, report_.markdown(*_all(path, results)))
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    _say_not_begun(job, results)
    console.print(f"written: {path}")


def _chosen(
    classes: tuple[str, ...] | None, modes: tuple[str, ...] | None, rows: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """Patterns of rows: classes and names beside each other, names of models in the modes asked for; None: all."""
    if modes is not None and rows is not None:
        return tuple(f"{row} {mode}" for row in rows for mode in modes)
    return (*(classes or ()), *(modes or ()), *(rows or ())) or None


def _page(json: Path | None, docs: Path | None) -> None:
    """The GPUs' parts of the page again, of all files of results beside `json` and below; nothing is measured."""
    with friendly():
        folder = RESULTS if json is None else json.parent
        makers = {"gpu": report.markdown} | {suite: maker.markdown for suite, (_, maker) in _TEAMS.items()}
        files = {name: load_all(folder if name == "gpu" else folder / name) for name in makers}
        texts = {name: makers[name](*found) for name, found in files.items() if found}
        for part in (curve, startup):
            if reports := part.load_all(folder / part.PART):
                texts[part.PART] = part.markdown(*reports)
        if not texts:
            raise TilefoldError(f"there are no results of a GPU in {folder}")
        for name, text in texts.items():
            if docs is None:
                console.print(text, markup=False, highlight=False, soft_wrap=True)
            elif text:
                write_part(docs, name, text)


def _all(path: Path, own: Results) -> tuple[Results, ...]:
    """What is known of every device, where this run's file lies with the others."""
    inside = path.resolve().is_relative_to(RESULTS.resolve())
    return load_all(path.parent) if inside else (own,)


def _progress(status: Status) -> Callable[[str], None]:
    """Shown in place on a terminal; elsewhere, as in a log, a line for each thing that is begun."""
    last = [""]

    def tell(text: str) -> None:
        if console.is_terminal:
            status.update(text)
        elif text != last[0]:
            last[0] = text
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    return tell


def _show(job: Job, results: Results) -> None:
    if job.study is None:
        chosen = [c.row for c in job.cases()]
        console.print(report.table(results, job.suite, frozenset(chosen)))
        console.print(report.means_table(results, job.suite))
        console.print(report.bars_table(judge_all(results, [job.suite])))
        _say_not_begun(job, results)
    else:
        for found in report.studies(results, job.study):
            console.print(found)
        if job.study == "startup":
            console.print(report.bars_table(judge_startup(results)))
    console.print(f"written: {job.results}")


def _say_not_begun(job: Job, results: Results) -> None:
    """How many rows are missing, the first of them by name: the tables above have not all that was asked for."""
    left = programs.not_begun(job, results)
    if not left:
        return
    more = "" if len(left) <= MOST_NAMED else f" and {len(left) - MOST_NAMED} more"
    late = job.deadline is not None and time.time() > job.deadline
    text = f"{len(left)} of {len(job.cases())} rows were not begun{' before --seconds had passed' if late else ''}: "
    text += "; ".join(left[:MOST_NAMED]) + more + "\n  hint: the same command with --resume goes on from here"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(t.strip() for t in text.split(",") if t.strip())


def _study(text: str | None) -> Study | None:
    known: dict[str, Study] = {name: name for name in get_args(Study)}
    if text is not None and text not in known:
        raise TilefoldError(f"no study {text!r}", hint=", ".join(known))
    return None if text is None else known[text]


def _checked_device(device: str) -> str:
    if device not in ("cuda", "cpu"):
        raise TilefoldError(f"no benchmarks on {device!r}", hint="cuda, or cpu for a dry run")
    if device == "cuda" and not torch.cuda.is_available():
        raise TilefoldError("there is no CUDA device", hint="--device cpu --small runs the suite dry")
    return device


def _results_path(device: str) -> Path:
    """`bench/results/h100.json` on an "NVIDIA H100 80GB HBM3"."""
    if device != "cuda" or not torch.cuda.is_available():
        return RESULTS / "dry-run.json"
    words = torch.cuda.get_device_name().lower().split()
    return RESULTS / f"{(words[1:] or words)[0]}.json"
