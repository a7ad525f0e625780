"""Products of differences of streams: each part has a product of its own, so that none is ever in memory.

Law: sum over j of (a[i, j] - b[i, j]) v[j, d] = sum over j of a v - sum over j of b v.

Where a and b are normalised by reductions of their own (two softmaxes: the Differential Transformer, arXiv 2410.05258),
no fold makes a - b in one pass, for that would rescale both by one factor; but each product is a fold, and both are in
one loop. Parts that are read at computed positions (`p[2 h] - p[2 h + 1]`, neighbouring heads) are made there:

    s[h, i] = f(h, i) read at s[2 h, i]     is     s'[h, i] = f(2 h, i)

for all that s is computed of along h. Of a stream all positions are read once, so nothing is computed twice, unless
others read what it is made of as well (a forward that saves its statistics): then the product stays whole. The states
of all parts have to fit on chip: with two of 256 columns each, one kernel takes 2.7 times as long as four (an H200).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Expr, Index, Load, call, dims_used, loads, substitute, transform
from tilefold.names import fresh
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import drop_dead
from tilefold.tensor.streams import ON_CHIP, streaming

#: Parts, most of them.
MOST_PARTS = 4


def distributed(p: Program) -> Program:
    """The program with products of sums of streams, of which each has its own reductions, as sums of products."""
    g = Graph.of(p)
    wide = streaming(g)
    for c in p.body:
        for x in _sums(g, c):
            if (
                any(r in wide for r in (x.name, *g.producers[x.name]))
                and (made := _Parts(g, c, x, wide).run()) is not None
            ):
                return distributed(made)
    return p


def _sums(g: Graph, c: Compute) -> Iterator[Compute]:
    """Maps that a product alone reads, as they are."""
    product = product_of(c)
    if product is None or product.loads is None:
        return
    for ld in product.loads:
        x = g.by_name.get(ld.tensor)
        plain = x is not None and x.reducer is None and ld.index == tuple(map(Index, x.dims))
        if x is not None and plain and not g.escapes(x.name, (c.name, x.name)):
            yield x


@dataclass(slots=True)
class _Parts:
    """One product `c` of a map `x`, taken apart."""

    g: Graph
    c: Compute
    x: Compute
    wide: Container[str]
    taken: set[str] = field(default_factory=set)
    made: list[Compute] = field(default_factory=list)

    def run(self) -> Program | None:
        self.taken = set(self.g.program.names)
        parts = list(_terms(self.x.body, 1))
        product = product_of(self.c)
        assert product is not None
        if not 2 <= len(parts) <= MOST_PARTS or len(parts) * self.g.points(product.cols) > ON_CHIP:
            return None
        placed: list[tuple[int, Expr, frozenset[str]]] = []
        for sign, e in parts:
            found = self.placed(e)
            reductions = frozenset() if found is None else self.normalisers(found)
            if found is None or not reductions or any(reductions & other for _, _, other in placed):
                return None
            placed.append((sign, found, reductions))
        total: Expr | None = None
        for sign, e, _ in placed:
            part = replace(self.x, name=fresh(self.x.name, self.taken), body=e)
            names = {self.x.name: part.name}
            own = replace(
                self.c, name=fresh(self.c.name, self.taken), dtype=DType.F32, body=_reading(self.c.body, names)
            )
            self.made += [part, own]
            term: Expr = Load(own.name, tuple(map(Index, own.dims)))
            total = (
                term
                if total is None and sign > 0
                else call("neg", term)
                if total is None
                else (call("add" if sign > 0 else "sub", total, term))
            )
        assert total is not None
        whole = replace(self.c, body=total, reducer=None, rdims=())
        body: list[Compute] = []
        for c in self.g.program.body:
            body += [*self.made, whole] if c is self.c else [c]
        return drop_dead(replace(self.g.program, body=tuple(body)))

    def normalisers(self, e: Expr) -> frozenset[str]:
        """Reductions over what the product sums that a part needs, which are not products."""
        every = {c.name: c for c in (*self.g.program.body, *self.made)}
        todo, seen = [ld.tensor for ld in loads(e)], set[str]()
        while todo:
            name = todo.pop()
            if name in every and name not in seen:
                seen.add(name)
                todo += [ld.tensor for ld in loads(every[name].body)]
        return frozenset(n for n in seen if every[n].reducer in ("sum", "max", "min") and product_of(every[n]) is None)

    def placed(self, e: Expr) -> Expr | None:
        """A part whose streams are read at their own positions; None where they cannot be made there."""
        at: dict[str, Expr] = {}
        for ld in loads(e):
            c = self.g.by_name.get(ld.tensor)
            for d, ix in zip(c.dims if c is not None else (), ld.index, strict=False):
                if ix != Index(d) and at.setdefault(d, ix) != ix:
                    return None
        if not at:
            return e
        if len(at) > 1:
            return None
        ((dim, position),) = at.items()
        own = dims_used(position)
        if len(own) != 1 or not own <= set(self.x.dims):
            return None
        moved = self.moved(e, dim, position, next(iter(own)))
        return None if moved is None else moved

    def moved(self, e: Expr, dim: str, position: Expr, own: str) -> Expr | None:
        """`e` with all that it reads along `dim` at that position made along `own`."""
        cone = self.cone(e, dim)
        if cone is None or any(own in (*c.dims, *c.rdims) or dim in c.rdims for c in cone):
            return None
        names = {c.name: fresh(f"{c.name}_at", self.taken) for c in cone}
        dims = {c.name: c.dims for c in cone}

        def reads(body: Expr) -> Expr:
            def one(x: Expr) -> Expr | None:
                if not isinstance(x, Load) or x.tensor not in names:
                    return None
                index = (Index(own) if d == dim else ix for d, ix in zip(dims[x.tensor], x.index, strict=True))
                return Load(names[x.tensor], tuple(index))

            return transform(body, one)

        for c in cone:
            body = substitute(reads(c.body), {Index(dim): position})
            self.made.append(
                replace(c, name=names[c.name], dims=tuple(own if d == dim else d for d in c.dims), body=body)
            )
        return reads(e)

    def cone(self, e: Expr, dim: str) -> list[Compute] | None:
        """What `e` is computed of that varies along `dim`, in program order; None: read there at another position, an
        element of several results, or a reduction that others read too, which would be computed again."""
        found: set[str] = set()
        todo: list[tuple[Expr, bool]] = [(e, False)]
        while todo:
            body, inner = todo.pop()
            for ld in loads(body):
                c = self.g.by_name.get(ld.tensor)
                if c is None or dim not in c.dims or self.in_memory(c):
                    continue
                if (inner and ld.index[c.dims.index(dim)] != Index(dim)) or c.index_name is not None:
                    return None
                if c.name not in found:
                    found.add(c.name)
                    todo.append((c.body, True))
        own = {*found, self.x.name}
        if any(self.g.by_name[n].reducer is not None and self.g.escapes(n, own) for n in found):
            return None
        return [c for c in self.g.program.body if c.name in found]

    def in_memory(self, c: Compute) -> bool:
        """Whether `c` is a product that does not stream (a projection of queries): what it makes is read there, at any
        position, where two products of every other head's columns would be none that a library takes whole."""
        return product_of(c) is not None and c.name not in self.wide


def _terms(e: Expr, sign: int) -> Iterator[tuple[int, Expr]]:
    match e:
        case Call("add", (a, b)):
            yield from (*_terms(a, sign), *_terms(b, sign))
        case Call("sub", (a, b)):
            yield from (*_terms(a, sign), *_terms(b, -sign))
        case Cast(a, dtype) if dtype.is_float and not dtype.rounds:
            yield from _terms(a, sign)
        case _:
            yield sign, e


def _reading(e: Expr, names: dict[str, str]) -> Expr:
    return transform(e, lambda x: Load(names[x.tensor], x.index) if isinstance(x, Load) and x.tensor in names else None)
