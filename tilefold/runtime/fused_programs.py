"""What an earlier process fused for a GPU, kept on disk: deriving and proving a fold takes longer than reading it.

A file's name is a digest of everything that decides what is in it: the program (with the lines of the user's code that
errors and explanations name), what was asked for, and Tilefold itself, by the sizes and times of its files. Its first
characters are the checksum of the rest, which is JSON (`records`): reading it runs nothing. A file that is not what it
should be, or that others can have written, is made again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import tilefold.plan.gpu as plan
from tilefold import config
from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Index, Load, Size, Sym
from tilefold.algebra.fold import Check, Fold, StateVar, Step
from tilefold.block.fuse import Fused, FusedKernel
from tilefold.block.group import Group, Grouping, Refusal
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Result, Store, Update
from tilefold.block.stages import Rejection, Stage, StagePlan
from tilefold.block.verify import verify
from tilefold.errors import ParseError, SourceLoc, VerifyError
from tilefold.files import cache_folder, put, read_trusted, stamp_of, warn_unusable
from tilefold.plan.gpu import Given, Refuse
from tilefold.runtime import records
from tilefold.tensor.ir import Compute, Input, Program
from tilefold.tensor.text import show

PACKAGE = Path(__file__).parents[1]
FOLDER = "fused"
#: Characters of the checksum.
_DIGEST = 64
#: All that a file may hold.
_CLASSES = (
    *(Fused, FusedKernel, Grouping, Group, Refusal, StagePlan, Stage, Rejection, SourceLoc),
    *(Program, Input, Compute, Cascade, Reduction, Fold, StateVar, Step, Check),
    *(Block, Loop, Let, Init, Update, Accumulate, Store, Result),
    *(Const, Index, Size, Sym, Load, Call, Cast, DType),
)


def fused_for_gpu(
    p: Program,
    *,
    units: int = 132,
    given: Given | None = None,
    calls: Collection[tuple[str, ...]] = (),
    refuse: Refuse | None = None,
) -> Fused:
    """`plan.gpu.fuse_for_gpu`, remembered. Nothing is kept of a program that cannot be fused, which raises as there.

    refuse: the same function of kernels in all processes, or none.
    """
    path = folder() / f"{key_of(p, calls, units, given, refuse is not None)}.fused"
    found = _read(path)
    if found is not None:
        return replace(found, program=replace(found.program, name=p.name))
    found = plan.fuse_for_gpu(p, units=units, given=given, calls=calls, refuse=refuse)
    _write(path, found)
    return found


def folder() -> Path:
    """Where the files are."""
    return config.load().cache_dir / FOLDER


def key_of(p: Program, calls: Collection[tuple[str, ...]], units: int, given: Given | None, refusing: bool) -> str:
    """Name of a program's file. The program's own name, which numbers the graphs of a process, does not count."""
    from_user = [f"{c.loc} {c.origin}" for c in p.body]
    lines = [
        show(replace(p, name="program")),
        *from_user,
        *map(str, sorted(calls)),
        f"{units} {given!r} {refusing}",
        stamp(PACKAGE),
        sys.version,
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@lru_cache
def stamp(root: Path) -> str:
    """Digest of the names, sizes and times of change of a package's files."""
    return stamp_of([root], lambda name: name.endswith(".py"))


def _read(path: Path) -> Fused | None:
    """What a file holds; None where it is not there, not whole, not ours, or not a sound program."""
    try:
        data = read_trusted(path)
        if data[:_DIGEST].decode() != _checksum(path, data[_DIGEST:]):
            return None
        found = records.load(data[_DIGEST:], _CLASSES)
        if not isinstance(found, Fused):
            return None
        for k in found.kernels:
            verify(k.block)
    except (OSError, ValueError, ParseError, VerifyError):
        return None
    return found


def _write(path: Path, found: Fused) -> None:
    """By renaming; a directory that cannot be written costs the next process time, nothing else."""
    try:
        data = records.dump(found).encode()
        cache_folder(FOLDER)
        put(path, _checksum(path, data).encode() + data)
    except RecursionError:  # an expression deeper than Python's stack is made again
        return
    except OSError as err:
        warn_unusable(folder(), err, "every process fuses its programs anew")


def _checksum(path: Path, data: bytes) -> str:
    """Of a file's name and content, so that a file under another's name is no sound one."""
    return hashlib.sha256(path.stem.encode() + data).hexdigest()
