"""The command line, called as from a shell."""

from __future__ import annotations

from collections.abc import Sequence

from typer.testing import CliRunner, Result

from tilefold.cli import application


def invoke(arguments: Sequence[str], *, input: str | None = None) -> Result:
    """What a command prints, and how it ends."""
    return CliRunner().invoke(application(arguments), list(arguments), input=input)
