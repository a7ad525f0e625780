"""Two dims as one, where every tensor has them side by side in memory.

Law: a map or a fold over (d, e) is one over f = d E + e, for e in [0, E), if nothing depends on d or e alone. A tensor
of axes d and e is then one of an axis f, whose stride is that of e; that is so where one step of d is E steps of e,
whichever of the axes comes first (channels-last: rows, columns and channels lie side by side as channels of pixels).
Kernels gain long runs of neighbours: rows of 7 x 7, images, sums over all axes.

A product that sums over both has them as one even where what makes its other operand depends on one alone (mixed
radix: d = f // E, e = f mod E). A rotation of queries two by two is then computed at each place, once a thread block;
keys, read in every turn of a loop as [keys, D, E], would be turned and copied to be a matrix. Of 32 heads of 64, 1,024
keys, that was 220 us on an H100.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, Size, call, children, loads, rebuild
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, exprs_of, walk
from tilefold.tensor.analysis import is_static

#: tensor -> (a, b): one step along axis a is the extent of axis b many steps along axis b
Neighbours = Mapping[str, frozenset[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Merge:
    """Axes a and b of these tensors become one, at the place of a, with b's stride."""

    axes: Mapping[str, tuple[int, int]]


#: For a block program: whether two of its dims must not become one.
Apart = Callable[[Block], Callable[[str, str], bool]]


def _never(b: Block) -> Callable[[str, str], bool]:
    return lambda d, e: False


def collapsed(b: Block, near: Neighbours, apart: Apart = _never) -> tuple[Block, tuple[Merge, ...]]:
    """`b` with dims joined as long as there are such, and what that does to its tensors, in order.

    Two dims of rows and two of keys are often places on the same two axes of a tensor (queries and keys of a window
    that one product made): such pairs are joined together, or not at all.
    """
    found = _collapsed(b, near, apart, across=True)
    return found if _computed(found[0]) <= _computed(b) else _collapsed(b, near, apart, across=False)


def _computed(b: Block) -> int:
    """Axes at computed positions."""
    return sum(isinstance(ix, Call) for _, index in accesses(b) for ix in index)


def _collapsed(b: Block, near: Neighbours, apart: Apart, *, across: bool) -> tuple[Block, tuple[Merge, ...]]:
    merges: list[Merge] = []
    while True:
        found = next(_joined(b, near, apart, across=across), None)
        if found is None:
            return b, tuple(merges)
        b, merge = found
        merges.append(merge)
        near = {t: next_to(pairs, merge.axes[t]) if t in merge.axes else pairs for t, pairs in near.items()}


def next_to(pairs: frozenset[tuple[int, int]], merged: tuple[int, int]) -> frozenset[tuple[int, int]]:
    """The pairs of a tensor whose axes a and b have become one: what was beside either end is beside it."""
    a, b = merged

    def moved(x: int) -> int:
        x = a if x == b else x
        return x - (x > b)

    kept = ((x, y) for x, y in pairs if (x, y) != merged and x != a and y != b)
    return frozenset((moved(x), moved(y)) for x, y in kept)


def _joined(b: Block, near: Neighbours, apart: Apart, *, across: bool) -> Iterator[tuple[Block, Merge]]:
    """Every way to join two dims."""
    at: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
    for tensor, index in accesses(b):
        for x, y in near.get(tensor, frozenset()):
            match index[x], index[y]:
                case Index(d), Index(e) if d != e:
                    at.setdefault((d, e), {})[tensor] = (x, y)
        for ix in index if across else ():
            match ix:
                case Call("add", (Call("mul", (Index(d), n)), Index(e))) if d != e and n == b.sizes[e]:
                    at.setdefault((d, e), {})
    kinds = {n.dim: n.kind if n.kind == "forall" else "for" for n in walk(b.body) if isinstance(n, Loop)}
    separate = apart(b) if at else None
    multiplied = _multiplied(b)
    for (d, e), axes in at.items():
        if separate is not None and separate(d, e):
            continue
        digits = kinds.keys().isdisjoint((d, e)) and any({d, e} <= over and axes.keys() & of for over, of in multiplied)
        alike = (kinds.get(d) == "forall") == (kinds.get(e) == "forall")
        fixed = is_static(b.sizes[d]) and is_static(b.sizes[e])
        if not alike or not (fixed or kinds.get(d) == "forall"):
            continue
        for split in (False, True) if digits and fixed else (False,):
            try:
                yield Joiner(b, d, e, axes, across=across, split=split).run(), Merge(axes)
            except NotTogether:
                continue


def _multiplied(b: Block) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Of each product of two loads: the dims that it sums over, and what it reads."""
    found = []
    for n in walk(b.body):
        match n:
            case (
                Let(rdims=over, expr=Call("mul", (Load(x), Load(y))))
                | Accumulate(rdims=over, expr=Call("mul", (Load(x), Load(y))))
            ) if over:
                found.append((frozenset(over), frozenset((x, y))))
    return found


def accesses(b: Block) -> Iterator[tuple[str, tuple[Expr, ...]]]:
    tensors = {i.name for i in b.inputs} | {r.name for r in b.results}
    for n in walk(b.body):
        if isinstance(n, Store):
            yield n.tensor, n.index
        for x in exprs_of(n):
            yield from ((ld.tensor, ld.index) for ld in loads(x) if ld.tensor in tensors)


class NotTogether(Exception):
    """Something depends on one of the two dims alone."""


class Joiner:
    """across: other dims on the same axes of a tensor become one position; else the two dims stay apart. split: what
    depends on one of the two alone has its index from that of both, and is computed at each of these."""

    def __init__(
        self, b: Block, d: str, e: str, axes: Mapping[str, tuple[int, int]], *, across: bool, split: bool = False
    ):
        self.b, self.d, self.e, self.axes, self.across, self.split = b, d, e, axes, across, split
        self.both = next(
            n for n in itertools.chain([d + e], (f"{d}{e}_{k}" for k in itertools.count())) if n not in b.sizes
        )
        self.tensors = {i.name for i in b.inputs} | {r.name for r in b.results}
        self.values = {n.name: n.dims for n in walk(b.body) if isinstance(n, Let | Init)}
        self.values |= {n.index_name: n.dims for n in walk(b.body) if isinstance(n, Let | Init) if n.index_name}
        loops = [n for n in walk(b.body) if isinstance(n, Loop)]
        if any(n.dim in (d, e) and n.single for n in loops):
            raise NotTogether
        self.looped = {n.dim for n in loops} & {d, e}
        if len(self.looped) == 2 and any(n.dim == d and n.kind == "for" for n in loops):
            raise NotTogether

    def run(self) -> Block:
        b, length = self.b, self.b.sizes[self.e]
        sizes = {x: s for x, s in b.sizes.items() if x not in (self.d, self.e)}
        sizes[self.both] = _product(b.sizes[self.d], length)
        inputs = tuple(replace(i, shape=self.shape(i.name, i.shape)) for i in b.inputs)
        results = tuple(replace(r, dims=self.axes_of(r.name, r.dims)) for r in b.results)
        for i in b.inputs:
            if i.name in self.axes:
                x, y = self.axes[i.name]
                if (i.shape[x], i.shape[y]) != (b.sizes[self.d], length):
                    raise NotTogether
        return replace(b, sizes=sizes, inputs=inputs, results=results, body=self.nodes(b.body))

    def shape(self, tensor: str, shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
        if tensor not in self.axes:
            return shape
        x, y = self.axes[tensor]
        joined = [_product(shape[x], shape[y]) if k == x else s for k, s in enumerate(shape)]
        return tuple(s for k, s in enumerate(joined) if k != y)

    def axes_of(self, tensor: str, dims: tuple[str, ...]) -> tuple[str, ...]:
        if tensor not in self.axes:
            if {self.d, self.e} & set(dims):
                raise NotTogether
            return dims
        return tuple(
            self.both if k == self.axes[tensor][0] else x for k, x in enumerate(dims) if k != self.axes[tensor][1]
        )

    def dims(self, dims: tuple[str, ...], *, split: bool = False) -> tuple[str, ...]:
        """Dims of a value: both are in it, or none; or one, at whose place both are."""
        if (self.d in dims) == (self.e in dims):
            return tuple(self.both if x == self.d else x for x in dims if x != self.e)
        if not split:
            raise NotTogether
        return tuple(self.both if x in (self.d, self.e) else x for x in dims)

    def nodes(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(x for n in nodes for x in self.node(n))

    def node(self, n: Node) -> tuple[Node, ...]:
        match n:
            case Loop():
                return self.loop(n)
            case Let():
                payload = None if n.payload is None else self.expr(n.payload)
                dims = self.dims(n.dims, split=self.split and not n.rdims)
                return (replace(n, dims=dims, rdims=self.dims(n.rdims), expr=self.expr(n.expr), payload=payload),)
            case Init():
                return (replace(n, dims=self.dims(n.dims)),)
            case Update():
                return (replace(n, expr=self.expr(n.expr)),)
            case Accumulate():
                payload = None if n.payload is None else self.expr(n.payload)
                return (replace(n, rdims=self.dims(n.rdims), expr=self.expr(n.expr), payload=payload),)
            case Store():
                index = self.index(n.tensor, n.index)
                return (replace(n, index=index, dims=self.dims(n.dims), expr=self.expr(n.expr)),)
        raise AssertionError(n)

    def loop(self, n: Loop) -> tuple[Node, ...]:
        bounds = [x for x in (n.start, n.stop) if x is not None]
        if n.dim not in (self.d, self.e):
            return (replace(n, body=self.nodes(n.body), start=self.bound(n.start), stop=self.bound(n.stop)),)
        if n.kind == "forall":
            return self.nodes(n.body) if n.dim == self.e else (replace(n, dim=self.both, body=self.nodes(n.body)),)
        if n.dim == self.e and bounds:
            raise NotTogether
        length = self.b.sizes[self.e]
        start, stop = (None if x is None else _product(self.expr(x), length) for x in (n.start, n.stop))
        return (replace(n, dim=self.both, body=self.nodes(n.body), start=start, stop=stop),)

    def bound(self, e: Expr | None) -> Expr | None:
        return None if e is None else self.expr(e)

    def index(self, tensor: str, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Where an access is in the joined tensor or value."""
        if tensor in self.tensors:
            pair = self.axes.get(tensor)
        else:
            own = self.values[tensor]
            pair = (own.index(self.d), own.index(self.e)) if self.d in own and self.e in own else None
            if self.split and pair is None:
                return self.of_one(own, index)
        if pair is None:
            return tuple(self.expr(x) for x in index)
        x, y = pair
        at: Expr = Index(self.both)
        if (index[x], index[y]) != (Index(self.d), Index(self.e)):
            at = self.other(index[x], index[y])
        return tuple(at if k == x else self.expr(i) for k, i in enumerate(index) if k != y)

    def of_one(self, own: tuple[str, ...], index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Where an access is in a value of one of the two dims, which now has a place for each of both."""
        at = [(x, Index(d)) if d in (self.d, self.e) else (None, None) for d, x in zip(own, index, strict=True)]
        if any(x != own_place for x, own_place in at):
            raise NotTogether
        return tuple(self.expr(x) if p is None else Index(self.both) for x, (_, p) in zip(index, at, strict=True))

    def other(self, x: Expr, y: Expr) -> Expr:
        """The place on joined axes of two other dims, as long as these axes."""
        match x, y:
            case Index(a), Index(b) if self.across and a != b and not {a, b} & {self.d, self.e}:
                if (self.b.sizes[a], self.b.sizes[b]) == (self.b.sizes[self.d], self.b.sizes[self.e]):
                    return call("add", call("mul", x, self.b.sizes[self.e]), y)
        raise NotTogether

    def expr(self, e: Expr) -> Expr:
        """`e` with positions in terms of the joined dim."""
        if e == call("add", call("mul", Index(self.d), self.b.sizes[self.e]), Index(self.e)):
            return Index(self.both)
        match e:
            case Load(tensor, index):
                return Load(tensor, self.index(tensor, index))
            case Index(x) if x in (self.d, self.e):
                if not self.split:
                    raise NotTogether
                return call("floordiv" if x == self.d else "mod", Index(self.both), self.b.sizes[self.e])
            case Size(x) if x in (self.d, self.e):
                return self.b.sizes[x]
        return rebuild(e, tuple(self.expr(x) for x in children(e)))


def _product(a: Expr, b: Expr) -> Expr:
    """a times b, in the form that bounds of loops have."""
    match a, b:
        case Const(x), Const(y):
            return Const(int(x) * int(y), DType.I64)
        case Call(("minimum" | "maximum") as op, (x, y)), _:
            return call(op, _product(x, b), _product(y, b))
        case Call("mul", (Call("tile_start" | "add") as n, x)), _:  # segment n has so many indices of d, each of e's
            return call("mul", n, _product(x, b))
    return call("mul", a, b)
