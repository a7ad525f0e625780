"""The meaning of a block program: blocks of torch tensors, maps as loops, for any numbers of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch

from tilefold.algebra.evaluate import COMBINE, Env, Grid, apply, evaluate, identity_of, reader
from tilefold.algebra.expr import Expr, Load, dims_used
from tilefold.blockbuster.ir import Cons, Func, Graph, Head, Map, Misc, Node, Out, Program, Reduce, Type, View
from tilefold.blockbuster.ops import BLOCK_OPS, ELEMENTWISE, union
from tilefold.blockbuster.verify import blocked_dims, infer
from tilefold.tensor.interp import run_compute
from tilefold.tensor.sizes import extent

Index = tuple[int, ...]


@dataclass(slots=True)
class Value:
    """Items by position in the lists (`type.lists` order); a raw array is one item of its own shape."""

    type: Type
    items: dict[Index, torch.Tensor]

    @property
    def item(self) -> torch.Tensor:
        return self.items[()]

    def at(self, dim: str, k: int) -> Value:
        """Entry k along a list dim."""
        n = self.type.lists.index(dim)
        return Value(self.type.at(dim), {(*i[:n], *i[n + 1 :]): x for i, x in self.items.items() if i[n] == k})


class Interpreter:
    """One run: sizes in elements, cuts of every dim into blocks, and the current block of enclosing maps."""

    def __init__(self, sizes: Mapping[str, int], syms: Mapping[str, int], blocks: Mapping[str, int], exact: bool):
        self.sizes, self.syms, self.exact = sizes, syms, exact
        self.cuts = {d: _cuts(n, blocks.get(d, 1)) for d, n in sizes.items()}
        self.current: dict[str, int] = {}

    def graph(self, g: Graph, given: Mapping[str, Value]) -> dict[str, Value]:
        values = dict(given)
        for n in g.nodes:
            self.node(n, values)
        return values

    def node(self, n: Node, values: dict[str, Value]) -> None:
        match n:
            case Func(out, op, args, expr):
                items = [values[a] for a in args]
                if op == ELEMENTWISE:
                    assert expr is not None
                    values[out] = self.elementwise(expr, items)
                else:
                    item = BLOCK_OPS[op].item(*(v.type.item for v in items))
                    assert item is not None
                    values[out] = Value(Type((), item), {(): BLOCK_OPS[op].run(*(v.item for v in items))})
            case Map():
                self.map(n, values)
            case Reduce(out, op, a, dim):
                v = values[a]
                total = self.nothing(op, v.type.at(dim))
                for i in sorted(v.items):
                    total = apply(COMBINE[op], total, v.items[i])
                values[out] = Value(v.type.at(dim), {(): total})
            case Head(out, a, dim):
                values[out] = values[a].at(dim, 0)
            case Cons(out, first, rest, _):
                head = {(0, *i): x for i, x in values[first].items.items()}
                values[out] = Value(values[rest].type, {**head, **values[rest].items})
            case View(out, a, index, t):
                values[out] = self.split(self.gather(values[a].item, index, t), (*_axes(t),), t)
            case Misc():
                self.misc(n, values)

    def elementwise(self, e: Expr, args: list[Value]) -> Value:
        item = union(tuple(v.type.item for v in args))
        known = {d: s for v in args for d, s in zip(v.type.item, v.item.shape, strict=True)}
        ranges = {d: (self.range(d)[0], self.range(d)[0] + known[d]) for d in item}
        outer = {d: self.range(d) for d in sorted(dims_used(e) - set(item))}
        grid = Grid({**outer, **ranges})
        table = {f"a{k}": v for k, v in enumerate(args)}

        def tile(ld: Load, _: Grid) -> torch.Tensor:
            v = table[ld.tensor]
            order = [v.type.item.index(d) for d in item if d in v.type.item]
            shape = [v.item.shape[v.type.item.index(d)] if d in v.type.item else 1 for d in item]
            return v.item.permute(order).reshape([1] * len(outer) + shape)

        env = Env(reader({}), self.sizes, self.syms, self.exact, tile)
        x = evaluate(e, grid, env).broadcast_to(grid.shape)
        return Value(Type((), item), {(): x.reshape(grid.shape[len(outer) :])})

    def map(self, n: Map, values: dict[str, Value]) -> None:
        inner = infer(n.body, (*self.current, n.dim)) if n.start else None
        rounds: list[dict[str, Value]] = []
        for k in range(n.start, len(self.cuts[n.dim])):
            self.current[n.dim] = k
            given = {i.name: values[i.value].at(n.dim, k) if i.each else values[i.value] for i in n.ins}
            rounds.append(self.graph(n.body, given))
            del self.current[n.dim]
        for o, v in n.pairs:
            if o.reduce is None:
                t = rounds[0][v].type if rounds else (inner or {})[v]
                items = {(k, *i): x for k, r in enumerate(rounds, n.start) for i, x in r[v].items.items()}
                values[o.name] = Value(Type((n.dim, *t.lists), t.item), items)
            elif not rounds:
                values[o.name] = Value((inner or {})[v], {(): self.nothing(o.reduce, (inner or {})[v])})
            else:
                values[o.name] = Value(rounds[0][v].type, {(): self.fold(n, o, v, rounds)})

    def fold(self, n: Map, o: Out, v: str, rounds: list[dict[str, Value]]) -> torch.Tensor:
        """A reduced out; one with an exponent is rescaled when the running max moves."""
        total = rounds[0][v].item
        if o.exponent is None:
            for r in rounds[1:]:
                total = apply(COMBINE[str(o.reduce)], total, r[v].item)
            return total
        (z,) = (inner for out, inner in n.pairs if out.name == o.exponent)
        held, axes = rounds[0][z].item, rounds[0][v].type.item
        at = [axes.index(d) for d in rounds[0][z].type.item]
        for r in rounds[1:]:
            new = torch.maximum(held, r[z].item)
            old_scale, scale = (_spread(_factor(x, new), at, len(axes)) for x in (held, r[z].item))
            total, held = total * old_scale + r[v].item * scale, new
        return total

    def misc(self, n: Misc, values: dict[str, Value]) -> None:
        tensors = {name: self.join(values[a]) for a, name in zip(n.args, n.names, strict=True)}
        env = Env(reader(tensors), self.sizes, self.syms, self.exact)
        results = run_compute(n.compute, env)
        for p, name in zip(n.results, n.compute.results, strict=True):
            values[p.name] = self.split(results[name], n.compute.dims, p.type)

    # -- blocks ---------------------------------------------------------------------------

    def range(self, dim: str) -> tuple[int, int]:
        """Elements of the block a dim is at, or all of them."""
        return self.cuts[dim][self.current[dim]] if dim in self.current else (0, self.sizes[dim])

    def nothing(self, op: str, t: Type) -> torch.Tensor:
        shape = [b - a for a, b in (self.range(d) for d in t.item)]
        dtype = torch.float64 if self.exact else torch.float32
        return torch.full(shape, identity_of(op, dtype), dtype=dtype)

    def gather(self, x: torch.Tensor, index: tuple[Expr, ...], t: Type) -> torch.Tensor:
        grid = Grid({d: self.range(d) for d in _axes(t)})
        env = Env(reader({}), self.sizes, self.syms, self.exact)
        return reader({"x": x})("x", tuple(evaluate(i, grid, env) for i in index)).broadcast_to(grid.shape)

    def split(self, x: torch.Tensor, axes: tuple[str, ...], t: Type) -> Value:
        """A whole array cut into items."""
        if t.raw:
            return Value(t, {(): x})
        x = x.permute([axes.index(d) for d in _axes(t)])
        out: dict[Index, torch.Tensor] = {}
        for at in product(*(range(len(self.cuts[d])) for d in t.lists)):
            where = dict(zip(t.lists, at, strict=True))
            part = x[tuple(slice(*self.cuts[d][where[d]]) if d in where else slice(None) for d in _axes(t))]
            out[at] = part.reshape([s for d, s in zip(_axes(t), part.shape, strict=True) if d in t.item])
        return Value(t, out)

    def join(self, v: Value, axes: tuple[str, ...] | None = None) -> torch.Tensor:
        """The whole array of a list of items, with these axes (default: lists, then other item axes)."""
        if v.type.raw:
            return v.item
        names = _axes(v.type)
        sample = next(iter(v.items.values()))
        whole = sample.new_zeros([self.sizes[d] for d in names])
        for at, x in v.items.items():
            where = dict(zip(v.type.lists, at, strict=True))
            place = tuple(slice(*self.cuts[d][where[d]]) if d in where else slice(None) for d in names)
            whole[place] = x.reshape(whole[place].shape)
        return whole if axes is None else whole.permute([names.index(d) for d in axes])


def run(
    p: Program,
    inputs: Mapping[str, torch.Tensor],
    *,
    blocks: Mapping[str, int] | None = None,
    syms: Mapping[str, int] | None = None,
    exact: bool = True,
) -> dict[str, torch.Tensor]:
    """Outputs by name. `exact`: in float64.

    blocks: how many a dim has; 1 where absent, and for batch-like dims always one an element.
    """
    bound = dict(syms or {})
    sizes = {d: extent(e, bound) for d, e in p.sizes.items()}
    blocked = blocked_dims(p.graph)
    it = Interpreter(
        sizes, bound, {d: (blocks or {}).get(d, 1) if d in blocked else n for d, n in sizes.items()}, exact
    )
    given = {}
    for i in p.graph.inputs:
        x = inputs[i.name].double() if exact and inputs[i.name].is_floating_point() else inputs[i.name]
        given[i.name] = it.split(x, p.arrays[i.name].axes, i.type)
    values = it.graph(p.graph, given)
    return {name: it.join(values[name], p.arrays[name].axes) for name in p.graph.outputs}


def _axes(t: Type) -> tuple[str, ...]:
    """Axes of the array that a list of items is: batch-like list dims, then item axes in order."""
    return (*(d for d in t.lists if d not in t.item), *t.item)


def _cuts(size: int, blocks: int) -> list[tuple[int, int]]:
    """At most `blocks` non-empty ranges that cover `size` elements."""
    step = max(1, -(-size // max(1, blocks)))
    return [(a, min(a + step, size)) for a in range(0, size, step)] or [(0, 0)]


def _factor(z: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """exp(z - new); 0 for a sum of nothing, also where the other is nothing too."""
    return torch.where(torch.isneginf(z), torch.zeros_like(z), torch.exp(z - new))


def _spread(x: torch.Tensor, at: list[int], rank: int) -> torch.Tensor:
    shape = [1] * rank
    for axis, size in zip(at, x.shape, strict=True):
        shape[axis] = size
    return x.reshape(shape)
