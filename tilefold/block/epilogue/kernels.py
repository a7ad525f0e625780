"""Kernels of the form: a matrix product on stored operands, then an epilogue on its output tile.

CODA's abstraction (section 3.1): the main loop is fixed and reads its operands from memory; the
epilogue sees one output tile, vectors and tiles indexed like it, and may store tiles, vectors and
partial reductions. What needs more than a tile is left to other kernels: small ones that combine
partials, and passes over memory where there is no product to attach to.

A kernel is a set of statements with at most one product, whose operands it does not compute, and
`parallel`: dims in whose blocks all of it is computed and read (plain indices). The other dims of
its statements are local to a block, and have to fit: a tile's worth beside a product, a row's else.

Growing is greedy by saved cost (`epilogue.cost`); ties go to program order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilefold.algebra.expr import dims_used, loads
from tilefold.block.epilogue.cost import Cost, Costs, Target
from tilefold.tensor.analysis import Graph, out_dims, plain_axes
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.laws.terms import Gemm, gemms

#: Most elements of a row that a kernel without a product keeps.
LONGEST_ROW = 1 << 15
#: Output tiles are at most this many tiles wide or high (pairs and triples of features).
WIDEST = 3


@dataclass(frozen=True, slots=True)
class Kernel:
    """Members in program order; `product` is the one among them, if any."""

    members: tuple[str, ...]
    product: str | None
    parallel: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kernels:
    """A program cut into kernels in execution order, and what they cost together."""

    program: Program
    kernels: tuple[Kernel, ...]
    cost: Cost


def cut_into_kernels(p: Program, target: Target) -> Kernels:
    """Group every statement of a program in normal form."""
    return _Grower(p, target).run()


class _Grower:
    def __init__(self, p: Program, target: Target):
        self.p, self.target = p, target
        self.g = Graph.of(p)
        self.gemms: dict[str, Gemm] = gemms(p)
        self.costs = Costs(p, self.g, target, frozenset(self.gemms))
        self.once, self.phase = self.costs.once, self.costs.phases()
        self.of: dict[str, Kernel] = {}
        for c in p.body:
            name = c.name if c.name in self.gemms else None
            self.of[c.name] = Kernel((c.name,), name, out_dims(c))
        self.tried: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[Kernel, float] | None] = {}

    @cached_property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """Statements that read each tensor."""
        out: dict[str, list[str]] = {}
        for c in self.p.body:
            for t in dict.fromkeys(ld.tensor for ld in loads(c.body)):
                out.setdefault(t, []).append(c.name)
        return {t: tuple(names) for t, names in out.items()}

    def run(self) -> Kernels:
        while self._step():
            pass
        ordered = self._ordered()
        total = sum((self.costs.kernel(k.members, k.product) for k in ordered), Cost())
        return Kernels(self.p, ordered, total)

    def _step(self) -> bool:
        """Join the pair that saves most."""
        best: tuple[float, Kernel] | None = None
        for a, b in self._pairs():
            found = self._tried(a, b)
            if found is not None and (best is None or found[1] > best[0]) and self._convex(a, b):
                best = (found[1], found[0])
        if best is None:
            return False
        self.of.update(dict.fromkeys(best[1].members, best[1]))
        return True

    def _pairs(self) -> dict[tuple[Kernel, Kernel], None]:
        """Kernels joined by an edge, or by a tensor that both read."""
        out: dict[tuple[Kernel, Kernel], None] = {}
        for c in self.p.body:
            for r in self.g.producers[c.name]:
                out[(self.of[r], self.of[c.name])] = None
        for names in self.readers.values():
            for n, x in enumerate(names):
                for y in names[n + 1 :]:
                    out[(self.of[x], self.of[y])] = None
        return {(a, b): None for a, b in out if (a is not b and (b, a) not in out) or a.members < b.members}

    def _tried(self, a: Kernel, b: Kernel) -> tuple[Kernel, float] | None:
        """The union and what it saves; None where it is no kernel or saves nothing."""
        key = (a.members, b.members)
        if key not in self.tried:
            self.tried[key] = self._joined(a, b)
        return self.tried[key]

    def _joined(self, a: Kernel, b: Kernel) -> tuple[Kernel, float] | None:
        if a is b or (a.product is not None and b.product is not None):
            return None
        if any((m in self.once) != (n in self.once) for m in a.members for n in b.members):
            return None
        names = {*a.members, *b.members}
        if {"early", "late"} <= {self.phase.get(m) for m in names}:
            return None
        members = tuple(c.name for c in self.p.body if c.name in names)
        product = a.product or b.product
        if product is not None and any(r in names for r in self.g.producers[product]):
            return None
        parallel = self._parallel(members, product)
        if parallel is None or (not parallel and (a.parallel or b.parallel)):
            return None
        whole = self.costs.kernel(members, product)
        parts = self.costs.kernel(a.members, a.product) + self.costs.kernel(b.members, b.product)
        saved = parts.total - whole.total
        return (Kernel(members, product, parallel), saved) if saved > 0 else None

    def _parallel(self, members: tuple[str, ...], product: str | None) -> tuple[str, ...] | None:
        """Dims whose blocks hold everything the members pass on; None where the rest does not fit."""
        computes = [self.g.by_name[m] for m in members]
        local: set[str] = set()
        for c in computes:
            if c.name != product:
                local |= set(c.rdims)
            for r in self.g.producers[c.name]:
                if r in members:
                    producer = self.g.by_name[r]
                    local |= set(producer.dims) - plain_axes(c, producer)
        first = self.g.by_name[product] if product is not None else computes[-1]
        chosen = tuple(d for d in out_dims(first) if d not in local and all(d in out_dims(c) for c in computes))
        fits = self._tile_fits(product, chosen) if product is not None else self._rows_fit(computes, chosen)
        return chosen if fits else None

    def _tile_fits(self, product: str, parallel: tuple[str, ...]) -> bool:
        g = self.gemms[product]
        for operand in g.operands:
            side = dims_used(operand) & set(g.compute.dims) - set(parallel)
            if self.g.points(side) > WIDEST * self.target.tile:
                return False
        return bool(parallel)

    def _rows_fit(self, computes: list[Compute], parallel: tuple[str, ...]) -> bool:
        """Without a product: what is local is a piece of a row, or no larger than a tile."""
        for c in computes:
            dims = (*out_dims(c), *c.rdims)
            local = [d for d in dims if d not in parallel]
            points = self.g.points(local)
            rows = all(d not in parallel for d in out_dims(c)[len(out_dims(c)) - len(set(out_dims(c)) & set(local)) :])
            if points > (LONGEST_ROW if rows else WIDEST * self.target.tile):
                return False
        return True

    def _convex(self, a: Kernel, b: Kernel) -> bool:
        """Whether no path leaves the union and returns."""
        inside = {*a.members, *b.members}
        todo = [u for m in inside for u in self.g.consumers[m] if u not in inside]
        seen: set[str] = set()
        while todo:
            x = todo.pop()
            if x in seen:
                continue
            members = self.of[x].members
            seen.update(members)
            for u in (w for m in members for w in self.g.consumers[m]):
                if u in inside:
                    return False
                if u not in seen:
                    todo.append(u)
        return True

    def _ordered(self) -> tuple[Kernel, ...]:
        done: dict[Kernel, None] = {}

        def visit(k: Kernel) -> None:
            if k in done:
                return
            for m in k.members:
                for r in self.g.producers[m]:
                    if self.of[r] is not k:
                        visit(self.of[r])
            done[k] = None

        for c in self.p.body:
            visit(self.of[c.name])
        return tuple(done)
