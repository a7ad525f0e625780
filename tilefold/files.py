"""Files that processes share: written whole or not at all, and installations told apart without reading them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path


def put(path: Path, data: str | bytes) -> None:
    """Write a file that appears by renaming, so that no other process reads half of it. OSError as for any file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp", delete=False) as f:
        f.write(data.encode() if isinstance(data, str) else data)
    os.replace(f.name, path)


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
