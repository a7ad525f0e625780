"""Distances that a score adds, as a number a row and one along the stream (`row_lines`).

A slope times the distance of a query and a key is computed for each pair, before the score is there: as many registers
as the score has, which a kernel of several states lacks. It is a sum, though, of what varies along the rows and what
varies along the stream, and where the score then loses a value along the stream (a log-sum-exp), that takes both:

    where(c, s + x (i - j), -inf) - m  =  where(c, s + x (i - o), -inf) - (m + x (j - o))

for whole numbers i - o and j - o, o the first streamed index of the tile: nothing is larger than the distance was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    dims_used,
    loads,
    tensors_read,
    transform,
)
from tilefold.backends.triton.parts import writes
from tilefold.backends.triton.simplify import NEG_INF
from tilefold.block.bounds import linear
from tilefold.tile import ir
from tilefold.tile.uses import expressions


def apart(stmts: Sequence[ir.Stmt], row: str, stream: str) -> tuple[ir.Stmt, ...]:
    """Statements of a tile, distances apart that are added before a value along the stream is taken away."""
    of = _Distances(row, stream)
    known: dict[str, Expr] = {}
    for s in stmts:
        if isinstance(s, ir.Map) and of.sum_of(s.expr) is not None and sum(writes(x) == s.buf for x in stmts) == 1:
            known[s.buf] = s.expr

    def put_in(e: Expr) -> Expr:
        return transform(e, lambda x: known.get(x.tensor) if isinstance(x, Load) else None)

    made: list[ir.Stmt] = []
    for s in stmts:
        new = replace(s, expr=of.rewritten(put_in(s.expr))) if isinstance(s, ir.Map) and s.buf not in known else s
        made.append(new)
    needed = {t for s in made if writes(s) not in known for e in expressions((s,)) for t in tensors_read(e)}
    gone = known.keys() - needed
    return tuple(s for s in made if writes(s) not in gone and not (isinstance(s, ir.Alloc) and s.buffer.name in gone))


@dataclass(frozen=True, slots=True)
class _Sum:
    """An expression as one that does not vary along the stream and one that does not vary along the rows."""

    rows: Expr
    stream: Expr


@dataclass(frozen=True, slots=True)
class _Distances:
    row: str
    stream: str

    def rewritten(self, e: Expr) -> Expr:
        """The expression with distances apart wherever a value along the stream is taken away from their sum."""

        def found(x: Expr) -> Expr | None:
            match x:
                case Call("sub", (scores, line)) if self._is_line(line):
                    left, gone = self._moved(scores)
                    return None if gone is None else Call("sub", (left, Call("sub", (line, gone))))
            return None

        return transform(e, found)

    def sum_of(self, e: Expr) -> _Sum | None:
        """Rows and stream of a distance times what varies along neither; None: it is no such product."""
        whole = linear(e) if dims_used(e) >= {self.row, self.stream} else None
        if whole is not None:
            factor = whole.get(Index(self.stream), 0)
            if not factor or not whole.get(Index(self.row)):
                return None
            first = Call("tile_start", (Index(self.stream),))
            rest: Expr = Call("sub", (Index(self.stream), first))
            rest = rest if factor == 1 else Call("mul", (rest, Const(factor, DType.I64)))
            rows = transform(e, lambda x: first if x == Index(self.stream) else None)
            return _Sum(Cast(rows, DType.F32), Cast(rest, DType.F32))
        match e:
            case Call("mul", (a, b)):
                for x, by in ((a, b), (b, a)):
                    if dims_used(by).isdisjoint({self.row, self.stream}) and (of := self.sum_of(x)) is not None:
                        return _Sum(Call("mul", (of.rows, by)), Call("mul", (of.stream, by)))
        return None

    def _moved(self, e: Expr) -> tuple[Expr, Expr | None]:
        """An expression without what distances add along the stream, and that; None: nothing."""
        if (of := self.sum_of(e)) is not None:
            return of.rows, of.stream
        match e:
            case Call("add", (a, b)):
                (x, more), (y, rest) = self._moved(a), self._moved(b)
                if more is None or rest is None:
                    return Call("add", (x, y)), rest if more is None else more
            case Call("where", (c, a, fill)) if fill == NEG_INF:
                x, more = self._moved(a)
                return Call("where", (c, x, fill)), more
        return e, None

    def _is_line(self, e: Expr) -> bool:
        """Whether e is loaded and varies along the stream, not along the rows."""
        return self.row not in dims_used(e) and any(self.stream in dims_used(x) for x in loads(e))
