"""Results made of parts (stack, cat): what is stored is read from one tensor here and from another there.

Law: where a condition has one value for all lanes of a thread block, `where(condition, a, b)` is a or b for all of
them, and the block need not read what it does not choose. A block that has one index of each dim that the conditions
depend on branches to its part; every part beyond that would cost it loads that are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tilefold.algebra.expr import Call, Expr, dims_used, loads, walk

#: Parts from which branches are made: of fewer, loads side by side wait for memory together and cost little more.
LEAST_PARTS = 4


def choices(e: Expr, single: Callable[[str], bool]) -> tuple[Expr, ...]:
    """Conditions of e, outermost first, that depend on single dims alone and choose between what is read."""
    found = (
        n.args[0]
        for n in walk(e)
        if isinstance(n, Call)
        and n.op == "where"
        and dims_used(n.args[0])
        and all(map(single, dims_used(n.args[0])))
        and not any(True for _ in loads(n.args[0]))
        and all(_reads(side) for side in n.args[1:])
    )
    return tuple(dict.fromkeys(found))


def of_parts(exprs: Iterable[Expr], single: Callable[[str], bool]) -> frozenset[str]:
    """Dims that choose between `LEAST_PARTS` or more parts in one of these."""
    found = [choices(e, single) for e in exprs]
    return frozenset(d for c in found if len(c) + 1 >= LEAST_PARTS for e in c for d in dims_used(e))


def _reads(e: Expr) -> bool:
    return any(True for _ in loads(e))
