"""`tilefold plan`: which kernels the planner makes of a function, what each is predicted to cost, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.table import Table

from tilefold.cli import target
from tilefold.cli.friendly import console, friendly
from tilefold.errors import TilefoldError
from tilefold.frontend.fuse import trace
from tilefold.pipeline import gpu_kernels
from tilefold.plan.hardware import H100, H200, Gpu, Machine, gpu_here
from tilefold.plan.machine import nominal, this_machine
from tilefold.plan.planner import (
    Plan,
    bytes_text,
    describe,
    greedy,
    moved,
    plan_program,
    short,
    time_text,
    unfused,
)
from tilefold.plan.selected import priced
from tilefold.plan.targets.cpu import CpuTarget
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.ir import Program
from tilefold.user_file import checked


def plan(
    function: Annotated[str, typer.Argument(metavar="FILE:FUNCTION", help="a function in a Python file")],
    args: Annotated[str | None, typer.Option(help="what to call it with, as in `tilefold explain`")] = None,
    seed: Annotated[int, typer.Option(help="of the random arguments", min=0, max=2**63 - 1)] = 0,
    machine: Annotated[str, typer.Option(help="this or nominal (cpu); this, h100 or h200 (cuda)")] = "this",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; without it that of the machine, else cpu")] = None,
) -> None:
    """Which operators share a kernel, predicted bytes and time, and why the best plan without each kernel lost.

    For a GPU: the kernels that run, and those that a selection by predicted time would make.
    """
    with friendly("planning"):
        chosen = _machine(machine, device)
        fn, module = target.load(function)
        given = target.arguments(fn, module, args, seed=seed)
        with checked(fn, given, module):
            program = trace(fn, *given).program
        if isinstance(chosen, Gpu):
            shown: list[Table | str] = [*_gpu_tables(program, chosen)]
        else:
            found = plan_program(program, CpuTarget(chosen), budget=None, rivals=True)
            shown = [table(found), _summary(found)]
    for part in shown:
        console.print(part, highlight=False)


def _machine(name: str, device: str | None) -> Machine:
    cpus: dict[str, Callable[[], Machine]] = {"this": this_machine, "nominal": nominal}
    gpus: dict[str, Callable[[], Machine]] = {"this": gpu_here, "h100": lambda: H100, "h200": lambda: H200}
    known = {"cpu": cpus, "cuda": gpus, None: gpus | cpus}
    if device not in known:
        raise TilefoldError(f"no plans for {device!r}", hint="cpu or cuda")
    if name not in known[device]:
        kind = "" if device is None else f" with --device {device}"
        raise TilefoldError(f"no machine {name!r}{kind}", hint=" or ".join(known[device]))
    return known[device][name]()


def _gpu_tables(program: Program, machine: Gpu) -> Iterator[Table | str]:
    """Kernels as they run and as they would be selected, with prices, and the totals of both."""
    lines = []
    for title, search in (("as it runs", False), ("selected by predicted time (off)", True)):
        chosen = GpuTarget(machine, search=search)
        made = gpu_kernels(program, chosen)
        found = priced(made.fused, chosen, made.every_call)
        out = Table(title=f"{program.name} on {machine.name}, {title}", title_justify="left")
        for name in ("kernel", "form"):
            out.add_column(name, overflow="fold")
        for name in ("bytes", "time", "most of it"):
            out.add_column(name, justify="right")
        for x in found:
            row = (short(x.members), x.how, bytes_text(x.cost.nbytes), time_text(x.cost.seconds), x.cost.bottleneck)
            out.add_row(*(cell.replace("[", "\\[") for cell in row))
        yield out
        total = sum(x.cost.seconds for x in found)
        lines.append(f"{title:<34} {len(found):>4} kernels  {1e3 * total:>9.3f} ms")
    yield "\n".join(
        [*lines, "predicted, not measured: `tilefold bench planner --device cuda` says how well that ranks"]
    )


def table(found: Plan) -> Table:
    """One row a kernel."""
    out = Table(title=f"{found.program.name} on {found.target.machine.name}", title_justify="left")
    out.add_column("kernel", overflow="fold")
    out.add_column("form, tiles", overflow="fold")
    out.add_column("bytes", justify="right")
    out.add_column("time", justify="right")
    out.add_column("the best plan without it", overflow="fold")
    for row in describe(found):
        out.add_row(*(cell.replace("[", "\\[") for cell in row))
    return out


def _summary(found: Plan) -> str:
    """Totals, next to greedy fusion and none."""
    rows = [("planned", len(found.kernels), found.selection.seconds, found.nbytes)]
    for name, other in (("greedy", greedy(found)), ("unfused", unfused(found))):
        rows.append((name, len(other.kernels), other.seconds, moved(other)))
    lines = [f"{n:<8} {k:>4} kernels  {1e3 * s:>9.3f} ms  {b / 1e6:>9.2f} MB" for n, k, s, b in rows]
    s = found.selection
    kind = "no other plan is cheaper" if s.exact else "not all candidates were priced"
    return "\n".join([*lines, f"{s.ideals} ideals, {s.candidates} candidates, {s.priced} priced: {kind}"])
