"""What a map costs that is computed again where it is read: its loads, and for how many of its parts they are read.

    z[i, k] = where(k < 1, f(x), where(k < 2, f(g(x)), f(g(g(x)))))

A kernel that has the parts of z in several thread blocks computes what they share, the first steps of a recurrence
whose states are stacked, for each of them. The one that makes all of z computes it once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tilefold.algebra.expr import Call, Expr, Load, children, dims_used, loads
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph

#: Loads and operations, for each part of a map, that are counted.
MOST_COMPUTED = 20_000


def of_elements(g: Graph, found: Collection[Load]) -> float:
    """Bytes of the elements of a tensor that loads read: no more than it has."""
    return min(sum(read_at(g, ld) for ld in found), g.nbytes({ld.tensor for ld in found}))


def read_at(g: Graph, ld: Load) -> float:
    """Bytes of the elements that a load reads."""
    return g.points(dims_used(ld)) * g.program.dtype_of(ld.tensor).nbytes


def of_parts(e: Expr) -> list[tuple[Expr, int]] | None:
    """Each distinct load and operation of a map, and for how many of the parts that conditions on the place alone
    choose it is computed. None where that is more than `MOST_COMPUTED`, all told."""
    apart = dict[tuple[int, Expr, bool], int]()  # a part that holds one, a condition and its side
    todo, seen, count = [(e, 0)], set[tuple[int | Load, int]](), dict[int | Load, tuple[Expr, int]]()
    while todo:
        n, part = todo.pop()
        known = n if isinstance(n, Load) else id(n)
        if (known, part) in seen:
            continue
        if len(seen) == MOST_COMPUTED:
            return None
        seen.add((known, part))
        count[known] = n, count.get(known, (n, 0))[1] + 1
        match n:
            case Load():
                continue
            case Call("where", (asked, kept, other)) if not loads(asked) and loads(kept) and loads(other):
                sides = [apart.setdefault((part, asked, side), len(apart) + 1) for side in (True, False)]
                todo += zip((kept, other), sides, strict=True)
            case _:
                todo += [(k, part) for k in children(n)]
    return list(count.values())


def repeated(g: Graph, parts: Sequence[tuple[Expr, int]], machine: Gpu) -> float:
    """What is read for several parts, as bytes of memory: all but the first time it is in a cache."""
    again = sum((n - 1) * read_at(g, e) for e, n in parts if isinstance(e, Load))
    return again * machine.unit_rate / machine.near_rate
