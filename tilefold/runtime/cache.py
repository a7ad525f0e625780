"""Compiled kernels on disk, shared by processes.

An entry is a library `<key>.so` beside `<key>.json`, which names what it is and carries the
library's checksum. The key is a digest of everything that decides the machine code: source,
compiler, flags, CPU, headers, Tilefold's version. Files appear by renaming, writers of one key take
turns by a lock, and an entry whose checksum is wrong, or that others can have written, is built
again (`files`). Where the directory cannot be written, or the disk is full, entries go to a temporary
directory of the process, or to memory, with one warning.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from tilefold import artifacts, config
from tilefold.errors import CacheError, NoRoomError
from tilefold.files import cache_folder, put, read_trusted, warn_unusable
from tilefold.version import version

LOCK_TIMEOUT_S = 600
ROOM = "name a folder with room in TMPDIR"
#: Format of entries; part of every key.
FORMAT = "1"
FOLDER = "kernels"

#: Where a process has its own files: among its temporary ones, or where those have no room, in memory.
PLACES = (None, "/dev/shm")
#: Folders for the kernels of this process alone, by their place.
_apart: dict[str | None, tempfile.TemporaryDirectory[str]] = {}


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


def folder() -> Path:
    """Where entries are: a directory of the configured cache."""
    return config.load().cache_dir / FOLDER


def get_or_build(name: str, parts: Mapping[str, str], build: Callable[[Path], None]) -> Path:
    """The library of `parts`, built by `build(path)` if there is no sound entry.

    `name` is for people. Parts of more than a line are kept in the entry as digests. Errors of
    `build` pass through and leave no entry.
    """
    library = _found_or_built(name, parts, build)
    artifacts.used(library, library.with_suffix(".json"))
    return library


def _found_or_built(name: str, parts: Mapping[str, str], build: Callable[[Path], None]) -> Path:
    key, found = key_of(parts), find(parts)
    if found is not None:
        return found
    try:
        where = cache_folder(FOLDER)
        lock = FileLock(where / f"{key}.lock", timeout=LOCK_TIMEOUT_S, mode=0o600)
        lock.acquire()
    except Timeout:
        raise CacheError(
            f"waited {LOCK_TIMEOUT_S} s for another process to compile {name}",
            hint=f"remove {where / f'{key}.lock'} if no such process is alive",
        ) from None
    except OSError as err:
        return _stored_apart(err, *_built(key, name, parts, build))
    try:
        found = _sound(where, key)  # another process may have built it meanwhile
        if found is not None:
            return found
        done = _built(key, name, parts, build)
        try:
            return _stored(where, *done)
        except OSError as err:
            return _stored_apart(err, *done)
    finally:
        lock.release()


def find(parts: Mapping[str, str]) -> Path | None:
    """The library of `parts` if there is a sound entry."""
    places = (folder(), *(Path(t.name) for t in _apart.values()))
    return next((p for where in places if (p := _sound(where, key_of(parts))) is not None), None)


def _built(key: str, name: str, parts: Mapping[str, str], build: Callable[[Path], None]) -> tuple[Entry, bytes]:
    why: Exception | None = None
    for place in PLACES:
        try:
            with tempfile.TemporaryDirectory(prefix="tilefold-", dir=place) as made:
                build(Path(made) / "kernel.so")
                data = (Path(made) / "kernel.so").read_bytes()
            break
        except (OSError, NoRoomError) as err:
            why = why or err
    else:
        raise why if isinstance(why, NoRoomError) else NoRoomError(f"nothing can be compiled: {why}", hint=ROOM)
    short = {k: v if "\n" not in v else hashlib.sha256(v.encode()).hexdigest() for k, v in parts.items()}
    return Entry(key, name, time.time(), len(data), hashlib.sha256(data).hexdigest(), short), data


def _stored(where: Path, entry: Entry, data: bytes) -> Path:
    """Write an entry. Where its second file does not fit on the disk, the first does not stay."""
    library = where / f"{entry.key}.so"
    put(library, data)
    try:
        put(where / f"{entry.key}.json", json.dumps(asdict(entry), indent=1))
    except OSError:
        library.unlink(missing_ok=True)
        raise
    return library


def _read(path: Path) -> Entry | None:
    """The entry that a metadata file describes; None where it cannot be read or is not one."""
    try:
        entry = Entry(**json.loads(read_trusted(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    texts = (entry.key, entry.name, entry.sha256)
    numbers = (entry.created, entry.nbytes)
    sound = all(isinstance(t, str) for t in texts) and all(isinstance(n, int | float) for n in numbers)
    return entry if sound and entry.key == path.stem else None


def _sound(where: Path, key: str) -> Path | None:
    """The library of `key` if it is there, whole and unchanged."""
    entry = _read(where / f"{key}.json")
    library = where / f"{key}.so"
    try:
        data = read_trusted(library) if entry is not None else b""
    except OSError:
        return None
    return library if entry is not None and hashlib.sha256(data).hexdigest() == entry.sha256 else None


def _stored_apart(why: OSError, entry: Entry, data: bytes) -> Path:
    """An entry for this process alone. NoRoomError: no place takes it."""
    warn_unusable(folder(), why, "kernels of this process are compiled into a temporary directory")
    for place in PLACES:
        try:
            if place not in _apart:
                _apart[place] = tempfile.TemporaryDirectory(prefix="tilefold-cache-", dir=place)
            return _stored(Path(_apart[place].name), entry, data)
        except OSError as err:
            why = err
    raise NoRoomError(f"a compiled kernel cannot be kept: {why}", hint=ROOM)


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
    "plans": (".plans", ".tmp"),
    "normal": (".normal", ".tmp"),
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
