"""Results made of parts (stack, cat): what is stored is read from one tensor here and from another there.

Law: where a condition has one value for all lanes of a thread block, `where(condition, a, b)` is a or b for all of
them, and the block need not read what it does not choose. A block that has one index of each dim that the conditions
depend on branches to its part; every part beyond that would cost it loads that are thrown away. So does a block with
several indices i, from a multiple of their number n on, of conditions `i < c` where n divides c: concatenated channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from functools import partial

from tilefold.algebra.expr import Call, Const, Expr, Index, call, dims_used, loads, transform, walk
from tilefold.tensor.analysis import expr_flops

#: Parts from which branches are made: of fewer, loads side by side wait for memory together and cost little more.
LEAST_PARTS = 4

#: Arithmetic of the parts, in additions, from which branches are made of fewer: both would be computed everywhere.
HEAVY = 16

#: Times as many parts as conditions, and one, of which branches are made.
TIMES = 2

#: Indices that a thread block has of a dim, from a multiple of their number on; 0: not such.
Tile = Callable[[str], int]


def choices(e: Expr, tile: Tile) -> tuple[Expr, ...]:
    """Conditions of e, outermost first, that choose between what is read, one way for all indices of a tile. None where
    they do not choose one part each: the taps of a window over a concatenation, each with conditions of its own, have
    a power of two of combinations."""
    every = (
        n.args[0]
        for n in walk(e)
        if isinstance(n, Call)
        and n.op == "where"
        and dims_used(n.args[0])
        and _same(n.args[0], tile)
        and not any(True for _ in loads(n.args[0]))
        and all(_reads(side) for side in n.args[1:])
    )
    found = tuple(dict.fromkeys(every))
    most = TIMES * (len(found) + 1)
    return found if _leaves(e, frozenset(found), most) <= most else ()


def _leaves(e: Expr, found: Collection[Expr], most: int) -> int:
    """Parts that the conditions choose between, counted as far as `most` and one."""
    condition = next(
        (n.args[0] for n in walk(e) if isinstance(n, Call) and n.op == "where" and n.args[0] in found), None
    )
    if condition is None:
        return 1
    count = 0
    for side in (1, 2):
        if count <= most:
            count += _leaves(transform(e, partial(_side, condition=condition, side=side)), found, most - count)
    return count


def _side(e: Expr, *, condition: Expr, side: int) -> Expr | None:
    return e.args[side] if isinstance(e, Call) and e.op == "where" and e.args[0] == condition else None


def branches(e: Expr, found: Collection[Expr]) -> bool:
    """Whether branches are made of the parts that these conditions choose between."""
    parts = [n for n in walk(e) if isinstance(n, Call) and n.op == "where" and n.args[0] in found]
    return len(found) + 1 >= LEAST_PARTS or any(expr_flops(n) >= HEAVY for n in parts)


def of_parts(exprs: Iterable[Expr], may: Callable[[str], bool]) -> dict[str, int]:
    """Dims that choose between `LEAST_PARTS` or more parts in one of these, and the longest tile, a power of two, of
    which all indices choose the same. may: dims of which tiles may be single indices."""
    found = [choices(e, lambda d: int(may(d))) for e in exprs]
    conditions = [e for c in found if len(c) + 1 >= LEAST_PARTS for e in c]
    longest: dict[str, int] = {}
    for e in conditions:
        end = ends(e)
        for d in sorted(dims_used(e)):
            longest[d] = math.gcd(longest.get(d, 0), 1 if end is None else end[1])
    return {d: n & -n for d, n in longest.items()}


def ends(condition: Expr) -> tuple[str, int] | None:
    """Dim and number of a condition that holds for the first so many indices: i < n, or i - c < n - c (of a
    concatenation in another one)."""
    match condition:
        case Call("lt", (Index(d), Const(int(n)))) if n > 0:
            return d, n
        case Call("lt", (Call("sub", (i, Const(int(c)))), Const(int(n)))):
            return ends(call("lt", i, c + n))
    return None


def _same(condition: Expr, tile: Tile) -> bool:
    tiles, end = [tile(d) for d in dims_used(condition)], ends(condition)
    return all(n == 1 for n in tiles) or (end is not None and 0 not in tiles and end[1] % tiles[0] == 0)


def _reads(e: Expr) -> bool:
    return any(True for _ in loads(e))
