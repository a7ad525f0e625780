"""The models for people: one line a model and mode, failures and losers first."""

from __future__ import annotations

from collections.abc import Sequence

from tilefold.suites.gpu.bars import geometric_mean
from tilefold.suites.gpu.report import grid
from tilefold.suites.gpu.results import Record, Results
from tilefold.suites.models.all import LAYERS, MODES, SUITE
from tilefold.suites.programs.report import Outcome, notes, outcomes, pair, times, where

_HEADS = (
    "model", "GPU ms", "Inductor", "eager", "step ms", "host ms", "graphs: step ms", "graphs: host ms", "peak MB",
    "kernels", "compile s", "error / eager's", "notes",
)  # fmt: skip


def cells(o: Outcome) -> tuple[str, ...]:
    """One line."""
    ours, inductor = o.ours, o.inductor
    both = (o.ours_graphed, o.graphed)
    graphed = [r for r in both if r is not None and r.why]
    return (
        o.any.row,
        _ms(_graph(ours)),
        f"{_ms(_graph(inductor))} ({times(o.speed)})",
        _ms(_graph(o.eager)),
        pair(ours, inductor, "step_us", 1e-3, ".3f"),
        pair(ours, inductor, "host_us", 1e-3, ".2f"),
        pair(*both, "step_us", 1e-3, ".3f"),
        pair(*both, "host_us", 1e-3, ".2f"),
        pair(ours, inductor, "peak_bytes", 2.0**-20, ".0f"),
        pair(ours, inductor, "kernels", 1.0, ".0f"),
        pair(ours, inductor, "first_cpu", 1.0, ".0f"),
        "-" if ours is None or ours.error != ours.error else f"{ours.error:.1e} / {ours.eager_error:.1e}",
        notes(o, (ours, inductor, o.eager, *graphed)),
    )


def _graph(r: Record | None) -> float | None:
    return r.best_us if r is not None and r.microseconds else None


def _ms(us: float | None) -> str:
    return "-" if us is None or us != us else f"{us / 1e3:.3f}"


def means(found: Sequence[Outcome]) -> list[str]:
    """A sentence a mode."""
    lines = []
    for mode in MODES:
        mine = [o for o in found if o.any.family == mode]
        speeds = [o.speed for o in mine if o.speed == o.speed]
        if mine:
            failed = sum(o.failed for o in mine)
            lines.append(
                f"{mode}: Inductor's GPU time is {times(geometric_mean(speeds))} Tilefold's (geometric mean of "
                f"{len(speeds)} models), least {times(min(speeds, default=float('nan')))}; failed: {failed}."
            )
    return lines


def plain(results: Results) -> str:
    """Text for a log."""
    found = outcomes(results, SUITE)
    return "\n".join([where(results), *means(found), " | ".join(_HEADS), *(" | ".join(cells(o)) for o in found)]) + "\n"


def markdown(*found: Results) -> str:
    """The models' part of the page."""
    lines = [
        "## Models",
        "",
        "Written by `tilefold bench models --docs docs/benchmarks.md`; do not edit.",
        "",
        f"Models of transformers with {LAYERS} layers (T5: {LAYERS} and {LAYERS}) and of torchvision, bf16, random",
        "weights; eager, `torch.compile` (Inductor, `dynamic=False`), Tilefold; in turn. *GPU ms*: the step captured",
        "as one CUDA graph, in brackets Inductor's over Tilefold's; *step ms*: a plain call; *host ms*: of the",
        "processor until it returns; *graphs*: both in mode `reduce-overhead`; pairs are Tilefold's / Inductor's.",
        "Compilation in seconds of the processor (one thread, empty caches, compilers that were started before).",
        "Errors: largest relative ones against float64 (training: of loss and gradients) beside eager's.",
        "",
    ]
    for results in found:
        listed = outcomes(results, SUITE)
        lines += [f"### Models on {results.device.get('name', 'an unknown device')}", "", f"{where(results)}.", ""]
        lines += [*means(listed), "", *grid(_HEADS, [cells(o) for o in listed]), ""]
    return "\n".join(lines)
