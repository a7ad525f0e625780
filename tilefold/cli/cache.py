"""`tilefold cache`: the compiled kernels on disk."""

from __future__ import annotations

from datetime import datetime

import typer
from rich.markup import escape
from rich.table import Table

from tilefold.cli.friendly import console, friendly, guarded
from tilefold.runtime import cache

app = typer.Typer(help="The compiled kernels kept on disk.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
@guarded
def list_() -> None:
    """The kernels, oldest first."""
    with friendly():
        entries = cache.list_entries()
    table = Table("kernel", "compiled", "KiB", "key")
    for e in entries:
        when = datetime.fromtimestamp(e.created).isoformat(" ", "minutes")
        table.add_row(escape(e.name), when, f"{e.nbytes / 1024:.0f}", e.key[:12])
    if entries:
        console.print(table)
    total = sum(e.nbytes for e in entries) / 2**20
    console.print(f"{_kernels(len(entries))}, {total:.1f} MiB in {cache.folder()}", highlight=False, soft_wrap=True)


@app.command()
@guarded
def clear() -> None:
    """Remove every kernel; they are compiled again when needed."""
    with friendly("removing"):
        removed = cache.clear()
    console.print(f"{_kernels(removed)} removed from {cache.folder()}", highlight=False, soft_wrap=True)


def _kernels(count: int) -> str:
    return f"{count} kernel" if count == 1 else f"{count} kernels"
