"""Kernels that an earlier process compiled, found without asking Triton what it would be asked again.

Triton names a compiled kernel by a digest of its own installation, of the assembler's version and of the source.
Reading its 400 MB library and starting the assembler take more than a second in every process. Here a small file per
kernel says which entry of Triton's cache it is. Its name is a digest of all that decides the machine code; Triton's
installation counts by its version and the sizes and times of its files, which is what `make` goes by.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilefold import config
from tilefold.errors import BackendError
from tilefold.files import put, stamp_of

try:
    import triton
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import CompiledKernel
    from triton.runtime.cache import get_cache_manager
except ImportError:  # without Triton nothing is compiled, another version may have no such cache
    knobs = None

#: Parts of Triton that decide the code.
_PARTS = ("_C", "backends", "compiler", "language", "runtime")


def folder() -> Path:
    """Where sources, and what is known of their kernels, are; BackendError where it cannot be made."""
    path = config.load().cache_dir / "triton"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise BackendError(f"{path} cannot be made: {err}") from None
    return path


@lru_cache
def stamp(root: Path) -> str:
    """Digest of the names, sizes and times of change of the files in these parts of an installation."""
    return stamp_of([root / part for part in _PARTS], lambda n: n.endswith((".py", ".so")) or n.startswith("ptxas"))


def key_of(
    source: str,
    signature: Mapping[str, str],
    divisible: Sequence[int],
    options: Mapping[str, Any],
    target: Sequence[object],
) -> str | None:
    """Name of a kernel's file; None where Triton was told to do something else than to look into its cache.

    divisible: positions of arguments. target: of the kernel, as text.
    """
    if knobs is None:
        return None
    c = knobs.compilation
    if c.override or c.dump_ir or c.always_compile or c.use_ir_loc or c.listener is not None:
        return None
    told = config.triton_settings()
    if any(name.startswith("TRITON_PTXAS") for name, _ in told):
        return None  # an assembler of the user's own, which may change
    parts: list[object] = [
        source,
        sorted(signature.items()),
        list(divisible),
        sorted(options.items()),
        [str(t) for t in target],
        triton.__version__,
        stamp(Path(triton.__file__).parent),
        told,
        sorted(get_cache_invalidating_env_vars().items()),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def find(key: str, src: Any) -> Any | None:
    """The kernel of that name (`src`: Triton's form of its source); None where Triton's cache has it no more."""
    try:
        entry = json.loads((folder() / f"{key}.known").read_text())
        group = get_cache_manager(entry["hash"]).get_group(entry["group"])
        return CompiledKernel(src, group, entry["hash"]) if group else None
    except (OSError, ValueError, KeyError, TypeError, StopIteration, BackendError):
        return None


def exists(key: str) -> bool:
    """Whether a kernel of that name was compiled before."""
    try:
        return (folder() / f"{key}.known").exists()
    except BackendError:
        return False


def remember(key: str, done: Any) -> None:
    """Note where Triton keeps a kernel that it compiled; nothing where that cannot be written."""
    text = json.dumps({"hash": done.hash, "group": f"{done.src.name[:150]}.json"})
    try:
        put(folder() / f"{key}.known", text)
    except (OSError, BackendError):
        return
