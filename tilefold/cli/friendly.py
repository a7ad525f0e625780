"""How a command ends when its user made a mistake: the message and exit status 2, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from tilefold.errors import TilefoldError

console = Console()
_stderr = Console(stderr=True)


@contextmanager
def friendly(doing: str | None = None) -> Iterator[None]:
    """Show `doing` as progress while the body runs; turn a TilefoldError into its message and exit status 2."""
    try:
        if doing is None:
            yield
        else:
            with console.status(doing):
                yield
    except TilefoldError as err:
        _stderr.print("[bold red]error:[/] ", end="")
        _stderr.print(str(err), markup=False, highlight=False)
        raise typer.Exit(2) from None
