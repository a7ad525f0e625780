"""Strips in pieces: where an expression's conditions change at fixed places of the strip (halves that are put together,
shifted rows, borders), each piece has conditions that are settled, and loads that need no clamping.

    for n in 0 .. 16: where(n < 8, x[n + 8], x[n - 8])   =   for n in 0 .. 8: x[n + 8]; for n in 8 .. 16: x[n - 8]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tilefold.algebra.expr import Call, Expr, Index, Load, dims_used, loads, walk
from tilefold.backends.cpp.affine import in_range, linear
from tilefold.backends.cpp.scope import Facts, const_int
from tilefold.tile.settle import settle

#: Pieces that a strip has at most: each is code of its own.
MOST = 4
#: Elements of a register, about: pieces must not be many more registers than the strip.
REGISTER = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Indices low <= i < high of a strip (high None: up to its end), and the conditions that hold on all of them."""

    low: int = 0
    high: int | None = None
    facts: Mapping[Expr, bool] = field(default_factory=dict)

    def settled(self, e: Expr) -> Expr:
        """`e` as it is on this piece."""
        return settle(e, self.facts, {}, {}) if self.facts else e

    def range(self, low: str, high: str) -> tuple[str, str]:
        """Its part of a range given as C++ texts."""
        first = low if self.low == 0 else str(self.low) if low == "0" else f"tf::max64({low}, {self.low})"
        return first, high if self.high is None else f"tf::min64({high}, {self.high})"


WHOLE = Piece()


def pieces(exprs: Sequence[Expr], dim: str, facts: Facts) -> tuple[Piece, ...]:
    """The pieces of a strip along `dim`, which may be any part of the axis: one, unless several spare the clamping of a
    load."""
    sizes = facts.kernel.sizes
    flips = {x: b for e in exprs for x in walk(e) if isinstance(x, Call) and (b := _flip(x, dim, sizes)) is not None}
    length = const_int(sizes[dim])  # of the axis: what holds on a tile may not hold on the next one
    ends = sorted({b for b, _ in flips.values() if b > 0 and (length is None or b < length)})
    if not ends or len(ends) >= MOST:
        return (WHOLE,)
    limits = [0, *ends, None]
    parts = tuple(
        Piece(low or 0, high, {x: (low or 0) < b if below else (low or 0) >= b for x, (b, below) in flips.items()})
        for low, high in pairwise(limits)
    )
    if length is not None and 2 * -(-length // REGISTER) < sum(_registers(p, length) for p in parts):
        return (WHOLE,)
    left = {x for p in parts for x in _outside(exprs, dim, p, facts)}
    return parts if len(left) < len(_outside(exprs, dim, WHOLE, facts)) else (WHOLE,)


def _registers(p: Piece, length: int) -> int:
    return -(-((length if p.high is None else p.high) - p.low) // REGISTER)


def _outside(exprs: Iterable[Expr], dim: str, piece: Piece, facts: Facts) -> set[Load]:
    """Loads along the strip that may lie outside of their tensor."""
    own, out = {dim: (piece.low, piece.high)}, set[Load]()
    for x in (x for e in exprs for x in loads(piece.settled(e))):
        param = facts.tensor(x.tensor) if x.tensor not in facts.tiles else None
        if param is not None:
            moving = [(e, n) for e, n in zip(x.index, param.shape, strict=True) if dim in dims_used(e)]
            if not all(in_range(e, n, facts.kernel.sizes, own) for e, n in moving):
                out.add(x)
    return out


def _flip(x: Call, dim: str, sizes: Mapping[str, Expr]) -> tuple[int, bool] | None:
    """(b, below): a comparison that holds where dim < b, or where dim >= b; None if it is none of dim and constants."""
    if x.op not in ("lt", "le", "gt", "ge"):
        return None
    form = linear(Call("sub", x.args), sizes)
    k, c = form.pop(Index(dim), 0), form.pop(None, 0)
    if form or k == 0:
        return None
    below = x.op in ("lt", "le")
    c -= x.op in ("le", "gt")  # now k i + c < 0, or not so
    # k > 0: i < -c / k;  k < 0: i > c / -k, not (i < floor(c / -k) + 1)
    return (-(c // k), below) if k > 0 else (c // -k + 1, not below)
