"""Elements two by two: what is read at 2 i and at 2 i + 1, and what is stored there.

Law: over the lanes i of a vector, the elements at 2 i + c for c = 0, 1 are those of one vector of twice the lanes,
split in two; what is stored at 2 i + j for j = 0, 1 is one such vector, joined from two. A thread then reads and
writes as many neighbours at once as of a plain row, and each element moves once (rotary embeddings of pairs, gates that
lie between what they gate). Split and joined values stay in their threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, dims_used
from tilefold.tensor.index_simplify import Poly, poly, to_expr, within

TWO = 2


@dataclass(frozen=True, slots=True)
class Pair:
    """Positions 2 i + place along an axis, i an index of `dim`; `rest`: where the pair of i = 0 begins."""

    dim: str
    place: int
    rest: Expr


def pair_of(at: Poly, index: Sequence[Expr], axis: int, lanes: Sequence[str]) -> Pair | None:
    """The pairs that a position `at` along `axis` runs through, of which the last of the dims in `lanes` is the number;
    None where it runs otherwise, or the dim is in another axis' index too. The place is that of the constant term."""
    if not lanes or at.get((Index(lanes[-1]),)) != TWO:
        return None
    d, others = lanes[-1], [e for n, e in enumerate(index) if n != axis]
    rest = {mono: k for mono, k in at.items() if mono != (Index(d),)}
    used = dims_used(to_expr(rest))
    if d in used or used & set(lanes) or any(d in dims_used(e) for e in others):
        return None
    place = rest.get((), 0) % TWO
    rest[()] = rest.get((), 0) - place
    return Pair(d, place, to_expr({mono: k for mono, k in rest.items() if k}))


def both_of(index: Sequence[Expr], axis: int, frame: Sequence[str], sizes: Mapping[str, Expr]) -> Pair | None:
    """The pairs of neighbours along `axis` that an access over a frame runs through, the last dim of which says which
    one of a pair."""
    if len(frame) < TWO or sizes[frame[-1]] != Const(TWO, DType.I64):
        return None
    at, last = poly(index[axis], sizes), frame[-1]
    if at.pop((Index(last),), 0) != 1 or any(last in dims_used(e) for n, e in enumerate(index) if n != axis):
        return None
    pair = pair_of(at, index, axis, frame[:-1])
    return pair if pair is not None and last not in dims_used(pair.rest) else None


def both_exist(at: Poly, place: int, size: Expr, sizes: Mapping[str, Expr]) -> bool:
    """Whether the position and its neighbour in the pair are known to lie inside of the axis."""
    other = {**at, (): at.get((), 0) + (1 - 2 * place)}
    return all(within({m: k for m, k in p.items() if k}, poly(size, sizes), sizes) for p in (at, other))


def split(loaded: str, lanes: Sequence[int]) -> str:
    """Two values out of one of twice the lanes."""
    return f"tl.split(tl.reshape({loaded}, [{', '.join(map(str, lanes))}, {TWO}]))"


def joined(first: str, second: str, lanes: Sequence[int]) -> str:
    """One value of twice the lanes out of two."""
    return f"tl.reshape(tl.join({first}, {second}), [{wide(lanes)}])"


def wide(lanes: Sequence[int]) -> str:
    """The lanes of a shape, the last ones twice."""
    return ", ".join(map(str, [*lanes[:-1], TWO * lanes[-1]]))
