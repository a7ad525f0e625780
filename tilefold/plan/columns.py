"""Rows of few columns, of which each is computed in a way of its own, stored column by column.

Law: what is stored over (i, j), j of few indices, is at each j = t what its expression is with t put in. Where
conditions on j alone choose between values of a row (gradients of x[:, 0], x[:, 1], .. in the steps of a recurrence,
each put between zeros, and all added up), a column is one of these, not a sum over all: of T columns T values for each
row, not T T; and no value of rows is laid out anew to stand beside a tile's columns. Zeros are not added: -0 stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, dims_used, loads, substitute, transform
from tilefold.algebra.expr import walk as nodes
from tilefold.block.fuse import polished
from tilefold.block.ir import Block, Let, Loop, Node, Store, dims_of, exprs_of, walk
from tilefold.block.tidy import without_dead
from tilefold.tile.settle import settle

#: Columns that are written out: fewer fill no sector, more are more code than the instruction cache holds.
LEAST, MOST = 8, 64
#: Bytes of the widest store of a thread.
VECTOR = 16


def by_columns(b: Block) -> Block:
    """`b` with such stores column by column, where nothing else of it then has columns; `b` itself without one."""
    for d in dict.fromkeys(d for n in walk(b.body) if isinstance(n, Store) for d in n.dims):
        extent = b.sizes[d]
        if not isinstance(extent, Const) or not LEAST <= int(extent.value) <= MOST or d in _loops(b):
            continue
        apart = _Columns(b, d, int(extent.value)).run()
        if apart is not None:
            b = apart
    return b


def _loops(b: Block) -> frozenset[str]:
    return frozenset(n.dim for n in walk(b.body) if isinstance(n, Loop))


class _Columns:
    """The rewriting, for a dim of `count` columns."""

    def __init__(self, b: Block, d: str, count: int):
        self.b, self.d, self.count = b, d, count
        self.values = {n.name: n for n in walk(b.body) if isinstance(n, Let) and d in n.dims and n.reducer is None}

    def run(self) -> Block | None:
        stores = [n for n in walk(self.b.body) if isinstance(n, Store) and self.d in n.dims]
        if not all(self._apart(n) for n in stores):
            return None
        made = without_dead(replace(self.b, body=self._body(self.b.body)))
        left = (self.d in dims_of(n) or any(self.d in dims_used(e) for e in exprs_of(n)) for n in walk(made.body))
        if any(left):
            return None
        done = polished(made)
        return replace(done, body=_early(done.body, {n.name: n.dtype for n in done.results}))

    def _apart(self, s: Store) -> bool:
        """Whether conditions choose for half of the columns, or more."""
        if s.added or [e for e in s.index if self.d in dims_used(e)] != [Index(self.d)]:
            return False
        asked = {x.args[0] for e in self._written(s.expr) for x in nodes(e) if isinstance(x, Call) and x.op == "where"}
        own = (e for e in asked if dims_used(e) == {self.d} and not any(True for _ in loads(e)))
        return 2 * sum(1 for _ in own) >= self.count

    def _written(self, e: Expr) -> Iterator[Expr]:
        """An expression, and those of the values with columns that it reads, once each."""
        known, waiting = set[str](), [e]
        while waiting:
            yield (e := waiting.pop())
            new = {ld.tensor for ld in loads(e)} & self.values.keys() - known
            known |= new
            waiting += [self.values[n].expr for n in sorted(new)]

    def _body(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        out, columns = list[Node](), list[Node]()
        for n in body:
            if isinstance(n, Loop):
                out.append(replace(n, body=self._body(n.body)))
            elif isinstance(n, Store) and self.d in n.dims:
                columns += [self._column(n, t) for t in range(self.count)]
            else:
                out.append(n)
        return (*out, *columns)

    def _column(self, s: Store, t: int) -> Store:
        at: dict[Expr, Expr] = {Index(self.d): Const(t, DType.I64)}
        index = tuple(substitute(e, at) for e in s.index)
        return replace(s, index=index, dims=tuple(d for d in s.dims if d != self.d), expr=self._at(s.expr, t, {}))

    def _at(self, e: Expr, t: int, known: dict[str, Expr]) -> Expr:
        """An expression at column t; known: values with columns there."""

        def one(x: Expr) -> Expr | None:
            if not isinstance(x, Load) or x.tensor not in self.values:
                return None
            if x.tensor not in known:
                n = self.values[x.tensor]
                value = self._at(n.expr, t, known)
                known[x.tensor] = Cast(value, n.dtype) if n.dtype.rounds else value
            return known[x.tensor]

        place = settle(e, {}, self.b.sizes, {}, lambda x: t if x == Index(self.d) else None)
        return transform(transform(place, one), _without_zeros)


def _early(body: tuple[Node, ...], kinds: Mapping[str, DType]) -> tuple[Node, ...]:
    """Columns stored, a vector's together, as soon as they are there: no thread keeps all of them to the end."""
    if any(isinstance(n, Loop) for n in body):
        return tuple(replace(n, body=_early(n.body, kinds)) if isinstance(n, Loop) else n for n in body)
    made = {n.name: at for at, n in enumerate(body) if isinstance(n, Let)}
    vectors: dict[tuple[object, ...], list[Store]] = {}
    for n in body:
        if isinstance(n, Store):
            place = n.index[-1]
            group = int(place.value) * kinds[n.tensor].nbytes // VECTOR if isinstance(place, Const) else 0
            vectors.setdefault((n.tensor, *n.index[:-1], group), []).append(n)
    behind: dict[int, list[Store]] = {}
    for stores in vectors.values():
        last = max((made[x.tensor] for s in stores for x in loads(s.expr) if x.tensor in made), default=-1)
        behind.setdefault(last, []).extend(stores)
    values = [(at, n) for at, n in enumerate(body) if not isinstance(n, Store)]
    return (*behind.get(-1, ()), *(x for at, n in values for x in (n, *behind.get(at, ()))))


def _without_zeros(e: Expr) -> Expr | None:
    """A sum whose terms have been looked at."""
    match e:
        case Call("add", (x, y)):
            zeros = [isinstance(k, Const) and k.dtype.is_float and k.value == 0.0 for k in (x, y)]
            return y if zeros[0] else x if zeros[1] else None
    return None
