"""What an earlier process worked out, kept on disk as records: making it takes longer than reading it.

A file's name is a digest of everything that decides what is in it, Tilefold's own source among that. Its first
characters are the checksum of the name and the rest, which is JSON (`records`): reading it runs nothing. A file that is
not what it should be, or that others can have written, is made again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from tilefold import artifacts, config
from tilefold.errors import ParseError, VerifyError
from tilefold.files import cache_folder, put, read_trusted, warn_unusable
from tilefold.runtime import records
from tilefold.tensor.ir import Program
from tilefold.tensor.text import show

PACKAGE = Path(__file__).parents[1]
#: Characters of the checksum.
DIGEST = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shelf:
    """A folder of the cache, the ending of its files' names, and what a process does that cannot write there."""

    name: str
    instead: str

    def folder(self) -> Path:
        """Where the files are."""
        return config.load().cache_dir / self.name

    def path(self, lines: Iterable[str]) -> Path:
        """The file of what these lines of text decide, together with Tilefold and Python."""
        text = "\n".join([*lines, stamp(PACKAGE), sys.version])
        return self.folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.{self.name}"

    def read(self, path: Path, made: type[T], classes: Iterable[type], verify: Callable[[T], None]) -> T | None:
        """What a file holds; None where it is not there, not whole, not ours, no `made`, or `verify` raises.

        classes: all that it may hold. verify: VerifyError or ValueError for what is not sound.
        """
        try:
            data = read_trusted(path)
            if data[:DIGEST].decode() != checksum(path, data[DIGEST:]):
                return None
            found = records.load(data[DIGEST:], classes)
            if not isinstance(found, made):
                return None
            verify(found)
        except (OSError, ValueError, ParseError, VerifyError):
            return None
        artifacts.used(path)
        return found

    def write(self, path: Path, found: object) -> None:
        """By renaming; a directory that cannot be written costs the next process time, nothing else."""
        try:
            data = records.dump(found).encode()
            cache_folder(self.name)
            put(path, checksum(path, data).encode() + data)
            artifacts.used(path)
        except RecursionError:  # an expression deeper than Python's stack is made again
            return
        except OSError as err:
            warn_unusable(self.folder(), err, self.instead)


def lines_of(p: Program) -> list[str]:
    """What is kept of a program depends on: its text, and the user's lines. Its own name, which numbers the graphs of a
    process, does not count."""
    return [show(replace(p, name="program")), *(f"{c.loc} {c.origin}" for c in p.body)]


@lru_cache
def stamp(root: Path) -> str:
    """Digest of the names and the text of a package's modules: the same wherever it is installed."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def checksum(path: Path, data: bytes) -> str:
    """Of a file's name and content, so that a file under another's name is no sound one."""
    return hashlib.sha256(path.stem.encode() + data).hexdigest()
