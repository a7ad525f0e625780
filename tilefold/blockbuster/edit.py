"""Editing of graphs: fresh names, renaming, order, removal of what nothing uses, equality up to names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tilefold.algebra import text as expr_text
from tilefold.algebra.expr import Expr, Load, loads, substitute
from tilefold.blockbuster.ir import Cons, Func, Graph, Head, In, Map, Misc, Node, Out, Param, Reduce, View, arg
from tilefold.names import fresh
from tilefold.tensor.text import show_compute


def consumers(g: Graph) -> dict[str, list[int]]:
    """Positions of the nodes that use each value; -1 for an output of the graph."""
    found: dict[str, list[int]] = {v: [] for v in g.values}
    for k, n in enumerate(g.nodes):
        for v in dict.fromkeys(n.uses):
            found[v].append(k)
    for v in g.outputs:
        found[v].append(-1)
    return found


def producers(g: Graph) -> dict[str, int]:
    """Position of the node that defines each value; graph inputs are absent."""
    return {v: k for k, n in enumerate(g.nodes) for v in n.outs}


def reachable(g: Graph, start: int) -> set[int]:
    """Positions of all nodes that depend on the node at `start`, itself excluded."""
    used, seen, todo = consumers(g), set[int](), [start]
    while todo:
        for v in g.nodes[todo.pop()].outs:
            new = [k for k in used[v] if k >= 0 and k not in seen]
            seen |= set(new)
            todo += new
    return seen


def rename(n: Node, names: Mapping[str, str]) -> Node:
    """The node over other names of its graph; bodies of maps are their own scope."""

    def to(v: str) -> str:
        return names.get(v, v)

    match n:
        case Func():
            return replace(n, out=to(n.out), args=tuple(map(to, n.args)))
        case Reduce():
            return replace(n, out=to(n.out), arg=to(n.arg))
        case Map():
            ins = tuple(replace(i, value=to(i.value)) for i in n.ins)
            outs = tuple(replace(o, name=to(o.name), exponent=o.exponent and to(o.exponent)) for o in n.results)
            return replace(n, ins=ins, results=outs)
        case Head():
            return replace(n, out=to(n.out), arg=to(n.arg))
        case Cons():
            return replace(n, out=to(n.out), first=to(n.first), rest=to(n.rest))
        case View():
            return replace(n, out=to(n.out), arg=to(n.arg))
        case Misc():
            results = tuple(replace(p, name=to(p.name)) for p in n.results)
            return replace(n, results=results, args=tuple(map(to, n.args)))
    raise AssertionError(n)


def apart(g: Graph, taken: set[str], inputs: Mapping[str, str]) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """Nodes and outputs of `g` for use in another graph: inputs replaced, other names made free there."""
    names = dict(inputs)
    for n in g.nodes:
        for v in n.outs:
            names[v] = fresh(v, taken)
    return tuple(rename(n, names) for n in g.nodes), tuple(names[v] for v in g.outputs)


def in_order(nodes: Iterable[Node], inputs: Iterable[str]) -> tuple[Node, ...]:
    """The nodes with each after those it uses, otherwise in the order given. ValueError: a cycle."""
    known, left, out = set(inputs), list(nodes), list[Node]()
    while left:
        ready = next((n for n in left if set(n.uses) <= known), None)
        if ready is None:
            raise ValueError(f"a cycle through {', '.join(left[0].outs)}")
        left.remove(ready)
        out.append(ready)
        known |= set(ready.outs)
    return tuple(out)


def prune(g: Graph) -> Graph:
    """Without nodes, results and operands of maps that nothing uses, at every level."""
    wanted, kept = set(g.outputs), list[Node]()
    for n in reversed(g.nodes):
        if not wanted & set(n.outs):
            continue
        if isinstance(n, Map):
            n = _prune_map(n, wanted)
        wanted |= set(n.uses)
        kept.append(n)
    return replace(g, nodes=tuple(reversed(kept)))


def _prune_map(n: Map, wanted: set[str]) -> Map:
    needed = {o.exponent for o in n.results if o.name in wanted} | wanted
    pairs = [(o, v) for o, v in n.pairs if o.name in needed]
    body = prune(replace(n.body, outputs=tuple(v for _, v in pairs)))
    used = {*body.outputs, *(v for m in body.nodes for v in m.uses)}
    ins = tuple(i for i in n.ins if i.name in used)
    inputs = tuple(p for p in body.inputs if p.name in used)
    return Map(n.dim, ins, replace(body, inputs=inputs), tuple(o for o, _ in pairs), n.start)


def merge_ins(n: Map) -> Map:
    """The map with one operand for each value and way of taking it."""
    first: dict[tuple[str, bool], In] = {}
    names: dict[str, str] = {}
    for i in n.ins:
        names[i.name] = first.setdefault((i.value, i.each), i).name
    kept = tuple(first.values())
    keep = {i.name for i in kept}
    body = Graph(
        tuple(p for p in n.body.inputs if p.name in keep),
        tuple(rename(m, names) for m in n.body.nodes),
        tuple(names.get(v, v) for v in n.body.outputs),
    )
    return replace(n, ins=kept, body=body)


def single(dim: str, ins: Iterable[tuple[str, Param, bool]], nodes: Iterable[Node], outs: Mapping[Out, str]) -> Map:
    """A map; `ins` are (value outside, parameter inside, each), `outs` the results and their values inside."""
    rows = list(ins)
    body = Graph(tuple(p for _, p, _ in rows), tuple(nodes), tuple(outs.values()))
    return Map(dim, tuple(In(v, p.name, each) for v, p, each in rows), body, tuple(outs))


# -- equality up to names ----------------------------------------------------------------------


def canonical(g: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Equal for graphs that differ only in the names of values and the order of independent nodes.

    Inputs count by position. Two nodes that compute the same from the same are still two.
    """
    rows, keys = _keys(g, {p.name: f"input {k}" for k, p in enumerate(g.inputs)})
    return rows, tuple(keys[v] for v in g.outputs)


def _keys(g: Graph, known: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """A row for each node, and a key for each value that says how it is computed."""
    keys, rows = dict(known), list[str]()
    for n in g.nodes:
        if isinstance(n, Map):
            inner, inside = _keys(n.body, {i.name: _digest("each", i.each, keys[i.value]) for i in n.ins})
            by_name = {o.name: inside[v] for o, v in n.pairs}
            for o, v in n.pairs:
                scale = by_name[o.exponent] if o.exponent else ""
                keys[o.name] = _digest(n.dim, n.start, o.reduce, scale, inside[v])
            operands = sorted({(keys[i.value], i.each) for i in n.ins})
            rows.append(_digest("map", n.dim, n.start, operands, inner, sorted(keys[v] for v in n.outs)))
            continue
        if isinstance(n, Func):
            n = _in_reading_order(n)
        row = _digest(_label(n), [keys[v] for v in n.uses])
        rows.append(row)
        keys |= {v: _digest(row, k) for k, v in enumerate(n.outs)}
    return tuple(sorted(rows)), keys


def _in_reading_order(n: Func) -> Func:
    """An elementwise operator with its operands as its expression reads them, each once."""
    if n.expr is None:
        return n
    order = [ld.tensor for ld in loads(n.expr)]
    table: dict[Expr, Expr] = {Load(t, ()): arg(k) for k, t in enumerate(order)}
    args = tuple(n.args[int(t.removeprefix("a"))] for t in order)
    return replace(n, args=args, expr=substitute(n.expr, table))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _label(n: Node) -> tuple[object, ...]:
    match n:
        case Func(_, op, _, expr):
            return op, expr_text.show(expr) if expr is not None else ""
        case Reduce(_, op, _, dim):
            return "reduce", op, dim
        case Head(dim=dim) | Cons(dim=dim):
            return type(n).__name__, dim
        case View(_, _, index, t):
            return "view", tuple(map(expr_text.show, index)), t
        case Misc(results, _, names, compute):
            return "misc", names, show_compute(compute), tuple(p.type for p in results)
    raise AssertionError(n)
