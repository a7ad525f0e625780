"""Axes of two indices joined with the axis that they are beside: elements two by two in memory.

Law: a tensor of axes a and b, where one step along a is two of b, is one of an axis f with b's stride, and its element
(i, j) is at 2 i + j, whatever i and j are. Dims stay as they are, unlike in `block.collapse`: what is stored at (i, 0)
and (i, 1) may be two expressions (a rotation of pairs), what is read there two operands. A kernel then sees that they
are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, Size, call, children, loads, rebuild
from tilefold.algebra.expr import walk as nodes
from tilefold.block.collapse import Merge, Neighbours
from tilefold.block.ir import Accumulate, Block, Let, Loop, Node, Store, Update, dims_of, exprs_of, walk
from tilefold.names import fresh
from tilefold.tensor.analysis import is_static

TWO = 2


def paired(b: Block, near: Neighbours) -> tuple[Block, tuple[Merge, ...]]:
    """`b` with such axes joined, at most one a tensor, and what that does to its tensors."""
    last = {t: [axes for axes in pairs if all(axes[1] != x for x, _ in pairs)] for t, pairs in near.items()}
    found = {t: axes for t, pairs in last.items() for axes in pairs if _two_by_two(b, t, axes)}
    if not found:
        return b, ()
    return _Paired(b, found).run(), (Merge(found),)


def ranged(b: Block) -> frozenset[str]:
    """Dims that something runs over, or asks the size of; the others say how long an axis of a result is that two dims
    run over together."""
    found = {d for n in walk(b.body) for d in dims_of(n)}
    exprs = [x for n in walk(b.body) for e in exprs_of(n) for x in nodes(e)]
    return frozenset(found | {x.dim for x in exprs if isinstance(x, Index | Size)})


def _two_by_two(b: Block, tensor: str, axes: tuple[int, int]) -> bool:
    """Whether the second axis has two indices, and all that is read or stored there is one of the two, or both: at an
    index that no serial loop runs over. Of static extents, for positions are then known to lie inside."""
    serial = {n.dim for n in walk(b.body) if isinstance(n, Loop) and (n.kind != "forall" or n.single)}
    shapes = {i.name: i.shape for i in b.inputs} | {r.name: tuple(b.sizes[d] for d in r.dims) for r in b.results}
    if any(not is_static(shapes[tensor][a]) for a in axes) or shapes[tensor][axes[1]] != Const(TWO, DType.I64):
        return False
    at = {index[axes[1]] for t, index in _touched(b) if t == tensor}
    dims = {e.dim for e in at if isinstance(e, Index)}
    known = all(isinstance(e, Const | Index) for e in at)
    return bool(at) and known and all(d not in serial and b.sizes[d] == Const(TWO, DType.I64) for d in dims)


def _touched(b: Block) -> Iterator[tuple[str, tuple[Expr, ...]]]:
    for n in walk(b.body):
        if isinstance(n, Store):
            yield n.tensor, n.index
        for e in exprs_of(n):
            yield from ((ld.tensor, ld.index) for ld in loads(e))


@dataclass(frozen=True, slots=True)
class _Paired:
    """The rewriting: tensor -> its two axes."""

    b: Block
    axes: dict[str, tuple[int, int]]

    def run(self) -> Block:
        b, sizes, taken = self.b, dict(self.b.sizes), set(self.b.sizes)
        inputs = tuple(replace(i, shape=self.shape(i.name, i.shape)) for i in b.inputs)
        results = []
        for r in b.results:
            if r.name in self.axes:
                x, y = self.axes[r.name]
                both = fresh(r.dims[x] + r.dims[y], taken)
                sizes[both] = _twice(sizes[r.dims[x]])
                dims = (both if k == x else d for k, d in enumerate(r.dims) if k != y)
                r = replace(r, dims=tuple(dims))
            results.append(r)
        return replace(b, sizes=sizes, inputs=inputs, results=tuple(results), body=self.body(b.body))

    def shape(self, tensor: str, shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
        if tensor not in self.axes:
            return shape
        x, y = self.axes[tensor]
        return tuple(_twice(s) if k == x else s for k, s in enumerate(shape) if k != y)

    def body(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(map(self.node, nodes))

    def node(self, n: Node) -> Node:
        match n:
            case Loop():
                start, stop = (None if e is None else self.expr(e) for e in (n.start, n.stop))
                return replace(n, body=self.body(n.body), start=start, stop=stop)
            case Let() | Accumulate():
                payload = None if n.payload is None else self.expr(n.payload)
                return replace(n, expr=self.expr(n.expr), payload=payload)
            case Update():
                return replace(n, expr=self.expr(n.expr))
            case Store():
                index = self.index(n.tensor, tuple(map(self.expr, n.index)))
                return replace(n, index=index, expr=self.expr(n.expr))
        return n

    def index(self, tensor: str, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        if tensor not in self.axes:
            return index
        x, y = self.axes[tensor]
        at = Call("add", (call("mul", index[x], TWO), index[y]))
        return tuple(at if k == x else i for k, i in enumerate(index) if k != y)

    def expr(self, e: Expr) -> Expr:
        e = rebuild(e, tuple(map(self.expr, children(e)))) if children(e) else e
        return Load(e.tensor, self.index(e.tensor, e.index)) if isinstance(e, Load) else e


def _twice(n: Expr) -> Expr:
    return Const(TWO * int(n.value), DType.I64) if isinstance(n, Const) else call("mul", n, TWO)
