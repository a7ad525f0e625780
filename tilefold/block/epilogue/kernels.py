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

from tilefold.algebra.expr import dims_used
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
    """A program cut into kernels in execution order, and what they cost together.

    `once`: statements that depend on parameters alone; `late`: those that depend on a late input.
    """

    program: Program
    kernels: tuple[Kernel, ...]
    cost: Cost
    target: Target
    once: frozenset[str]
    late: frozenset[str]


def cut_into_kernels(p: Program, target: Target) -> Kernels:
    """Group every statement of a program in normal form."""
    return _Grower(p, target).run()


class _Grower:
    """Kernels by number while they grow; `of` maps a statement to its kernel's number."""

    def __init__(self, p: Program, target: Target):
        self.p, self.target = p, target
        self.g = Graph.of(p)
        self.gemms: dict[str, Gemm] = gemms(p)
        self.costs = Costs(p, self.g, target)
        self.once, self.phase = self.costs.once, self.costs.phases()
        self.position = {c.name: n for n, c in enumerate(p.body)}
        self.crossing = {
            (c.name, r): set(self.g.by_name[r].dims) - plain_axes(c, self.g.by_name[r])
            for c in p.body
            for r in self.g.producers[c.name]
        }
        self.kernels: dict[int, Kernel] = {}
        self.of: dict[str, int] = {}
        for n, c in enumerate(p.body):
            self.kernels[n] = Kernel((c.name,), c.name if c.name in self.gemms else None, out_dims(c))
            self.of[c.name] = n
        self.links = self._links()
        self.tried: dict[tuple[int, int], tuple[Kernel, float] | None] = {}

    def run(self) -> Kernels:
        while self._step():
            pass
        ordered = self._ordered()
        total = sum((self.costs.kernel(k.members, k.product) for k in ordered), Cost())
        late = frozenset(m for m, phase in self.phase.items() if phase == "late")
        return Kernels(self.p, ordered, total, self.target, self.once, late)

    def _links(self) -> tuple[tuple[str, str], ...]:
        """Statements joined by an edge, or by a tensor that both read."""
        out: dict[tuple[str, str], None] = {}
        readers: dict[str, list[str]] = {}
        for c in self.p.body:
            for r in self.g.producers[c.name]:
                out[(r, c.name)] = None
            for t in self.costs.read_by[c.name]:
                readers.setdefault(t, []).append(c.name)
        for names in readers.values():
            out.update(dict.fromkeys((x, y) for n, x in enumerate(names) for y in names[n + 1 :]))
        return tuple(out)

    def _step(self) -> bool:
        """Join the pair that saves most."""
        best: tuple[float, int, int, Kernel] | None = None
        pairs = dict.fromkeys(
            (a, b) if a < b else (b, a) for x, y in self.links if (a := self.of[x]) != (b := self.of[y])
        )
        for a, b in pairs:
            if (a, b) not in self.tried:
                self.tried[a, b] = self._joined(self.kernels[a], self.kernels[b])
            found = self.tried[a, b]
            if found is not None and (best is None or found[1] > best[0]) and self._convex(a, b):
                best = (found[1], a, b, found[0])
        if best is None:
            return False
        _, a, b, whole = best
        number = max(self.kernels) + 1
        del self.kernels[a], self.kernels[b]
        self.kernels[number] = whole
        self.of.update(dict.fromkeys(whole.members, number))
        return True

    def _joined(self, a: Kernel, b: Kernel) -> tuple[Kernel, float] | None:
        """The union and what it saves; None where it is no kernel or saves nothing."""
        if a.product is not None and b.product is not None:
            return None
        if (a.members[0] in self.once) != (b.members[0] in self.once):
            return None
        names = {*a.members, *b.members}
        if {"early", "late"} <= {self.phase.get(m) for m in names}:
            return None
        members = tuple(sorted(names, key=self.position.__getitem__))
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
                    local |= self.crossing[c.name, r]
        first = self.g.by_name[product] if product is not None else computes[-1]
        chosen = tuple(d for d in out_dims(first) if d not in local and all(d in out_dims(c) for c in computes))
        fits = self._tile_fits(product, computes, chosen) if product is not None else self._rows_fit(computes, chosen)
        return chosen if fits else None

    def _tile_fits(self, product: str, computes: list[Compute], parallel: tuple[str, ...]) -> bool:
        """Beside a product: what is local is the product's tile, laid out in pairs or triples at most."""
        g = self.gemms[product]
        tile = {*g.compute.dims, *parallel}
        for c in computes:
            if c.name != product and self.g.points({*out_dims(c), *c.rdims} - tile) > WIDEST:
                return False
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

    def _convex(self, a: int, b: int) -> bool:
        """Whether no path leaves the union and returns."""
        inside = {*self.kernels[a].members, *self.kernels[b].members}
        todo = [u for m in inside for u in self.g.consumers[m] if u not in inside]
        seen: set[str] = set()
        while todo:
            x = todo.pop()
            if x in seen:
                continue
            members = self.kernels[self.of[x]].members
            seen.update(members)
            for u in (w for m in members for w in self.g.consumers[m]):
                if u in inside:
                    return False
                if u not in seen:
                    todo.append(u)
        return True

    def _ordered(self) -> tuple[Kernel, ...]:
        done: dict[int, None] = {}

        def visit(k: int) -> None:
            if k in done:
                return
            for m in self.kernels[k].members:
                for r in self.g.producers[m]:
                    if self.of[r] != k:
                        visit(self.of[r])
            done[k] = None

        for c in self.p.body:
            visit(self.of[c.name])
        return tuple(self.kernels[k] for k in done)
