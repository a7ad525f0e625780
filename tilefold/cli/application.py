"""The command line as a whole: which commands there are, and the loading of the one that is called.

The commands need torch, which takes seconds to load; their names and what they are for do not.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from typing import Annotated

import typer

from tilefold.cli.friendly import console, friendly, guarded
from tilefold.cli.place import split
from tilefold.version import version

#: Name -> where its function (or group of commands) is, and the first line of its help.
COMMANDS = {
    "run": ("commands:run", "Embed the lines of a text file with a pretrained encoder compiled by Tilefold."),
    "explain": ("commands:explain", "What is fused in a function, why, and what it saves."),
    "verify": (
        "commands:verify",
        "Compare a compiled function, or a suite, with float64; status 1 if anything is less right than eager.",
    ),
    "derive": (
        "commands:derive",
        'Derive the fold of a cascade, such as "m = max[l] x[l]; t = sum[l] exp(x[l] - m)".',
    ),
    "plan": (
        "plan:plan",
        "Which operators share a kernel, predicted bytes and time, and why the best plan without each kernel lost.",
    ),
    "bench": (
        "bench:bench",
        "Time Tilefold next to eager, torch.compile and library kernels, the contenders taking turns.",
    ),
    "tune": ("tune:tune", "Time configurations of a function's GPU kernels and keep the best; needs a CUDA device."),
    "doctor": ("commands:doctor", "What this machine can run, and why not."),
    "cache": ("cache:app", "The compiled kernels kept on disk."),
}

#: Commands whose first argument is FILE:FUNCTION, with the words that may stand in its place.
OF_FUNCTIONS: dict[str, tuple[str, ...]] = {"explain": (), "verify": (), "plan": (), "tune": ("library",)}


def application(arguments: Sequence[str]) -> typer.Typer:
    """The application. The command that `arguments` call is loaded, the others are names with a line of help."""
    typed = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # brackets of index notation are no markup
    )
    typed.callback()(tilefold)
    called = next((a for a in arguments if not a.startswith("-")), None)
    for name, (place, line) in COMMANDS.items():
        if name != called:
            typed.command(name, help=line)(_not_loaded)
            continue
        found = loaded(place)
        if isinstance(found, typer.Typer):
            typed.add_typer(found, name=name)
        else:
            typed.command(name)(guarded(found))
    return typed


def loaded(place: str) -> Callable[..., None] | typer.Typer:
    """The function or group of `module:name`, a module of this package."""
    module, _, name = place.partition(":")
    found: Callable[..., None] | typer.Typer = getattr(import_module(f"tilefold.cli.{module}"), name)
    return found


def app() -> None:
    """The console script."""
    arguments = sys.argv[1:]
    try:
        with friendly():
            look_early(arguments)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    application(arguments)()


def look_early(arguments: Sequence[str]) -> None:
    """TilefoldError for a function whose file is not there: said at once, not after seconds of imports.

    The word behind a command's name is its first argument where it is no option; other words may be options' values.
    """
    match arguments:
        case [name, word, *rest] if name in OF_FUNCTIONS and not word.startswith("-") and "--help" not in rest:
            if word not in OF_FUNCTIONS[name]:
                split(word)


def _not_loaded() -> None:
    """Stands for a command that is not called."""
    raise AssertionError("a command that is called is loaded")


def _version(wanted: bool) -> None:
    if wanted:
        torch = metadata.version("torch")
        text = f"tilefold {version()} (torch {torch}, Python {platform.python_version()})"
        console.print(text, highlight=False)
        raise typer.Exit


def tilefold(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Tilefold: fused kernels for PyTorch, derived as folds."""
