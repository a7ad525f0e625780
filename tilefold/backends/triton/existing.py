"""Positions in an index that data chose (`within`): which must exist, and the index without saying so."""

from __future__ import annotations

from collections.abc import Iterator

from tilefold.algebra.expr import Call, Expr, Load, children, rebuild


def asked(e: Expr) -> Iterator[tuple[Expr, ...]]:
    """Positions in an index that must exist, and their extents, but of what it loads."""
    todo = [e]
    while todo:
        n = todo.pop()
        if isinstance(n, Call) and n.op == "within":
            yield n.args
        if not isinstance(n, Load):
            todo += children(n)[::-1]


def unchecked(e: Expr) -> Expr:
    """An index without the checks, which its load has made (`Memory.inside`); what it reads itself has its own."""
    if isinstance(e, Load):
        return e
    if isinstance(e, Call) and e.op == "within":
        return unchecked(e.args[0])
    return rebuild(e, tuple(map(unchecked, children(e))))
