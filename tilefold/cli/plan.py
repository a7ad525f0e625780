"""`tilefold plan`: which kernels the planner makes of a function, what each is predicted to cost, and why."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from tilefold.cli import target
from tilefold.cli.friendly import console, friendly
from tilefold.errors import TilefoldError
from tilefold.frontend.fuse import trace
from tilefold.plan.hardware import H100, H200, Machine
from tilefold.plan.machine import nominal, this_machine
from tilefold.plan.planner import Plan, describe, greedy, moved, plan_program, unfused
from tilefold.plan.targets.cpu import CpuTarget
from tilefold.tensor.ir import Program


def plan(
    function: Annotated[str, typer.Argument(metavar="FILE:FUNCTION", help="a function in a Python file")],
    args: Annotated[str | None, typer.Option(help="what to call it with, as in `tilefold explain`")] = None,
    seed: Annotated[int, typer.Option(help="of the random arguments", min=0, max=2**63 - 1)] = 0,
    machine: Annotated[str, typer.Option(help="this, nominal, h100 or h200 (GPUs are described, not fitted)")] = "this",
) -> None:
    """Which operators share a kernel, predicted bytes and time, and why the best plan without each kernel lost."""
    with friendly("planning"):
        chosen = _machine(machine)
        fn, module = target.load(function)
        program = trace(fn, *target.arguments(fn, module, args, seed=seed)).program
        found = plan_program(program, CpuTarget(chosen), budget=None, rivals=True)
        summary = _summary(program, found)
    console.print(table(found))
    console.print(summary, highlight=False)


def _machine(name: str) -> Machine:
    if name in ("this", "nominal"):
        return this_machine() if name == "this" else nominal()
    known = {"h100": H100, "h200": H200}
    if name not in known:
        raise TilefoldError(f"no machine {name!r}", hint="this, nominal, h100 or h200")
    return known[name]


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


def _summary(program: Program, found: Plan) -> str:
    """Totals, next to greedy fusion and none."""
    rows = [("planned", len(found.kernels), found.seconds, found.nbytes)]
    for name, other in (("greedy", greedy(program, found.target)), ("unfused", unfused(program, found.target))):
        rows.append((name, len(other.kernels), sum(k.variant.seconds for k in other.kernels), moved(other)))
    lines = [f"{n:<8} {k:>4} kernels  {1e3 * s:>9.3f} ms  {b / 1e6:>9.2f} MB" for n, k, s, b in rows]
    s = found.selection
    kind = "no other plan is cheaper" if s.exact else "not all candidates were priced"
    return "\n".join([*lines, f"{s.ideals} ideals, {s.candidates} candidates, {s.priced} priced: {kind}"])
