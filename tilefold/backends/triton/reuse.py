"""Tensors that a thread block reads twice: once to reduce a row that it cannot hold, again to write its results.

The second reading should find the row in the cache. So the first asks the cache to keep it, the second to let go of
it, as of what it writes; and the second starts where the first ended, at what was read last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilefold.algebra.expr import dims_used, loads
from tilefold.tile import ir
from tilefold.tile.uses import allocated, expressions, written


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of one loop: tensors to keep, tensors read for the last time, and whether its tiles may go backwards."""

    keep: frozenset[str] = frozenset()
    drop: frozenset[str] = frozenset()
    writes: bool = False


def reuse_of(stmts: Sequence[ir.Stmt], at: int, grid: frozenset[str]) -> Reuse:
    """What is read twice of what the loop `stmts[at]` and the loops beside it read; nothing that blocks share."""
    s = stmts[at]
    assert isinstance(s, ir.For)
    mine = _rows(s, grid)
    before = [x for x in stmts[:at] if isinstance(x, ir.For)]
    after = [x for x in stmts[at + 1 :] if isinstance(x, ir.For)]
    keep = mine & {t for x in after if _writes(x) for t in _rows(x, grid)}
    drop = mine & {t for x in before for t in _rows(x, grid)} - keep if _writes(s) else frozenset()
    return Reuse(keep, drop, bool(drop))


def _rows(s: ir.For, grid: frozenset[str]) -> frozenset[str]:
    """Tensors that each thread block reads elements of its own of."""
    read = {ld for e in expressions(s.body) for ld in loads(e)}
    return frozenset(ld.tensor for ld in read if dims_used(ld) & grid and dims_used(ld) - grid)


def _writes(s: ir.For) -> bool:
    """Whether the loop stores and carries nothing from one tile to the next: then any order of tiles will do."""
    stores = any(isinstance(x, ir.Store) for x in s.body)
    nested = any(isinstance(x, ir.For) for x in s.body)
    return stores and not nested and set(written(s.body)) <= allocated(s.body)
