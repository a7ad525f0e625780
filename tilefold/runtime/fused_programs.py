"""What an earlier process fused for a GPU, kept on disk: deriving and proving a fold takes longer than reading it.

A file's name is a digest of everything that decides what is in it: the program (with the lines of the user's code that
errors and explanations name), what was asked for, and Tilefold itself, by the sizes and times of its files. Its first
bytes are the checksum of the rest. A file that is not what it should be is made again.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tilefold.plan.gpu as plan
from tilefold import config
from tilefold.block.fuse import Fused
from tilefold.files import put, stamp_of
from tilefold.plan.gpu import Given
from tilefold.tensor.ir import Program
from tilefold.tensor.text import show

PACKAGE = Path(__file__).parents[1]
#: Of the checksum.
_DIGEST = 32


def fused_for_gpu(
    p: Program, apart: frozenset[str] = frozenset(), *, units: int = 132, given: Given | None = None
) -> Fused:
    """`plan.gpu.fuse_for_gpu`, remembered. Nothing is kept of a program that cannot be fused, which raises as there."""
    path = folder() / f"{key_of(p, apart, units, given)}.fused"
    found = _read(path)
    if found is not None:
        return replace(found, program=replace(found.program, name=p.name))
    found = plan.fuse_for_gpu(p, apart, units=units, given=given)
    _write(path, found)
    return found


def folder() -> Path:
    """Where the files are."""
    return config.load().cache_dir / "fused"


def key_of(p: Program, apart: frozenset[str], units: int, given: Given | None) -> str:
    """Name of a program's file. The program's own name, which numbers the graphs of a process, does not count."""
    from_user = [f"{c.loc} {c.origin}" for c in p.body]
    lines = [
        show(replace(p, name="program")),
        *from_user,
        *sorted(apart),
        f"{units} {given!r}",
        stamp(PACKAGE),
        sys.version,
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@lru_cache
def stamp(root: Path) -> str:
    """Digest of the names, sizes and times of change of a package's files."""
    return stamp_of([root], lambda name: name.endswith(".py"))


class _Pickler(pickle.Pickler):
    """Also of read-only mappings."""

    def reducer_override(self, x: object) -> Any:
        return (_read_only, (dict(x),)) if isinstance(x, MappingProxyType) else NotImplemented


def _read_only(x: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(x)


def _read(path: Path) -> Fused | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
        return None
    found = pickle.loads(data[_DIGEST:])
    assert isinstance(found, Fused)
    return found


def _write(path: Path, found: Fused) -> None:
    """By renaming; a directory that cannot be written costs the next process time, nothing else."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(found)
    data = buffer.getvalue()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, hashlib.sha256(data).digest() + data)
    except OSError:
        return
