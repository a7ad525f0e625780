"""Files of Tilefold's cache among torch's cache artifacts: compiled here, found there.

`torch.compiler.save_cache_artifacts()` gives what the compilations of a process made or found, in one piece of bytes;
`load_cache_artifacts` writes that into the caches of another process, on a machine like this one: plans, compiled
kernels for CPUs, normalised programs, what is fused for GPUs, and the measured machine that the plans are for (GPUs'
machine code is in Triton's cache, which is no part of it). torch knows artifacts of this kind when the back end is
loaded, which `torch.compile(model, backend="tilefold")` does: load artifacts after that line.

Whoever loads artifacts trusts them as the machine code that they are; only names of files of the cache are written.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

from tilefold import config
from tilefold.files import cache_folder, put, read_trusted
from tilefold.log import warn

try:
    from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager
except ImportError:  # a later torch that has moved its registry: nothing is recorded
    CacheArtifactManager = None  # type: ignore[assignment,misc]

TYPE = "tilefold"
#: Files that may be written, below the cache's folder.
_NAME = re.compile(r"machine\.json|(plans|fused|normal|calls)/[0-9a-f]{32}\.\1|kernels/[0-9a-f]{32}\.(so|json)")
_lock = threading.Lock()

if CacheArtifactManager is not None:

    @CacheArtifactFactory.register
    class TilefoldArtifact(CacheArtifact):
        """A file of the cache: its path there, and what it holds."""

        def populate_cache(self) -> None:
            """Write the file, unless there is one. Which may be damaged: its reader notices, and makes it again."""
            if not _NAME.fullmatch(self.key):
                warn("an artifact named %r is no file of Tilefold's cache", self.key)
                return
            folder, _, name = self.key.rpartition("/")
            try:
                path = cache_folder(folder) / name
                if not path.exists():
                    put(path, self.content)
            except OSError as err:
                warn("artifacts cannot be written to %s: %s", config.load().cache_dir, err)

        @staticmethod
        def type() -> str:
            return TYPE


def used(*paths: Path) -> None:
    """Note files of the cache that a compilation wrote or read; others, and what cannot be read, are left out."""
    if CacheArtifactManager is None:
        return
    for path in paths:
        try:
            name = path.relative_to(config.load().cache_dir).as_posix()
            data = read_trusted(path)
        except (OSError, ValueError):
            continue
        if _NAME.fullmatch(name):
            with _lock:  # kernels are loaded by several threads
                CacheArtifactManager.record_artifact(TYPE, name, data)
