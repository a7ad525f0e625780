"""The `tilefold` command. Each subcommand calls one library function and prints what it returns."""

from tilefold.cli.commands import app

__all__ = ["app"]
