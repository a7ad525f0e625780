"""Types of all values of a block program, and the rules that the grammar does not enforce."""

from __future__ import annotations

from collections.abc import Mapping

from tilefold.algebra.expr import dims_used, tensors_read
from tilefold.blockbuster.ir import Cons, Func, Graph, Head, Map, Misc, Node, Program, Reduce, Type, View
from tilefold.blockbuster.ops import BLOCK_OPS, ELEMENTWISE, REDUCTIONS, union
from tilefold.errors import VerifyError


def verify(p: Program) -> Program:
    """`p` itself; VerifyError naming the node that breaks a rule."""
    types = infer(p.graph)
    for v in p.graph.inputs:
        for d in (*v.type.lists, *v.type.item):
            if d not in p.sizes:
                raise VerifyError(f"dim {d} of {v.name} has no size")
        if v.name not in p.arrays:
            raise VerifyError(f"input {v.name} has no array")
    for name in p.graph.outputs:
        if name not in p.arrays:
            raise VerifyError(f"output {name} has no array")
        if types[name].raw or set(p.arrays[name].axes) != {*types[name].lists, *types[name].item}:
            raise VerifyError(f"output {name} has axes {p.arrays[name].axes}, its blocks {types[name]}")
    return p


def infer(g: Graph, around: tuple[str, ...] = ()) -> dict[str, Type]:
    """Types of the values of one graph (inner graphs are checked). `around`: dims of the maps it is in."""
    types: dict[str, Type] = {}
    for p in g.inputs:
        _define(types, p.name, p.type)
    for n in g.nodes:
        for v in n.uses:
            if v not in types:
                raise VerifyError(f"{v} is used before it is defined: {_head(n)}")
        for name, t in _results(n, types, around):
            _define(types, name, t)
    for v in g.outputs:
        if v not in types:
            raise VerifyError(f"output {v} is not a value of its graph")
    return types


def _define(types: dict[str, Type], name: str, t: Type) -> None:
    if name in types:
        raise VerifyError(f"{name} is defined twice")
    if len(set(t.lists)) != len(t.lists) or len(set(t.item)) != len(t.item):
        raise VerifyError(f"{name} has a dim twice")
    types[name] = t


def _head(n: Node) -> str:
    kind = f"map over {n.dim}" if isinstance(n, Map) else getattr(n, "op", type(n).__name__.lower())
    return f"{', '.join(n.outs)} = {kind}({', '.join(n.uses)})"


def _results(n: Node, types: Mapping[str, Type], around: tuple[str, ...]) -> list[tuple[str, Type]]:
    match n:
        case Func():
            return [(n.out, _func(n, types, around))]
        case Map():
            return _map(n, types, around)
        case Reduce(out, op, a, dim):
            t = types[a]
            if op not in REDUCTIONS or t.lists != (dim,):
                raise VerifyError(f"a reduction takes a list of items over its dim: {_head(n)}")
            return [(out, t.at(dim))]
        case Head(out, a, dim):
            if dim not in types[a].lists:
                raise VerifyError(f"{a} is no list over {dim}: {_head(n)}")
            return [(out, types[a].at(dim))]
        case Cons(out, first, rest, dim):
            if types[rest] != Type((dim, *types[first].lists), types[first].item):
                raise VerifyError(f"{first} does not fit before {rest}: {_head(n)}")
            return [(out, types[rest])]
        case View(out, a, _, t):
            if not types[a].raw or t.raw:
                raise VerifyError(f"a view is of a raw array: {_head(n)}")
            return [(out, t)]
        case Misc(results, args, names, compute):
            if len(args) != len(names) or not set(names) >= tensors_read(compute.body):
                raise VerifyError(f"operands are missing: {_head(n)}")
            return [(p.name, p.type) for p in results]
    raise AssertionError(n)


def _func(n: Func, types: Mapping[str, Type], around: tuple[str, ...]) -> Type:
    for a in n.args:
        if types[a].buffered:
            raise VerifyError(f"{a} is a list, not an item: {_head(n)}")
    items = tuple(types[a].item for a in n.args)
    if n.op == ELEMENTWISE:
        if n.expr is None or not tensors_read(n.expr) <= {f"a{k}" for k in range(len(items))}:
            raise VerifyError(f"an elementwise operator needs an expression over its arguments: {_head(n)}")
        item = union(items)
        if loose := dims_used(n.expr) - {*item, *around}:
            raise VerifyError(f"index {', '.join(sorted(loose))} is not in scope: {_head(n)}")
        return Type((), item)
    op = BLOCK_OPS.get(n.op)
    if op is None or op.arity != len(items):
        raise VerifyError(f"unknown operator or wrong number of operands: {_head(n)}")
    found = op.item(*items)
    if found is None:
        raise VerifyError(f"shapes {', '.join(map(str, items))} ({op.constraint} wanted): {_head(n)}")
    return Type((), found)


def _map(n: Map, types: Mapping[str, Type], around: tuple[str, ...]) -> list[tuple[str, Type]]:
    if n.dim in around:
        raise VerifyError(f"two nested maps over {n.dim}: {_head(n)}")
    if len(n.ins) != len(n.body.inputs) or len(n.results) != len(n.body.outputs):
        raise VerifyError(f"operands do not match the body: {_head(n)}")
    for i, p in zip(n.ins, n.body.inputs, strict=True):
        t = types[i.value]
        if i.each and n.dim not in t.lists:
            raise VerifyError(f"{i.value} is no list over {n.dim}: {_head(n)}")
        want = t.at(n.dim) if i.each else t
        if i.name != p.name or p.type != want:
            raise VerifyError(f"{i.value} is {want} inside, not {p.type}: {_head(n)}")
    inside = infer(n.body, (*around, n.dim))
    reduced = {o.name: o.reduce for o in n.results}
    out: list[tuple[str, Type]] = []
    for o, v in n.pairs:
        t = inside[v]
        if o.reduce is None:
            if n.dim in t.lists or t.raw:
                raise VerifyError(f"{v} cannot be listed over {n.dim}: {_head(n)}")
            out.append((o.name, Type((n.dim, *t.lists), t.item)))
            continue
        if t.buffered or o.reduce not in REDUCTIONS or n.dim in t.item:
            raise VerifyError(f"{v} is not an item that can be reduced over {n.dim}: {_head(n)}")
        if o.exponent is not None and (o.reduce != "sum" or reduced.get(o.exponent) != "max"):
            raise VerifyError(f"the exponent of {o.name} must be a running max: {_head(n)}")
        out.append((o.name, t))
    return out


def blocked_dims(g: Graph, around: tuple[str, ...] = ()) -> frozenset[str]:
    """Dims that are an axis of some item; all others have one element a block."""
    found = {d for t in infer(g, around).values() for d in t.item}
    for n in g.nodes:
        if isinstance(n, Map):
            found |= blocked_dims(n.body, (*around, n.dim))
    return frozenset(found)
