"""Where a function is: `FILE:FUNCTION`, looked at before anything is imported that takes seconds."""

from __future__ import annotations

from pathlib import Path

from tilefold.errors import TilefoldError


def split(target: str) -> tuple[Path, str]:
    """The file and the name; TilefoldError where the text is none of that kind, or there is no such file."""
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise TilefoldError(f"not FILE:FUNCTION: {target!r}", hint="for example: model.py:attention")
    path = Path(file)
    if not path.is_file():
        raise TilefoldError(f"not a file: {file}" if path.exists() else f"no such file: {file}")
    return path, name
