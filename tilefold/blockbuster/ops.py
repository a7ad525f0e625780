"""Functional operators on blocks: types and meanings (Blockbuster, table 1, and a few of the same kind).

An item's last axis is its columns, what is before it its rows. `dot` multiplies with the
transpose. An elementwise operator applies a scalar function; operands with fewer axes are
repeated along the missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Item = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockOp:
    """`item`: result axes from argument axes, None where the shape constraint fails. `run`: its meaning."""

    name: str
    arity: int
    constraint: str
    item: Callable[..., Item | None]
    run: Callable[..., torch.Tensor]


def _same(a: Item, b: Item) -> Item | None:
    return a if a == b else None


def _rows(a: Item, c: Item) -> Item | None:
    return a if a and c == a[:-1] else None


def _cols(a: Item, c: Item) -> Item | None:
    return a if a and c == a[-1:] else None


def _no_cols(a: Item) -> Item | None:
    return a[:-1] if a else None


def _dot(a: Item, b: Item) -> Item | None:
    return (*a[:-1], *b[:-1]) if a and b and a[-1] == b[-1] and not set(a[:-1]) & set(b[:-1]) else None


def _outer(a: Item, b: Item) -> Item | None:
    return (*a, *b) if not set(a) & set(b) else None


def _run_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tensordot(a, b, dims=([a.ndim - 1], [b.ndim - 1]))


def _run_outer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tensordot(a, b, dims=0)


_TABLE = (
    BlockOp("add", 2, "equal shapes", _same, torch.add),
    BlockOp("mul", 2, "equal shapes", _same, torch.mul),
    BlockOp("row_shift", 2, "one number a row", _rows, lambda a, c: a + c[..., None]),
    BlockOp("row_scale", 2, "one number a row", _rows, lambda a, c: a * c[..., None]),
    BlockOp("col_shift", 2, "one number a column", _cols, torch.add),
    BlockOp("col_scale", 2, "one number a column", _cols, torch.mul),
    BlockOp("row_sum", 1, "has columns", _no_cols, lambda a: a.sum(-1)),
    BlockOp("row_prod", 1, "has columns", _no_cols, lambda a: a.prod(-1)),
    BlockOp("row_max", 1, "has columns", _no_cols, lambda a: a.amax(-1)),
    BlockOp("row_min", 1, "has columns", _no_cols, lambda a: a.amin(-1)),
    BlockOp("dot", 2, "equal columns, different rows", _dot, _run_dot),
    BlockOp("outer", 2, "different axes", _outer, _run_outer),
    BlockOp("transpose", 1, "a matrix", lambda a: (a[1], a[0]) if len(a) == 2 else None, lambda a: a.mT),
    BlockOp("block_max", 1, "any", lambda a: (), lambda a: a.amax()),
)
BLOCK_OPS: Mapping[str, BlockOp] = {op.name: op for op in _TABLE}
#: Reductions of lists, with the row operator that does the same inside a block.
REDUCTIONS: Mapping[str, str] = {"sum": "row_sum", "prod": "row_prod", "max": "row_max", "min": "row_min"}
ELEMENTWISE = "elementwise"


def union(items: tuple[Item, ...]) -> Item:
    """Axes of an elementwise result: the longest operand's, then what others add."""
    out = list(items[max(range(len(items)), key=lambda k: len(items[k]))]) if items else []
    for it in items:
        out += [d for d in it if d not in out]
    return tuple(out)
