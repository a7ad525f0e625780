"""Which values lie in registers as a matrix unit leaves its results, and which as the transpose of that.

A product with the second kind as operand is compiled wrongly for Hopper by Triton before 3.7.1 (reported as
flash-linear-attention issues 640 and 983), without any error. `Products` computes the transposed product instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilefold.algebra.expr import Call, Expr, Index, Load, walk
from tilefold.tile import ir

#: Whether transposed; both where a value is made of both; empty for values that no product made.
Turns = frozenset[bool]
NONE: Turns = frozenset()
PLAIN: Turns = frozenset({False})


class Layouts:
    """Turns of buffers, as statements are rendered. `results`: buffers that sums of products are written to.

    Those count as results of products from the start, for a loop may read them before it writes them.
    """

    def __init__(self, stmts: Sequence[ir.Stmt]):
        self.results = _results(stmts)
        self._turns: dict[str, Turns] = {}

    def born(self, buf: str) -> None:
        """A buffer comes to life."""
        self._turns[buf] = PLAIN if buf in self.results else NONE

    def wrote(self, buf: str, turns: Turns) -> None:
        """A buffer is given a value that lies so (or is combined with one)."""
        self._turns[buf] = self._turns.get(buf, NONE) | turns

    def operand(self, ld: Load, frame: Sequence[str]) -> Turns:
        """How a load lies once its axes are in frame order."""
        order = [frame.index(ix.dim) for ix in ld.index if isinstance(ix, Index) and ix.dim in frame]
        turns = self._turns.get(ld.tensor, NONE)
        if len(order) < 2:
            return NONE
        return turns if order == sorted(order) else frozenset(not t for t in turns)

    def made(self, exprs: Iterable[Expr], frame: Sequence[str]) -> Turns:
        """How the value of expressions lies."""
        loads = [x for e in exprs for x in walk(e) if isinstance(x, Load)]
        return frozenset(t for ld in loads for t in self.operand(ld, frame))


def _results(stmts: Sequence[ir.Stmt]) -> set[str]:
    found: set[str] = set()
    for s in stmts:
        match s:
            case ir.Gemm(buf=buf) | ir.Reduce(buf=buf, op="sum", expr=Call("mul", (Load(), Load()))):
                found.add(buf)
            case ir.For(body=body):
                found |= _results(body)
    return found
