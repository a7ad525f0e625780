"""Files that processes share: written whole or not at all, read only where nobody else can have written them.

What is in the cache runs in the user's process, so the rule is that of `ssh` for its keys. A file counts if it is a
plain file (no symbolic link) that only its owner may write, and so does its folder; the owner of both is the user or
root, or with `TILEFOLD_CACHE_SHARED=1` the owner of the cache, whom the user then trusts. Anything else is as good as
absent. New folders have mode 700, new files 600.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from tilefold import config

#: Bits of a mode that let others than the owner write.
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(PermissionError):
    """Somebody else can have written a file or folder; the message says who."""


def cache_folder(name: str) -> Path:
    """A folder of the cache, made if there is none; what others could write in it no longer. OSError: it cannot be
    used, UntrustedError: it belongs to somebody else.
    """
    root = config.load().cache_dir
    for path in (root, root / name):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = _folder(path)
        if found.st_mode & _OTHERS_WRITE:
            os.chmod(path, stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)
    return root / name


def private_folder(path: Path) -> bool:
    """Whether a folder of another cache, and the files in it, are the user's or root's, and only theirs to write. It is
    made where there is none."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [os.lstat(path)]
        if not stat.S_ISDIR(found[0].st_mode):
            return False
        if found[0].st_mode & (stat.S_IXGRP | stat.S_IXOTH):  # else nobody else reaches what is in it
            with os.scandir(path) as inside:
                files = (f for f in inside if not f.is_dir(follow_symlinks=False))
                found += [f.stat(follow_symlinks=False) for f in files]
    except OSError:
        return False
    return not _checks() or all(f.st_uid in (0, os.geteuid()) and not f.st_mode & _OTHERS_WRITE for f in found)


def read_trusted(path: Path) -> bytes:
    """What a file of the cache holds. OSError: there is none, UntrustedError: others can have written it."""
    if _folder(path.parent).st_mode & _OTHERS_WRITE and _checks():
        raise UntrustedError(f"{path.parent} may be written by others")
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as err:
        if path.is_symlink():
            raise UntrustedError(f"{path} is a symbolic link") from err
        raise
    with os.fdopen(handle, "rb") as f:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedError(f"{path} is not a plain file")
        if found.st_mode & _OTHERS_WRITE and _checks():
            raise UntrustedError(f"{path} may be written by others")
        _check_owner(path, found.st_uid)
        return f.read()


def _folder(path: Path) -> os.stat_result:
    """The folder's facts; the root of the cache may be reached through a link, its folders may not."""
    found = os.stat(path) if path == config.load().cache_dir else os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise UntrustedError(f"{path} is a symbolic link")
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    _check_owner(path, found.st_uid)
    return found


def _check_owner(path: Path, uid: int) -> None:
    if not _checks() or uid in (0, os.geteuid()):
        return
    settings = config.load()
    if not settings.shared:
        raise UntrustedError(
            f"{path} belongs to user {uid}; TILEFOLD_CACHE_SHARED=1 trusts the owner of {settings.cache_dir}"
        )
    if uid != os.stat(settings.cache_dir).st_uid:
        raise UntrustedError(f"{path} belongs to user {uid}, who does not own {settings.cache_dir}")


def _checks() -> bool:
    """Whether files have owners that are numbers (not on Windows)."""
    return hasattr(os, "geteuid")


#: Folders that this process has warned of.
_warned: set[Path] = set()


def warn_unusable(where: Path, why: Exception, instead: str) -> None:
    """Say once a process that a folder of the cache cannot be used, and what happens instead."""
    if where in _warned:
        return
    _warned.add(where)
    hint = "Set TILEFOLD_CACHE_DIR to a folder of yours that can be written."
    warnings.warn(f"the cache {where} cannot be used ({why}); {instead}. {hint}", RuntimeWarning, stacklevel=3)


def put(path: Path, data: str | bytes) -> None:
    """Write a file that appears by renaming, so that no other process reads half of it. OSError as for any file, and
    then nothing is left of it.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp")  # of mode 600
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def stamp_of(roots: Iterable[Path], counts: Callable[[str], bool]) -> str:
    """Digest of the paths, sizes and times of change of the files below `roots` whose name counts."""
    lines = []
    for root in roots:
        for folder, _, names in os.walk(root):
            for name in names:
                if counts(name):
                    s = os.stat(f"{folder}/{name}")
                    lines.append(f"{folder}/{name} {s.st_size} {s.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
