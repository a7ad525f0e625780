"""Kernels that an earlier process compiled, found without asking Triton what it would be asked again.

Triton names a compiled kernel by a digest of its own installation, of the assembler's version and of the source.
Reading its 400 MB library and starting the assembler take more than a second in every process. Here a small file per
kernel says which entry of Triton's cache it is. Its name is a digest of all that decides the machine code; Triton's
installation counts by its version and the sizes and times of its files, which is what `make` goes by. The file also
holds the checksum of the machine code: a kernel that Triton's cache has lost half of is removed there and made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilefold import config
from tilefold.files import cache_folder, put, read_trusted, stamp_of, warn_unusable

try:
    import triton
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import CompiledKernel
    from triton.runtime.cache import get_cache_manager
except ImportError:  # without Triton nothing is compiled, another version may have no such cache
    knobs = None

FOLDER = "triton"
#: Of what is done to code while Triton compiles it.
REVISION = "poison 1"
#: A name in Triton's cache.
_HASH = re.compile(r"\w+")
#: Parts of Triton that decide the code.
_PARTS = ("_C", "backends", "compiler", "language", "runtime")


def folder() -> Path:
    """Where sources, and what is known of their kernels, are."""
    return config.load().cache_dir / FOLDER


def keep(name: str, text: str) -> None:
    """Write a file there; a warning, once, where that cannot be."""
    try:
        cache_folder(FOLDER)
        put(folder() / name, text)
    except OSError as err:
        warn_unusable(folder(), err, "kernels of this process are kept in memory, and in Triton's own cache")


@lru_cache
def stamp(root: Path) -> str:
    """Digest of the names, sizes and times of change of the files in these parts of an installation."""
    return stamp_of([root / part for part in _PARTS], lambda n: n.endswith((".py", ".so")) or n.startswith("ptxas"))


def key_of(
    source: str,
    signature: Mapping[str, str],
    vectors: Sequence[tuple[int, int]],
    options: Mapping[str, Any],
    target: Sequence[object],
) -> str | None:
    """Name of a kernel's file; None where Triton was told to do something else than to look into its cache.

    vectors: positions of arguments, and what they are multiples of. target: of the kernel, as text.
    """
    if knobs is None:
        return None
    c = knobs.compilation
    if c.override or c.dump_ir or c.always_compile or c.use_ir_loc or c.listener is not None:
        return None
    told = config.triton_settings()
    parts: list[object] = [
        REVISION,
        source,
        sorted(signature.items()),
        list(vectors),
        sorted(options.items()),
        [str(t) for t in target],
        triton.__version__,
        stamp(Path(triton.__file__).parent),
        told,
        _assemblers(told),
        sorted(get_cache_invalidating_env_vars().items()),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _assemblers(told: Sequence[tuple[str, str]]) -> list[tuple[int, int] | None]:
    """Sizes and times of change of the assemblers that Triton is told of; None of one that is not there, for which it
    takes its own. Inductor names torch's as soon as it compiles a kernel, images of containers CUDA's."""
    found = [shutil.which(path) for name, path in told if name.startswith("TRITON_PTXAS")]
    facts = [None if path is None else os.stat(path) for path in found]
    return [None if s is None else (s.st_size, s.st_mtime_ns) for s in facts]


def find(key: str, src: Any) -> Any | None:
    """The kernel of that name (`src`: what stands for its source); None where Triton's cache has it no more."""
    try:
        entry = json.loads(read_trusted(folder() / f"{key}.known"))
        name, group, code = (str(entry[part]) for part in ("hash", "group", "code"))
        if entry["key"] != key or not _HASH.fullmatch(name) or "/" in group:
            return None
        files = get_cache_manager(name).get_group(group)
        if not files:
            return None
        found = CompiledKernel(src, files, name)
        if _checksum(found) == code:
            return found
    except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return None
    Path(files[group]).unlink(missing_ok=True)  # else Triton would find what is damaged as well
    return None


def exists(key: str) -> bool:
    """Whether a kernel of that name was compiled before."""
    return (folder() / f"{key}.known").exists()


def remember(key: str, done: Any) -> None:
    """Note where Triton keeps a kernel that it compiled."""
    group = f"{done.src.name[:150]}.json"
    keep(f"{key}.known", json.dumps({"key": key, "hash": done.hash, "group": group, "code": _checksum(done)}))


def _checksum(kernel: Any) -> str:
    """Of the machine code."""
    code = kernel.kernel
    return hashlib.sha256(code if isinstance(code, bytes) else str(code).encode()).hexdigest()
