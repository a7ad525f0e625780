"""Every law that a schedule can name, in the order in which `docs/design/schedules.md` explains them."""

from __future__ import annotations

from tilefold.block.laws.fold import ROLLING_UPDATE
from tilefold.block.laws.fusion import EXTEND, FUSE
from tilefold.block.laws.law import Law
from tilefold.block.laws.loops import PEEL, REORDER, TILE
from tilefold.block.laws.rewrite import RECOMPUTE, SWAP_SCALE_DOT
from tilefold.block.laws.segments import PRIVATIZE, SPLIT_K_UPDATE

LAWS: tuple[Law, ...] = (
    FUSE,
    ROLLING_UPDATE,
    SPLIT_K_UPDATE,
    PRIVATIZE,
    TILE,
    REORDER,
    EXTEND,
    PEEL,
    RECOMPUTE,
    SWAP_SCALE_DOT,
)
