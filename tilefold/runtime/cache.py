"""Compiled kernels on disk, shared by processes.

An entry is a library `<key>.so` beside `<key>.json`, which names what it is and carries the
library's checksum. The key is a digest of everything that decides the machine code: source,
compiler, flags, CPU, headers, Tilefold's version. Files appear by renaming, writers of one key take
turns by a lock, and an entry whose checksum is wrong is built again. Where the directory cannot
be written, entries go to a temporary directory of the process, with one warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from filelock import FileLock, Timeout

from tilefold import config
from tilefold.errors import CacheError
from tilefold.files import put

LOCK_TIMEOUT_S = 600
#: Format of entries; part of every key.
FORMAT = "1"

_fallback: list[tempfile.TemporaryDirectory[str]] = []


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached kernel. `created` is in seconds since 1970, `nbytes` the library's size."""

    key: str
    name: str
    created: float
    nbytes: int
    sha256: str
    parts: Mapping[str, str]


def key_of(parts: Mapping[str, str]) -> str:
    """Digest of the parts (any order) with Tilefold's version and the entry format."""
    everything = {**parts, "tilefold": version(), "format": FORMAT}
    text = json.dumps(everything, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def version() -> str:
    """Tilefold's installed version."""
    try:
        return metadata.version("tilefold")
    except metadata.PackageNotFoundError:
        return "source"


def folder() -> Path:
    """Where entries are: a directory of the configured cache."""
    return config.load().cache_dir / "kernels"


def get_or_build(name: str, parts: Mapping[str, str], build: Callable[[Path], None]) -> Path:
    """The library of `parts`, built by `build(path)` if there is no sound entry.

    `name` is for people. Parts of more than a line are kept in the entry as digests. Errors of
    `build` pass through and leave no entry.
    """
    key = key_of(parts)
    where = folder()
    found = _sound(where, key)
    if found is not None:
        return found
    try:
        return _locked_build(where, key, name, parts, build)
    except OSError as err:
        return _without_cache(where, err, key, name, parts, build)


def _locked_build(where: Path, key: str, name: str, parts: Mapping[str, str], build: Callable[[Path], None]) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(where / f"{key}.lock", timeout=LOCK_TIMEOUT_S):
            found = _sound(where, key)  # another process may have built it meanwhile
            return found if found is not None else _build(where, key, name, parts, build)
    except Timeout:
        raise CacheError(
            f"waited {LOCK_TIMEOUT_S} s for another process to compile {name}",
            hint=f"remove {where / f'{key}.lock'} if no such process is alive",
        ) from None


def _build(where: Path, key: str, name: str, parts: Mapping[str, str], build: Callable[[Path], None]) -> Path:
    handle, path = tempfile.mkstemp(dir=where, prefix=f"{key}.", suffix=".tmp")
    os.close(handle)
    partial = Path(path)
    try:
        build(partial)
        data = partial.read_bytes()
        short = {k: v if "\n" not in v else hashlib.sha256(v.encode()).hexdigest() for k, v in parts.items()}
        entry = Entry(key, name, time.time(), len(data), hashlib.sha256(data).hexdigest(), short)
        library = where / f"{key}.so"
        os.replace(partial, library)
        put(where / f"{key}.json", json.dumps(asdict(entry), indent=1))
        return library
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path) -> Entry | None:
    """The entry that a metadata file describes; None where it cannot be read or is not one."""
    try:
        return Entry(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _sound(where: Path, key: str) -> Path | None:
    """The library of `key` if it is there, whole and unchanged."""
    entry = _read(where / f"{key}.json")
    library = where / f"{key}.so"
    try:
        data = library.read_bytes() if entry is not None else b""
    except OSError:
        return None
    return library if entry is not None and hashlib.sha256(data).hexdigest() == entry.sha256 else None


def _without_cache(
    where: Path, why: OSError, key: str, name: str, parts: Mapping[str, str], build: Callable[[Path], None]
) -> Path:
    if not _fallback:
        warnings.warn(
            f"the kernel cache {where} cannot be written ({why}); kernels of this process are compiled into a "
            "temporary directory. Set TILEFOLD_CACHE_DIR to a writable directory.",
            RuntimeWarning,
            stacklevel=3,
        )
        _fallback.append(tempfile.TemporaryDirectory(prefix="tilefold-cache-"))
    temporary = Path(_fallback[0].name)
    found = _sound(temporary, key)
    return found if found is not None else _build(temporary, key, name, parts, build)


def list_entries() -> tuple[Entry, ...]:
    """The readable entries, oldest first."""
    where = folder()
    try:
        files = sorted(where.glob("*.json"))
    except OSError:
        return ()
    return tuple(sorted((e for f in files if (e := _read(f)) is not None), key=lambda e: e.created))


#: Files of the cache by directory. GPU kernels themselves are in Triton's cache; here are sources and what is known.
_FILES = {
    "kernels": (".json", ".so", ".tmp", ".lock"),
    "triton": (".py", ".known", ".tmp"),
    "fused": (".fused", ".tmp"),
}


def clear() -> int:
    """Remove every entry; how many kernels there were. CacheError if files cannot be removed."""
    where, removed = folder().parent, 0
    try:
        for path in [p for name, ends in _FILES.items() for end in ends for p in (where / name).glob(f"*{end}")]:
            path.unlink(missing_ok=True)
            removed += path.suffix in (".so", ".known")
    except OSError as err:
        raise CacheError(f"cannot clear {where}: {err}") from None
    return removed
