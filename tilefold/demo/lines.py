"""The sentences of a text file: one a line, without Markdown's marks."""

from __future__ import annotations

import re
from pathlib import Path

from tilefold.errors import TilefoldError

MIN_WORDS = 4
_MARKS = re.compile(r"^[\s>#|*+-]+|[`*|]+|(?<!\w)_+|_+(?!\w)")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def sentences(text: str) -> tuple[str, ...]:
    """Lines of at least `MIN_WORDS` words, in order, each once; fenced code and table rules are left out."""
    found: dict[str, None] = {}
    fenced = False
    for raw in text.splitlines():
        if raw.lstrip().startswith("```"):
            fenced = not fenced
            continue
        line = " ".join(_MARKS.sub("", _LINK.sub(r"\1", raw)).split())
        if not fenced and len(re.findall(r"[^\W\d_]{2,}", line)) >= MIN_WORDS:
            found[line] = None
    return tuple(found)


def read(path: Path) -> tuple[str, ...]:
    """The sentences of a UTF-8 file; TilefoldError if it cannot be read or holds fewer than two."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as err:
        raise TilefoldError(f"cannot read {path}: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise TilefoldError(f"{path} is not UTF-8 text: {err.reason} at byte {err.start}") from err
    found = sentences(text)
    if len(found) < 2:
        raise TilefoldError(
            f"{path} holds {len(found)} usable line(s); nearest neighbours need at least two",
            hint=f"a usable line has at least {MIN_WORDS} words and stands outside code fences",
        )
    return found
