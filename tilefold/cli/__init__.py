"""The `tilefold` command. Each subcommand calls one library function and prints what it returns."""

from tilefold.cli.application import app, application

__all__ = ["app", "application"]
