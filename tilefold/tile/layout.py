"""Memory order of block values, chosen so that matrix products read and write contiguously.

The order of a value's dims is its layout (last dim contiguous). A product C = sum a * b runs
fast when C and one operand share their contiguous dim v; the other operand's layout is free. So
for each product, in program order: v is a kept dim that an operand already has contiguous, else
the operand that does not change in the enclosing loop is copied once with its kept dim last
(for q k^T both operands are contiguous in the contracted dim: q is packed, and the scores come
out transposed, [j, i]). Values computed from others follow the layout of what they read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, dims_used, loads, transform
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, walk
from tilefold.names import free
from tilefold.tensor.product import Product, product

#: Static extents below this do not make good vectors.
SHORT = 8
#: tensor -> axis whose stride is 1 (None: unknown)
UnitAxes = Mapping[str, int | None]


def product_of(n: Node, dims: tuple[str, ...]) -> Product | None:
    """The statement as a matrix product of plain operands, if it is one: both vary with all that is summed over, and
    one of them with each dim of the result (rows that are repeated for a batch are no dim of a product)."""
    if not isinstance(n, Let | Accumulate):
        return None
    p = product(n.reducer, n.expr, dims, n.rdims)
    if p is None or p.loads is None or not p.is_matrix() or not p.whole:
        return None
    return p if (p.left | p.right).issuperset(dims) else None


def arrange(block: Block, unit: UnitAxes) -> Block:
    """`block` with packs inserted and every value's dims in memory order."""
    a = _Arranger(block, unit)
    body = a.packed(block.body, frozenset())
    a.settle(body)
    return replace(block, body=a.reordered(body))


class _Arranger:
    def __init__(self, block: Block, unit: UnitAxes):
        self.unit = unit
        self.dtypes = {i.name: i.dtype for i in block.inputs}
        self.dims = {n.name: n.dims for n in walk(block.body) if isinstance(n, Let | Init)}
        for n in walk(block.body):
            if isinstance(n, Let | Init):
                self.dtypes[n.name] = n.dtype
                if n.index_name:
                    self.dims[n.index_name] = n.dims
        self.order: dict[str, tuple[str, ...]] = {}
        self.sizes = block.sizes
        self.streamed = {n.dim for n in walk(block.body) if isinstance(n, Loop) and n.kind == "for"}
        self.packs: dict[tuple[Load, str], Load] = {}

    # -- packing --------------------------------------------------------------------------

    def packed(self, nodes: tuple[Node, ...], varying: frozenset[str]) -> tuple[Node, ...]:
        out: list[Node] = []
        for n in nodes:
            if isinstance(n, Loop) and n.kind == "for":
                inside = {x.name for x in walk(n.body) if isinstance(x, Let | Init | Update | Accumulate)}
                body, before = self._pack_body(n, frozenset(inside) | {n.dim})
                out += [*before, replace(n, body=self.packed(body, varying | {n.dim}))]
            elif isinstance(n, Loop):
                out.append(replace(n, body=self.packed(n.body, varying)))
            else:
                out.append(n)
        return tuple(out)

    def _pack_body(self, loop: Loop, changing: frozenset[str]) -> tuple[tuple[Node, ...], list[Node]]:
        before: list[Node] = []
        body: list[Node] = []
        for n in loop.body:
            p = product_of(n, self.dims[n.name]) if isinstance(n, Let | Accumulate) else None
            if p is not None and p.loads is not None and not self._contiguous(p):
                a, b = p.loads
                for side, mine, other in (("a", a, b), ("b", b, a)):
                    if {mine.tensor} & changing or dims_used(mine) & changing:
                        continue
                    pack = self._pack(mine, other, p, before)
                    args = (pack, other) if side == "a" else (other, pack)
                    assert isinstance(n, Let | Accumulate)
                    n = replace(n, expr=Call("mul", args))
                    break
            body.append(n)
        return tuple(body), before

    def _pack(self, mine: Load, other: Load, p: Product, before: list[Node]) -> Load:
        kept = [d for d in p.dims if d in dims_used(mine) and d not in dims_used(other)]
        dims = tuple(d for d in p.dims if d in dims_used(mine) and d not in kept) + p.rdims + tuple(kept)
        dims = tuple(d for d in dims if d in dims_used(mine))
        key = (mine, kept[-1])
        if key not in self.packs:
            name = free(f"{mine.tensor}_pack", self.dims)
            self.dims[name] = dims
            self.order[name] = dims
            self.dtypes[name] = self.dtypes.get(mine.tensor, DType.F32).compute
            before.append(Let(name, dims, self.dtypes[name], mine))
            self.packs[key] = Load(name, tuple(Index(d) for d in dims))
        return self.packs[key]

    def _contiguous(self, p: Product) -> bool:
        return any(self.contiguous_dim(ld) in p.dims for ld in p.loads or ())

    def contiguous_dim(self, ld: Load) -> str | None:
        """The dim along which consecutive elements of a load are adjacent in memory."""
        if ld.tensor in self.dims:
            dims = self.order.get(ld.tensor)
            return dims[-1] if dims else None
        axis = self.unit.get(ld.tensor)
        return unit_dim(ld.index[axis]) if axis is not None and ld.index else None

    def _near_dims(self, ld: Load) -> frozenset[str]:
        """The dims along which consecutive elements of a load are close in memory: j in `2 * j + 1`."""
        v, axis = self.contiguous_dim(ld), self.unit.get(ld.tensor)
        if v is not None or ld.tensor in self.dims:
            return frozenset(() if v is None else (v,))
        at = ld.index[axis] if axis is not None and ld.index else None
        return frozenset() if at is None or loads(at) else frozenset(dims_used(at))

    # -- choosing orders ------------------------------------------------------------------

    def settle(self, nodes: tuple[Node, ...]) -> None:
        """Fix an order for every value: products first, then values that follow them."""
        states = [n for n in walk(nodes) if not isinstance(n, Loop | Store | Init)]
        for _ in range(2):
            for n in states:
                if isinstance(n, Let | Accumulate):
                    self._settle_product(n)
                if isinstance(n, Let | Update):
                    self._follow(n)
        for name, dims in self.dims.items():
            self.order.setdefault(name, self._by_loads(name, dims, states))

    def _settle_product(self, n: Let | Accumulate) -> None:
        p = product_of(n, self.dims[n.name])
        if p is None or p.loads is None or n.name in self.order:
            return
        for ld in reversed(p.loads):
            v = self.contiguous_dim(ld)
            if v is not None and v in p.dims:
                self.order[n.name] = (*(d for d in p.dims if d != v), v)
                return

    def _follow(self, n: Let | Update) -> None:
        if n.name in self.order or (isinstance(n, Let) and n.reducer is not None):
            return
        dims = self.dims[n.name]
        for ld in loads(n.expr):
            like = self.order.get(ld.tensor)
            if like is not None and set(like) == set(dims):
                self.order[n.name] = like
                return

    def _by_loads(self, name: str, dims: tuple[str, ...], nodes: Sequence[Node]) -> tuple[str, ...]:
        """Last dim: the one along which the fewest tensors that it is computed from are strided (one without the dim is
        the same for all of a vector), and that most of them have contiguous."""
        votes: dict[str, int] = {}
        strided: dict[str, int] = dict.fromkeys(dims, 0)
        for n in nodes:
            if isinstance(n, Let | Accumulate | Update) and n.name == name and not _is_topk(n):
                for ld in loads(n.expr):
                    v, near = self.contiguous_dim(ld), self._near_dims(ld)
                    for d in filter(near.__contains__, strided):
                        votes[d] = votes.get(d, 0) + (d == v)
                    for d in filter((dims_used(ld) - near).__contains__, strided) if near else ():
                        strided[d] += 1
        votes = {d: n for d, n in votes.items() if not self.short(d)} or votes
        if votes and all(map(self.short, votes)):
            votes = {d: 1 for d in dims if d in self.streamed} or votes
        if not votes:
            return dims
        best = min(votes, key=lambda d: (strided[d], -votes[d]))
        return (*(d for d in dims if d != best), best)

    def short(self, d: str) -> bool:
        """Whether a dim cannot fill a vector."""
        e = self.sizes[d]
        return isinstance(e, Const) and int(e.value) < SHORT

    # -- rewriting ------------------------------------------------------------------------

    def reordered(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(self._reorder(n) for n in nodes)

    def _reorder(self, n: Node) -> Node:
        match n:
            case Loop():
                return replace(n, body=self.reordered(n.body))
            case Init():
                return replace(n, dims=self.order[n.name])
            case Let():
                payload = None if n.payload is None else self._expr(n.payload)
                return replace(n, dims=self.order[n.name], expr=self._expr(n.expr), payload=payload)
            case Accumulate():
                payload = None if n.payload is None else self._expr(n.payload)
                return replace(n, expr=self._expr(n.expr), payload=payload)
            case Update() | Store():
                return replace(n, expr=self._expr(n.expr))

    def _expr(self, e: Expr) -> Expr:
        def one(x: Expr) -> Expr | None:
            if not isinstance(x, Load) or x.tensor not in self.dims:
                return None
            at = dict(zip(self.dims[x.tensor], x.index, strict=True))
            return Load(x.tensor, tuple(at[d] for d in self.order[x.tensor]))

        return transform(e, one)


def _is_topk(n: Node) -> bool:
    return isinstance(n, Let | Accumulate) and n.reducer in ("topk", "argmax", "argmin")


class HasStrides(Protocol):
    """A tensor, or what stands for one that is to be made."""

    def stride(self) -> tuple[int, ...]: ...


def unit_axis(x: HasStrides, single: Collection[int] = ()) -> int | None:
    """The last axis of stride 1. Axes of one index may have any stride and count where nothing else does: `single`."""
    unit = [axis for axis, stride in enumerate(x.stride()) if stride == 1]
    return max((a for a in unit if a not in single), default=max(unit, default=None))


def single_axes_of(block: Block) -> tuple[frozenset[int], ...]:
    """`single_axes` of the inputs, then of the results."""
    return tuple(map(single_axes, _shapes(block)))


def usual_units(block: Block) -> tuple[int | None, ...]:
    """`unit_axis` of the inputs, then of the results, if all are row-major."""
    return tuple(map(usual_unit, _shapes(block)))


def _shapes(block: Block) -> list[tuple[Expr, ...]]:
    return [i.shape for i in block.inputs] + [tuple(block.sizes[d] for d in r.dims) for r in block.results]


def single_axes(shape: Sequence[Expr]) -> frozenset[int]:
    """Axes that have one index in every call: the window of a convolution's weights [O, I, 1, 1]."""
    return frozenset(a for a, e in enumerate(shape) if isinstance(e, Const) and e.value == 1)


def usual_unit(shape: Sequence[Expr]) -> int | None:
    """`unit_axis` of a row-major tensor of such a shape."""
    axes = range(len(shape))
    return max((a for a in axes if a not in single_axes(shape)), default=max(axes, default=None))


def unit_dim(index: Expr) -> str | None:
    """The dim that moves an index by one, where there is exactly one: j in `j`, `h * 64 + j`, `j + 1`."""
    match index:
        case Index(d):
            return d
        case Call("add", (a, b)):
            found = [u for u in (unit_dim(a), unit_dim(b)) if u is not None]
            if len(found) == 1:
                others = dims_used(a) | dims_used(b)
                return found[0] if others else None
            return None
        case Call("sub", (a, Const())):
            return unit_dim(a)
    return None
