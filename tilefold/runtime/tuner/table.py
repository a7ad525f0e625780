"""Tuned configurations, by program, shape bin, device and toolchain.

A table is a JSON file that can be shared: `{device: {toolchain: {key: {config, microseconds, note}}}}`.
The key is a digest of the kernel's block program without its sizes and what follows from them (`structure`), and the
power of two that each size is below. Any configuration is right for any kernel, so an entry that fits badly costs
time, never correctness. Entries of the device itself go before those of its kin, the user's own (in the cache
directory) before the shipped; those of other devices are not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilefold import config
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Sym, transform
from tilefold.backends.triton.config import TritonConfig
from tilefold.block.canonical import Renamer
from tilefold.block.ir import Block, Init, Let, Node, walk
from tilefold.block.text import show_nodes
from tilefold.files import UntrustedError, cache_folder, put, read_trusted, warn_unusable
from tilefold.tile.pieces import power_of_two

#: Steps of doubling between the bins of a dim at which kernels may share a configuration.
NEAR = 2
#: Devices that differ in memory and clocks alone: configurations of one are a good start on the others.
KIN = (frozenset({"NVIDIA H100", "NVIDIA H200", "NVIDIA H800", "NVIDIA GH200"}),)
SHIPPED = Path(__file__).parent.parent / "tables"
#: Of a thread block.
_MOST_WARPS = 32
#: Elements of a tensor of Triton's (its TRITON_MAX_TENSOR_NUMEL), and registers that a thread can name (PTX).
_MOST_ELEMENTS, _MOST_REGISTERS = 1 << 20, 255
#: Device -> toolchain -> key -> entry.
Tables = dict[str, dict[str, dict[str, dict[str, Any]]]]


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
    """Digest of what a kernel computes, whatever its sizes.

    Numbers that follow from sizes do not count: those in the bounds of loops (segments) and beside indices (offsets of
    a causal mask, starts of the steps of a split product); nor do factors (scales of heads, caps), which decide no
    tile. What divides an index counts: heads that share keys are packed by it.
    """
    kinds = [f"{i.dtype.value}{len(i.shape)}" for i in block.inputs]
    outs = [f"{r.dtype.value}{','.join(r.dims)}" for r in block.results]
    body = _WithoutSizes(block).nodes(block.body)
    return hashlib.sha256("\n".join([*kinds, *outs, *show_nodes(body)]).encode()).hexdigest()[:16]


#: Stands for a number that does not count.
_ANY = Sym("number")
#: Factors that say what is computed.
_PLAIN = frozenset({"0.0", "1.0", "-1.0", "inf", "-inf", "nan"})


class _WithoutSizes(Renamer):
    """Puts `number` for what follows from sizes; names stay."""

    def __init__(self, block: Block):
        names = [n for x in walk(block.body) for n in _names(x)]
        tensors = [*(i.name for i in block.inputs), *(r.name for r in block.results)]
        super().__init__({d: d for d in block.sizes}, {}, {n: n for n in (*tensors, *names)})
        self._extents = {d: e.value for d, e in block.sizes.items() if isinstance(e, Const)}

    def expr(self, e: Expr) -> Expr:
        return transform(e, self._one)

    def some(self, e: Expr | None) -> Expr | None:
        return None if e is None else transform(e, lambda x: _ANY if isinstance(x, Const) else None)

    def _one(self, e: Expr) -> Expr | None:
        match e:
            case Const(value, dtype) if dtype.is_float and repr(float(value)) not in _PLAIN:
                return _ANY
            case Call("add" | "sub" as op, (a, b)):
                return Call(op, (self._beside(a, b), self._beside(b, a)))
        return None

    def _beside(self, e: Expr, other: Expr) -> Expr:
        """`e` as a term of a sum with `other`: an offset, or the start of a step of the other's length."""
        match e, other:
            case Const(value, DType.I64), _ if abs(value) > 1:
                return _ANY
            case Call("mul", (Index() as d, Const(value, DType.I64))), Index(inner) if (
                self._extents.get(inner) == value
            ):
                return Call("mul", (d, _ANY))
        return e


def _names(n: Node) -> tuple[str, ...]:
    if isinstance(n, Let | Init):
        return (n.name,) if n.index_name is None else (n.name, n.index_name)
    return ()


def key_of(block: Block, sizes: Mapping[str, int]) -> str:
    """Key of a kernel at these extents."""
    return structure(block) + " " + " ".join(f"{d}{power_of_two(n)}" for d, n in sorted(sizes.items()))


def to_json(c: TritonConfig) -> dict[str, Any]:
    """A configuration as plain data; what has its default value is left out."""
    plain = TritonConfig()
    data: dict[str, Any] = {"tiles": dict(c.tiles)}
    for name in (
        "lanes",
        "warps",
        "stages",
        "descriptors",
        "specialize",
        "registers",
        "groups",
        "own",
        "draws",
    ):
        value = getattr(c, name)
        if value != getattr(plain, name):
            data[name] = dict(value) if name == "lanes" else value
    return data


def from_json(data: Mapping[str, Any]) -> TritonConfig:
    """The converse of `to_json`. TypeError for unknown fields, and for values that are no such numbers."""
    found = TritonConfig(**data)
    counts = [*found.tiles.values(), *found.lanes.values(), found.warps, found.stages]
    counts += [] if found.registers is None else [found.registers]
    if not all(type(n) is int and n > 0 for n in counts) or type(found.groups) is not int or found.groups < 0:
        raise TypeError(f"not a configuration: {data}")
    if found.warps & (found.warps - 1) or found.warps > _MOST_WARPS:
        raise TypeError(f"{found.warps} warps are not a power of two up to {_MOST_WARPS}")
    if max(counts) > _MOST_ELEMENTS or (found.registers or 0) > _MOST_REGISTERS or found.groups > _MOST_WARPS // 4:
        raise TypeError(f"more than there is: {data}")
    whether = {type(x) for x in (found.descriptors, found.specialize, found.draws)}
    if whether != {bool} or found.own not in ("columns", "rows"):
        raise TypeError(f"not a configuration: {data}")
    return found


class Table:
    """Tables of one device and toolchain; `find` is a dictionary lookup."""

    def __init__(self, device: str, toolchain: str):
        self.device, self.toolchain = device, toolchain
        self._found: dict[str, TritonConfig | None] = {}
        user = _load_user()
        shipped: Tables = {}
        for path in sorted(SHIPPED.glob("*.json")):
            shipped |= _parsed_tables(path.read_bytes())
        self._own = self._entries(shipped, device) | self._entries(user, device)
        self._kin: dict[str, TritonConfig] = {}
        for data in (shipped, user):
            for other in kin(device):
                self._kin |= self._entries(data, other)

    def _entries(self, data: Tables, device: str) -> dict[str, TritonConfig]:
        """Of one device; those of this toolchain go before others', which are better than none."""
        entries: dict[str, TritonConfig] = {}
        by_tool = data.get(device, {})
        for tool in sorted(by_tool, key=lambda t: t == self.toolchain):
            entries |= {k: from_json(e["config"]) for k, e in by_tool[tool].items()}
        return entries

    def find(self, key: str) -> TritonConfig | None:
        """The configuration for a key, the device's own or its kin's; else that of the nearest bin of the same kernel,
        in the same order. None: there is none.
        """
        if key not in self._found:
            exact = self._own.get(key) or self._kin.get(key)
            self._found[key] = exact or _near(self._own, key) or _near(self._kin, key)
        return self._found[key]

    def exact(self, key: str) -> bool:
        """Whether this very bin was tuned on this device."""
        return key in self._own

    def add(self, key: str, tuned: Tuned) -> None:
        """Remember a winner, also on disk where that is possible (by renaming; the last of two writers wins)."""
        self._own[key] = tuned.config
        self._found.clear()
        data = _load_user()
        data.setdefault(self.device, {}).setdefault(self.toolchain, {})[key] = {
            "config": to_json(tuned.config),
            "microseconds": round(tuned.microseconds, 2),
            "default": round(tuned.default_microseconds, 2),
            "note": tuned.note,
        }
        try:
            cache_folder("")
            put(user_file(), json.dumps(data, indent=1, sort_keys=True))
        except OSError as err:
            warn_unusable(user_file().parent, err, "what was tuned is known to this process alone")


def _near(entries: Mapping[str, TritonConfig], key: str) -> TritonConfig | None:
    """The configuration of the nearest bin of the same kernel, if one is near."""
    name, bins = _parsed(key)
    best: tuple[int, TritonConfig] | None = None
    for other, found in entries.items():
        if not other.startswith(name):
            continue
        _, theirs = _parsed(other)
        if theirs.keys() != bins.keys():
            continue
        steps = [abs(theirs[d].bit_length() - n.bit_length()) for d, n in bins.items()]
        if max(steps, default=0) <= NEAR and (best is None or sum(steps) < best[0]):
            best = (sum(steps), found)
    return None if best is None else best[1]


def _load_user() -> Tables:
    """The user's tables by device. A file that is not one is renamed, with a warning; so it is warned of once."""
    path = user_file()
    try:
        return _parsed_tables(read_trusted(path))
    except UntrustedError as err:
        warn_unusable(path.parent, err, "what was tuned before is not used")
    except OSError:
        pass  # nothing was tuned yet
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        aside = path.with_name(f"{path.name}.malformed")
        try:
            os.replace(path, aside)
            done = f"it is now {aside}"
        except OSError:
            done = "it cannot be renamed"
        why = f"{type(err).__name__}: {str(err)[:200]}"
        warnings.warn(f"{path} is no table of tuned kernels ({why}): {done}", RuntimeWarning, stacklevel=4)
    return {}


def _parsed_tables(text: bytes) -> Tables:
    """Tables by device. One of several exceptions of Python where the text is none, to the last entry."""
    data: Tables = json.loads(text)
    for by_tool in data.values():
        for entries in by_tool.values():
            for key, entry in entries.items():
                _parsed(key)
                from_json(entry["config"])
    return data


def kin(device: str) -> tuple[str, ...]:
    """Devices with the same chip."""
    return tuple(sorted(other for group in KIN if device in group for other in group - {device}))


def user_file() -> Path:
    """The user's own table."""
    return config.load().cache_dir / "tuned.json"
