"""Tuned configurations, by program, shape bin, device and toolchain.

A table is a JSON file that can be shared: `{device: {toolchain: {key: {config, microseconds, note}}}}`.
The key is a digest of the kernel's block program without its sizes, and the power of two that each
size is below. Any configuration is right for any size, so a bin that fits badly costs time, never
correctness. The user's own table (in the cache directory) goes before the shipped ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilefold import config
from tilefold.backends.triton.config import TritonConfig
from tilefold.block.ir import Block
from tilefold.block.text import show_nodes
from tilefold.tile.pieces import power_of_two

#: Steps of doubling between the bins of a dim at which kernels may share a configuration.
NEAR = 2
SHIPPED = Path(__file__).parent.parent / "tables"


@dataclass(frozen=True, slots=True)
class Tuned:
    """A winner: microseconds that a call took when it won, against those of the default."""

    config: TritonConfig
    microseconds: float
    default_microseconds: float
    note: str = ""


def _parsed(key: str) -> tuple[str, dict[str, int]]:
    name, *bins = key.split(" ")
    return name, {b.rstrip("0123456789"): int(b[len(b.rstrip("0123456789")) :]) for b in bins if b}


def structure(block: Block) -> str:
    """Digest of what a kernel computes, whatever its sizes."""
    kinds = [f"{i.dtype.value}{len(i.shape)}" for i in block.inputs]
    outs = [f"{r.dtype.value}{','.join(r.dims)}" for r in block.results]
    return hashlib.sha256("\n".join([*kinds, *outs, *show_nodes(block.body)]).encode()).hexdigest()[:16]


def key_of(block: Block, sizes: Mapping[str, int]) -> str:
    """Key of a kernel at these extents."""
    return structure(block) + " " + " ".join(f"{d}{power_of_two(n)}" for d, n in sorted(sizes.items()))


def to_json(c: TritonConfig) -> dict[str, Any]:
    """A configuration as plain data; what has its default value is left out."""
    plain = TritonConfig()
    data: dict[str, Any] = {"tiles": dict(c.tiles)}
    for name in ("lanes", "warps", "stages", "descriptors", "specialize", "registers"):
        value = getattr(c, name)
        if value != getattr(plain, name):
            data[name] = dict(value) if name == "lanes" else value
    return data


def from_json(data: Mapping[str, Any]) -> TritonConfig:
    """The converse of `to_json`; TypeError for unknown fields."""
    return TritonConfig(**data)


class Table:
    """Tables of one device and toolchain; `find` is a dictionary lookup."""

    def __init__(self, device: str, toolchain: str):
        self.device, self.toolchain = device, toolchain
        self._entries: dict[str, TritonConfig] = {}
        self._found: dict[str, TritonConfig | None] = {}
        shipped = sorted(SHIPPED.glob("*.json"), key=lambda p: p.stem == device.lower().replace(" ", "-"))
        for path in (*shipped, user_file()):
            self._entries |= {k: from_json(e["config"]) for k, e in self._read(path).items()}

    def _read(self, path: Path) -> dict[str, Any]:
        """Entries of a file; those of this device and toolchain go before others', which are better than none."""
        try:
            data = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            return {}
        entries: dict[str, Any] = {}
        for _, by_tool in sorted(data.items(), key=lambda t: t[0] == self.device):
            for _, found in sorted(by_tool.items(), key=lambda t: t[0] == self.toolchain):
                entries |= found
        return entries

    def find(self, key: str) -> TritonConfig | None:
        """The configuration for a key, or that of the nearest bin of the same kernel (None: none is near)."""
        if key not in self._found:
            self._found[key] = self._entries.get(key) or self._near(key)
        return self._found[key]

    def exact(self, key: str) -> bool:
        """Whether this very bin was tuned."""
        return key in self._entries

    def _near(self, key: str) -> TritonConfig | None:
        name, bins = _parsed(key)
        best: tuple[int, TritonConfig] | None = None
        for other, config_ in self._entries.items():
            if not other.startswith(name):
                continue
            _, theirs = _parsed(other)
            if theirs.keys() != bins.keys():
                continue
            steps = [abs(theirs[d].bit_length() - n.bit_length()) for d, n in bins.items()]
            if max(steps, default=0) <= NEAR and (best is None or sum(steps) < best[0]):
                best = (sum(steps), config_)
        return None if best is None else best[1]

    def add(self, key: str, tuned: Tuned) -> None:
        """Remember a winner, also on disk (written by renaming; the last of two writers wins)."""
        self._entries[key] = tuned.config
        self._found.clear()
        path = user_file()
        try:
            data = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            data = {}
        data.setdefault(self.device, {}).setdefault(self.toolchain, {})[key] = {
            "config": to_json(tuned.config),
            "microseconds": round(tuned.microseconds, 2),
            "default": round(tuned.default_microseconds, 2),
            "note": tuned.note,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as f:
            json.dump(data, f, indent=1, sort_keys=True)
        os.replace(f.name, path)


def user_file() -> Path:
    """The user's own table."""
    return config.load().cache_dir / "tuned.json"
