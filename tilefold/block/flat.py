"""Axes that a fold runs over together, as one axis.

Law (mixed radix): a fold over (k, l, m) is one over f = (k L + l) M + m in [0, K L M), where k = f // M // L,
l = f // M mod L and m = f mod M; so is a map over them. A loop needs no guess then about which of the axes is long: a
thread block holds neighbours of f, and segments are shares of all there is, be it two sequences of a thousand
positions or a thousand images. Axes of known extents stay apart, for the planner knows the long one, unless a thread
block cannot hold the others for one index of it: images that are read at mirrored or scaled places, which no launch
makes one axis of. What varies along some of the axes alone is then computed for each of their elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.algebra.expr import (
    Const,
    Expr,
    Index,
    Load,
    Size,
    call,
    children,
    dims_used,
    loads,
    rebuild,
    substitute,
    transform,
    walk,
)
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, dims_of, exprs_of
from tilefold.block.ir import walk as nodes_of
from tilefold.block.split import share_of
from tilefold.block.tidy import mapped, without_dead
from tilefold.names import free
from tilefold.tensor.analysis import is_static


def flattened(b: Block, *, known: bool = False) -> Block:
    """`b` with a loop over one axis where its folds run over several of which some have no fixed extent (known: also
    where all have); `b` itself where there are none, or something depends on one of the axes alone."""
    for axes in dict.fromkeys(_together(b, known=known)):
        try:
            b = _Flat.of(_in_loops(b, axes) if known else b, axes).run()
        except _Alone:
            continue
    return b


def _in_loops(b: Block, axes: tuple[str, ...]) -> Block:
    """`b` with values of some of the axes alone, of positions and inputs, computed where they are read, not in front of
    the loop."""
    table: dict[str, Let] = {}
    given = {i.name for i in b.inputs}

    def one(e: Expr) -> Expr | None:
        n = table.get(e.tensor) if isinstance(e, Load) else None
        if n is None or not isinstance(e, Load):
            return None
        at: dict[Expr, Expr] = {Index(d): transform(x, one) for d, x in zip(n.dims, e.index, strict=True)}
        return substitute(n.expr, at)

    for n in nodes_of(b.body):
        if not isinstance(n, Let) or not n.dims or n.rdims or n.dtype.rounds or not set(n.dims) < set(axes):
            continue
        if all(ld.tensor in given or ld.tensor in table for ld in loads(n.expr)):
            table[n.name] = replace(n, expr=transform(n.expr, one))
    return without_dead(replace(b, body=mapped(b.body, lambda e: transform(e, one)))) if table else b


def _together(b: Block, *, known: bool) -> Iterator[tuple[str, ...]]:
    """The axes of folds in serial loops, several and not all of known extents, unless those are asked for."""
    for n in nodes_of(b.body):
        if isinstance(n, Loop) and n.kind == "for":
            over = (x.rdims for x in n.body if isinstance(x, Accumulate))
            yield from (
                axes
                for axes in over
                if len(axes) > 1 and n.dim in axes and (known or not all(is_static(b.sizes[d]) for d in axes))
            )


class _Alone(Exception):
    """Something depends on some of the axes, and not on all."""


@dataclass(frozen=True, slots=True)
class _Flat:
    """axes: outermost first; looped: the one that serial loops run over; flat: the axis in their place."""

    b: Block
    axes: tuple[str, ...]
    looped: str
    flat: str
    digits: dict[str, Expr]
    values: dict[str, tuple[str, ...]]

    @staticmethod
    def of(b: Block, axes: tuple[str, ...]) -> _Flat:
        nodes = list(nodes_of(b.body))
        (looped, *others) = dict.fromkeys(n.dim for n in nodes if isinstance(n, Loop) and n.dim in axes)
        single = {n.dim for n in nodes if isinstance(n, Loop) and n.single}
        values = {name: n.dims for n in nodes if isinstance(n, Let | Init) for name in (n.name, n.index_name) if name}
        flat = free("".join(axes), {*b.sizes, *values})
        made = _Flat(b, axes, looped, flat, _digits(b, axes, flat), values)
        if others or looped in single or not all(made.fits(n, ()) for n in b.body):
            raise _Alone
        return made

    def fits(self, n: Node, loops: tuple[str, ...]) -> bool:
        """Whether a node depends on all of the axes, inside their loop, or on none."""
        if isinstance(n, Loop):
            bounds = {d for e in exprs_of(n) for d in dims_used(e)} | _sizes(n)
            own = self._share(n) if n.dim == self.looped else not bounds & set(self.axes)
            return own and all(self.fits(x, (*loops, n.dim)) for x in n.body)
        inside = self.looped in loops
        mine = {d for d in dims_of(n) if d in self.axes}
        read = {d for e in exprs_of(n) for d in dims_used(e) if d in self.axes}
        if not inside:
            return not mine and not read
        match n:
            case Let(dims=dims, rdims=rdims):
                return not set(rdims) & set(self.axes) and (self._all(dims) or not (mine or read))
            case Accumulate(rdims=rdims):
                return self._all(rdims)
            case Store(dims=dims):
                return self._all(dims)
            case Update():
                return not read
        return False

    def _share(self, n: Loop) -> bool:
        """Whether a loop runs over all of its axis, or a segment's share."""
        if (n.start, n.stop) == (None, None):
            return n.kind == "for"
        counts = {d: int(e.value) for d, e in self.b.sizes.items() if isinstance(e, Const)}
        return n.kind == "for" and any(
            (n.start, n.stop) == share_of(n.dim, d, k, self.b.sizes[n.dim]) for d, k in counts.items()
        )

    def _all(self, dims: tuple[str, ...]) -> bool:
        return set(self.axes) <= set(dims)

    def run(self) -> Block:
        length: Expr = self.b.sizes[self.axes[0]]
        for d in self.axes[1:]:
            length = call("mul", length, self.b.sizes[d])
        used = {d for r in self.b.results for d in r.dims}
        sizes = {d: e for d, e in self.b.sizes.items() if d not in self.axes or d in used}
        return replace(self.b, sizes=sizes | {self.flat: length}, body=tuple(map(self.node, self.b.body)))

    def node(self, n: Node) -> Node:
        match n:
            case Loop():
                body = tuple(map(self.node, n.body))
                if n.dim != self.looped:
                    return replace(n, body=body)
                return replace(n, dim=self.flat, start=self.bound(n.start), stop=self.bound(n.stop), body=body)
            case Let(payload=p):
                own = p if p is None else self.expr(p)
                return replace(n, dims=self.dims(n.dims), expr=self.expr(n.expr), payload=own)
            case Accumulate(payload=p):
                own = p if p is None else self.expr(p)
                return replace(n, rdims=self.dims(n.rdims), expr=self.expr(n.expr), payload=own)
            case Store():
                index = tuple(map(self.expr, n.index))
                return replace(n, index=index, dims=self.dims(n.dims), expr=self.expr(n.expr))
            case Update():
                return replace(n, expr=self.expr(n.expr))
            case Init():
                return n
        raise AssertionError(n)

    def bound(self, e: Expr | None) -> Expr | None:
        """A bound of a loop: shares of the looped axis are shares of all."""
        return None if e is None else substitute(e, {Size(self.looped): Size(self.flat)})

    def dims(self, dims: tuple[str, ...]) -> tuple[str, ...]:
        """With the axis in place of the first of those that it stands for."""
        if not self._all(dims):
            return dims
        first = next(d for d in dims if d in self.axes)
        return tuple(self.flat if d == first else d for d in dims if d == first or d not in self.axes)

    def expr(self, e: Expr) -> Expr:
        """`e` at a place of the axis."""
        match e:
            case Load(tensor, index) if self._all(self.values.get(tensor, ())):
                own = self.values[tensor]
                if any(x != Index(d) for d, x in zip(own, index, strict=True) if d in self.axes):
                    raise _Alone
                at = {d: self.expr(x) for d, x in zip(own, index, strict=True)} | {self.flat: Index(self.flat)}
                return Load(tensor, tuple(at[d] for d in self.dims(own)))
            case Index(d) if d in self.digits:
                return self.digits[d]
            case Size(d) if d in self.digits:
                return self.b.sizes[d]
        return rebuild(e, tuple(map(self.expr, children(e))))


def _digits(b: Block, axes: tuple[str, ...], flat: str) -> dict[str, Expr]:
    """Each axis' index from that of all."""
    found: dict[str, Expr] = {}
    rest: Expr = Index(flat)
    for d in reversed(axes[1:]):
        found[d] = call("mod", rest, b.sizes[d])
        rest = call("floordiv", rest, b.sizes[d])
    return {axes[0]: rest, **found}


def _sizes(n: Loop) -> set[str]:
    """Dims whose extents a loop's bounds use."""
    return {x.dim for e in exprs_of(n) for x in walk(e) if isinstance(x, Size)}
