"""A hook of mkdocs: the parts of the reference that the code itself says, where a page asks for them.

`<!-- made: environment -->` becomes the table of `tilefold.config`, `<!-- made: commands -->` the commands and their
options, as typer has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from tilefold import config
from tilefold.cli.application import COMMANDS, loaded


def environment() -> str:
    """The table of variables in the docstring of `tilefold.config`."""
    assert config.__doc__
    return "\n".join(line for line in config.__doc__.splitlines() if line.startswith("|"))


def commands() -> str:
    """Every command with its arguments and options."""
    return "\n".join(line for name, (place, _) in COMMANDS.items() for line in _command(name, place))


def _command(name: str, place: str) -> Iterator[str]:
    found = loaded(place)
    app = found if isinstance(found, typer.Typer) else typer.Typer(add_completion=False)
    if not isinstance(found, typer.Typer):
        app.command(name)(found)
    made: Any = typer.main.get_command(app)
    inner = getattr(made, "commands", None)
    if inner is None:
        yield from _page(f"tilefold {name}", made)
        return
    for part, command in inner.items():
        yield from _page(f"tilefold {name} {part}", command)


def _page(title: str, command: Any) -> Iterator[str]:
    taken = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    arguments = [p.metavar or p.name.upper() for p in taken if p.param_type_name == "argument"]
    yield f"\n## {title}\n\n```\n{' '.join([title, *arguments, '[OPTIONS]'])}\n```\n\n{command.help or ''}\n"
    rows = [p for p in taken if getattr(p, "help", None)]
    if rows:
        yield "| | | default |\n|---|---|---|"
    for p in rows:
        name = ", ".join(p.opts) if p.param_type_name != "argument" else (p.metavar or p.name.upper())
        default = "" if p.default is None or callable(p.default) else f"`{p.default}`"
        yield f"| `{name}` | {_cell(p.help)} | {default} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def on_page_markdown(markdown: str, **_: object) -> str:
    """What mkdocs calls for each page."""
    for name, made in (("environment", environment), ("commands", commands)):
        mark = f"<!-- made: {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown
