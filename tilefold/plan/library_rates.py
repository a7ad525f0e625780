"""Measured times of a device's library: products and convolutions over a grid of shapes and types.

A file a device (`tilefold tune library` makes it), with seconds beside each shape. What lies between shapes is
interpolated: the logarithm of the rate in FLOP/s, weighted by the inverse square of the distance in doublings of the
sizes (Shepard's method, over the nearest points). A shape far from all that was measured has no measured rate, and the
planner keeps to the rates of `plan.hardware`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from tilefold import config
from tilefold.algebra.dtypes import DType
from tilefold.files import cache_folder, put, read_trusted

Kind = Literal["mm", "bmm", "addmm", "conv"]
FOLDER = "library"
#: Of the files; another one is measured again.
FORMAT = 1
#: Points that a rate is interpolated of.
NEAREST = 8
#: Doublings of sizes, over all of them, beyond which the nearest point says nothing.
FAR = 3.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """[batch, rows, depth] times [batch, depth, cols]. A convolution's rows are its places, its depth what each sums
    up."""

    batch: int
    rows: int
    cols: int
    depth: int

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.cols * self.depth

    def distance(self, other: Sizes) -> float:
        """Doublings between the sizes."""
        ours = (self.batch, self.rows, self.cols, self.depth)
        theirs = (other.batch, other.rows, other.cols, other.depth)
        return math.hypot(*(math.log2(max(1, a)) - math.log2(max(1, b)) for a, b in zip(ours, theirs, strict=True)))


@dataclass(frozen=True, slots=True)
class Timed:
    """A call that was timed."""

    kind: Kind
    dtype: DType
    sizes: Sizes
    seconds: float


@dataclass(frozen=True, slots=True)
class LibraryRates:
    """All calls that were timed on a device; `versions` and `policy` say with what and how."""

    device: str
    points: tuple[Timed, ...]
    versions: tuple[tuple[str, str], ...] = ()
    policy: str = ""

    def rate(self, kind: Kind, dtype: DType, sizes: Sizes) -> float | None:
        """FLOP/s of a call; None where nothing near it was timed."""
        near = sorted(
            ((sizes.distance(p.sizes), p) for p in self.points if p.kind == kind and p.dtype is dtype),
            key=lambda x: x[0],
        )[:NEAREST]
        if not near or near[0][0] > FAR or sizes.flops == 0:
            return None
        if near[0][0] == 0:
            return sizes.flops / near[0][1].seconds
        weights = [d**-2 for d, _ in near]
        rates = [math.log(p.sizes.flops / p.seconds) for _, p in near]
        return math.exp(sum(w * r for w, r in zip(weights, rates, strict=True)) / sum(weights))

    def without(self, dtype: DType) -> LibraryRates:
        """The calls of other types."""
        return replace(self, points=tuple(p for p in self.points if p.dtype is not dtype))


def file_of(device: str) -> Path:
    """Where a device's table is kept."""
    name = "".join(c if c.isalnum() else "-" for c in device.lower())
    return config.load().cache_dir / FOLDER / f"{name}.json"


def save(rates: LibraryRates, path: Path) -> None:
    """As JSON. OSError: it cannot be written."""
    points = [
        {"kind": p.kind, "dtype": p.dtype.value, **asdict(p.sizes), "microseconds": 1e6 * p.seconds}
        for p in rates.points
    ]
    held = {"format": FORMAT, "device": rates.device, "versions": dict(rates.versions), "policy": rates.policy}
    put(path, json.dumps(held | {"points": points}, indent=1))


def keep(rates: LibraryRates) -> Path:
    """In the cache, for the planner. OSError: it cannot be written."""
    cache_folder(FOLDER)
    path = file_of(rates.device)
    save(rates, path)
    return path


@lru_cache(maxsize=4)
def table_of(path: Path) -> LibraryRates | None:
    """`load`, once a process."""
    return load(path)


def load(path: Path) -> LibraryRates | None:
    """What a file holds; None where it is not there, or not what it should be."""
    try:
        held = json.loads(read_trusted(path))
        if held["format"] != FORMAT:
            return None
        versions = tuple((str(k), str(v)) for k, v in held["versions"].items())
        return LibraryRates(str(held["device"]), tuple(map(_point, held["points"])), versions, str(held["policy"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _point(x: Mapping[str, object]) -> Timed:
    """ValueError: it is no point of a table."""
    kind, seconds = x["kind"], float(str(x["microseconds"])) / 1e6
    sizes = Sizes(*(int(str(x[name])) for name in ("batch", "rows", "cols", "depth")))
    if kind not in ("mm", "bmm", "addmm", "conv") or not 0 < seconds < math.inf or sizes.flops <= 0:
        raise ValueError(f"not a timed call: {x}")
    return Timed(kind, DType(x["dtype"]), sizes, seconds)
