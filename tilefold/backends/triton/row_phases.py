"""What a tile computes, cut where it can go on: after each product of the lift that it needs (`row_folds`)."""

from __future__ import annotations

from collections.abc import Sequence

from tilefold.algebra.expr import tensors_read
from tilefold.backends.triton.parts import about
from tilefold.backends.triton.row_roles import RowRoles
from tilefold.tile import ir
from tilefold.tile.uses import expressions


def results(r: RowRoles) -> tuple[str, ...]:
    """Buffers that the lifts write, in the order in which they are complete."""
    last = {x.gemm.buf: n for n, x in enumerate(r.lifts)}
    return tuple(sorted(last, key=last.__getitem__))


def running(r: RowRoles, result: str) -> int:
    """Products of the lift that begin after the last one of a result."""
    return len(r.lifts) - 1 - max(n for n, x in enumerate(r.lifts) if x.gemm.buf == result)


def phases(stmts: Sequence[ir.Stmt], known: Sequence[str]) -> tuple[tuple[ir.Stmt, ...], ...]:
    """Statements by the last of the `known` buffers that they need, directly or by others; at least one phase. Two
    statements about the same buffer keep their order."""
    made = {name: n for n, name in enumerate(known)}
    touched: dict[str, int] = {}
    found: list[list[ir.Stmt]] = [[] for _ in known]
    for s in stmts:
        read = {t for e in expressions((s,)) for t in tensors_read(e)}
        own = about(s)
        at = max([0, touched.get(own, 0), *(made.get(t, 0) for t in read)])
        found[at].append(s)
        made[own] = max(at, made.get(own, 0))
        touched |= {t: max(at, touched.get(t, 0)) for t in (*read, own)}
    return tuple(tuple(x) for x in found)


def crossing(found: Sequence[Sequence[ir.Stmt]]) -> frozenset[str]:
    """Buffers of an element of rows and stream that one phase computes and a later one reads."""
    out: set[str] = set()
    for n, phase in enumerate(found):
        later = {t for e in expressions([s for p in found[n + 1 :] for s in p]) for t in tensors_read(e)}
        out |= {s.buf for s in phase if isinstance(s, ir.Map)} & later
    return frozenset(out)
