"""`tilefold tune`: time configurations of a function's GPU kernels and keep the best in the user's table."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.table import Table

from tilefold.backends.triton.space import Effort
from tilefold.cli import target
from tilefold.cli.friendly import console, friendly
from tilefold.errors import TilefoldError
from tilefold.frontend.tune import tune as tune_function
from tilefold.plan.library_rates import keep
from tilefold.runtime.tuner.program import TunedKernel
from tilefold.runtime.tuner.table import user_file
from tilefold.suites.gpu.measure import CudaTimer
from tilefold.suites.library_rates import measured
from tilefold.user_file import checked

#: In place of a function.
LIBRARY = "library"
_EFFORTS: dict[str, Effort] = {"quick": "quick", "full": "full"}


def tune(
    function: Annotated[str, typer.Argument(metavar="FILE:FUNCTION", help="a function in a Python file; or library")],
    args: Annotated[str | None, typer.Option(help="what to call it with, as in `tilefold explain`")] = None,
    seed: Annotated[int, typer.Option(help="of the random arguments", min=0, max=2**63 - 1)] = 0,
    effort: Annotated[str, typer.Option(help="quick (some twenty candidates) or full (hundreds)")] = "quick",
    again: Annotated[bool, typer.Option(help="also kernels that the table has already")] = False,
) -> None:
    """Time configurations of a function's GPU kernels and keep the best; needs a CUDA device.

    Every candidate's results are compared before it is timed.
    `tilefold tune library` times the device's matrix products and convolutions instead, for the planner.
    """
    if function == LIBRARY:
        _library()
        return
    with friendly():
        if effort not in _EFFORTS:
            raise TilefoldError(f"no effort {effort!r}", hint=" or ".join(_EFFORTS))
        fn, module = target.load(function)
        given = target.arguments(fn, module, args, seed=seed)
        with console.status("tuning") as status, checked(fn, given, module):
            found = tune_function(
                fn,
                *given,
                effort=_EFFORTS[effort],
                progress=lambda done, of, what: status.update(f"{done} of {of}: {what}"),
                again=again,
            )
    if not found:
        console.print("every kernel of it is in the table already (--again tunes them anew)")
        return
    console.print(table(found))
    console.print(f"written: {user_file()}")


def _library() -> None:
    """The table of the library's times is kept where the planner looks for it."""
    with friendly():
        if not torch.cuda.is_available():
            raise TilefoldError(
                "there is no CUDA device", hint="the library's rates are then those of plan/hardware.py"
            )
        with console.status("timing") as status:
            found = measured(CudaTimer(), "cuda", torch.cuda.get_device_name(), progress=status.update)
        path = keep(found)
    console.print(f"{len(found.points)} calls of the library timed; written: {path}")


def table(found: tuple[TunedKernel, ...]) -> Table:
    """One row a kernel."""
    out = Table(title="microseconds a call", title_justify="left")
    for name in ("kernel", "default", "best", "candidates", "not run"):
        out.add_column(name, justify="left" if name == "kernel" else "right")
    out.add_column("configuration", overflow="fold")
    for k in found:
        failed = sum(1 for t in k.trials if t.microseconds is None)
        times = (f"{t:.1f}" for t in (k.winner.default_microseconds, k.winner.microseconds))
        out.add_row(k.name, *times, str(len(k.trials)), str(failed), str(k.winner.config))
    return out
