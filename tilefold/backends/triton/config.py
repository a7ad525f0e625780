"""How a kernel is cut and run on a GPU: everything the tuner may choose, nothing that changes the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from tilefold.errors import BackendError
from tilefold.tile.pieces import MATRIX_UNIT


@dataclass(frozen=True)
class TritonConfig:
    """Tiles (dim -> indices a tile; powers of two for dims that are vectors) and launch parameters.

    `lanes`: dims whose vectors are longer than their tile (a tensor core needs 16 rows); the rest is masked.
    `warps`, `stages`: of the kernel and of its software pipelines. `descriptors`: operands of
    products come through tensor-map copies (TMA) where strides allow it; of groups that own rows, results whose rows
    are last in memory leave so, and sums beside the stream are taken. `specialize`: producer and consumer warps (Hopper
    and later; the result has to be checked). `registers`: most a thread may use.
    `groups`: of four warps on Hopper, beside one that copies. They `own` the columns of a wide state, and four warps
    more compute what they sum (`roles`), or 64 rows of the state each (`row_roles`). Of those,
    a thread block draws what to do next from a counter (`draws`), else it has a fixed share. A kernel without such a
    form, and other devices, have `warps` instead.
    """

    tiles: Mapping[str, int] = field(default_factory=dict)
    lanes: Mapping[str, int] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    descriptors: bool = False
    specialize: bool = False
    registers: int | None = None
    groups: int = 0
    own: Literal["columns", "rows"] = "columns"
    draws: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiles", MappingProxyType(dict(self.tiles)))
        object.__setattr__(self, "lanes", MappingProxyType(dict(self.lanes)))

    def key(self) -> tuple[object, ...]:
        """Hashable identity."""
        return (
            tuple(sorted(self.tiles.items())),
            tuple(sorted(self.lanes.items())),
            self.warps,
            self.stages,
            self.descriptors,
            self.specialize,
            self.registers,
            self.groups,
            self.own,
            self.draws,
        )

    def __str__(self) -> str:
        tiles = " ".join(f"{d}:{n}" for d, n in self.tiles.items())
        extra = [f"warps {self.warps}", f"stages {self.stages}"]
        extra += ["descriptors"] * self.descriptors + ["specialized warps"] * self.specialize
        extra += [f"{self.groups} groups of {self.own}{' drawing tiles' * self.draws}"] if self.groups else []
        extra += [f"lanes {d}:{n}" for d, n in self.lanes.items()]
        return f"{tiles}; {', '.join(extra)}"


#: Bytes of shared memory of a thread block on Hopper.
SHARED = 232_448


class TooLarge(BackendError):
    """A kernel that takes more than the device, or its compiler, has; `lighter` may help."""


def lighter(c: TritonConfig) -> TritonConfig | None:
    """What takes less shared memory: a stage less, else half of the longest tile; None: there is none."""
    if c.stages > 1:
        return replace(c, stages=c.stages - 1)
    longest = max(c.tiles, key=lambda d: c.tiles[d], default=None)
    if longest is None or c.tiles[longest] <= MATRIX_UNIT:
        return None
    return replace(c, tiles={**c.tiles, longest: c.tiles[longest] // 2})
