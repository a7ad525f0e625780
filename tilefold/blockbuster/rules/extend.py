"""Rules 6 and 7: bring two maps over y together although one is inside a map over x (Blockbuster, section 3.2).

    rule 6    f; map_x(g)      =  map_x(f; g)                       f is repeated in every iteration
    rule 7    map_x(g)         =  g at x = 0, then map_x(g) from 1   only the first iteration is outside

Three variants, by how the outer y-map and the one inside the x-map hang together: (a) the outer
makes a list that the inner one takes, (b) both take the same input of the graph, (c) both take the
same value that another operator makes. In (a) rule 1, in (b) and (c) rule 2 fuses them afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.algebra.expr import Expr, call, dims_used
from tilefold.blockbuster.edit import apart, in_order, merge_ins, prune
from tilefold.blockbuster.ir import Cons, Func, Graph, Head, In, Map, Node, Out, Param, arg, walk
from tilefold.blockbuster.ops import ELEMENTWISE
from tilefold.blockbuster.rules.fuse_maps import why_not_consecutive, why_not_siblings
from tilefold.blockbuster.rules.law import Law, Match, Refusal
from tilefold.blockbuster.verify import infer
from tilefold.names import fresh

VARIANTS = ("a", "b", "c")


def _meetings(g: Graph) -> Iterator[tuple[str, int, int, int]]:
    """(variant, outer y-map, x-map, y-map in the x-map) for all pairs of maps that hang together."""
    inputs = {p.name for p in g.inputs}
    for variant in VARIANTS:
        for x, wide in enumerate(g.nodes):
            if not isinstance(wide, Map) or wide.start:
                continue
            given = {i.name: i.value for i in wide.ins if not i.each}
            for y, outer in enumerate(g.nodes):
                if not isinstance(outer, Map) or y == x or outer.dim == wide.dim:
                    continue
                for z, inner in enumerate(wide.body.nodes):
                    if not isinstance(inner, Map) or inner.dim != outer.dim:
                        continue
                    taken = {given[v] for v in inner.uses if v in given}
                    made, shared = taken & set(outer.outs), taken & set(outer.uses)
                    found = {"a": made, "b": shared & inputs, "c": shared - inputs}
                    if found[variant] and not (variant != "a" and made):
                        yield variant, y, x, z


def _describe(g: Graph, variant: str, y: int, x: int) -> str:
    outer, wide = g.nodes[y], g.nodes[x]
    assert isinstance(outer, Map) and isinstance(wide, Map)
    return f"{wide.dim}-map over the graph, to meet the {outer.dim}-map of {', '.join(outer.outs)} ({variant})"


def _fusable(g: Graph, variant: str, y: int, z: int) -> str | None:
    """Why two y-maps, now in one graph, would still not be fused."""
    return why_not_consecutive(g, y, z) if variant == "a" else why_not_siblings(g, y, z)


# -- rule 6 ------------------------------------------------------------------------------------


def _why_not_extend(g: Graph, x: int) -> str | None:
    wide = g.nodes[x]
    assert isinstance(wide, Map)
    used = {v for n in g.nodes for v in n.uses}
    if after := [v for v in wide.outs if v in used]:
        return f"{after[0]} is used after the {wide.dim}-map"
    if others := [v for v in g.outputs if v not in wide.outs]:
        return f"{others[0]} is computed outside of the {wide.dim}-map"
    inputs = {p.name for p in g.inputs}
    for i in wide.ins:
        if i.each and i.value not in inputs:
            return f"every iteration takes another entry of {i.value}, which is computed here"
    rest = [n for k, n in enumerate(g.nodes) if k != x]
    if any(isinstance(n, Map) and n.dim == wide.dim for m in rest for n in (m, *_inner(m))):
        return f"another map over {wide.dim} would be inside of it"
    return None


def _inner(n: Node) -> Iterator[Node]:
    if isinstance(n, Map):
        yield from walk(n.body)


def _extended(g: Graph, x: int) -> tuple[Map, dict[str, str]]:
    """The x-map with all other nodes of the graph in its body, and where their values are now."""
    wide = g.nodes[x]
    assert isinstance(wide, Map)
    taken = {p.name for p in g.inputs}
    rest = Graph(g.inputs, tuple(n for k, n in enumerate(g.nodes) if k != x), ())
    names = {p.name: p.name for p in g.inputs}
    moved, _ = apart(rest, taken, names)
    where = dict(names)
    for old, new in zip(rest.nodes, moved, strict=True):
        where |= dict(zip(old.outs, new.outs, strict=True))
    ins = [In(p.name, p.name, False) for p in g.inputs]
    params = list(g.inputs)
    to: dict[str, str] = {}
    for i, p in zip(wide.ins, wide.body.inputs, strict=True):
        if not i.each:
            to[i.name] = where[i.value]
            continue
        to[i.name] = fresh(i.name, taken)
        ins.append(In(i.value, to[i.name], True))
        params.append(Param(to[i.name], p.type))
    nodes, outputs = apart(wide.body, taken, to)
    body = Graph(tuple(params), (*moved, *nodes), outputs)
    return Map(wide.dim, tuple(ins), body, wide.results), where


@dataclass(frozen=True, slots=True)
class ExtendMap(Law):
    """Rule 6. The x-map takes in the whole graph; what was outside is then computed in every iteration."""

    name = "extend map to the entire graph"
    number = 6
    statement = "f; map_x(g) = map_x(f; g) where f does not depend on x"
    condition = (
        "the outputs of the graph are those of the x-map, it takes no list computed here entry by entry, "
        "and the two y-maps can be fused afterwards"
    )

    def attempts(self, g: Graph) -> Iterator[Match | Refusal]:
        for variant, y, x, z in _meetings(g):
            why = _why_not_extend(g, x)
            if why is None:
                big, _ = _extended(g, x)
                why = _fusable(big.body, variant, y - (y > x), len(g.nodes) - 1 + z)
            if why is not None:
                yield Refusal(self, g, (y, x, z), why)
                continue
            wide = g.nodes[x]
            assert isinstance(wide, Map)
            yield Match(self, g, (y, x, z), _describe(g, variant, y, x), wide.dim, variant)

    def apply(self, m: Match) -> Graph:
        big, _ = _extended(m.graph, m.nodes[1])
        return prune(replace(m.graph, nodes=(merge_ins(big),)))


# -- rule 7 ------------------------------------------------------------------------------------


def _uses_position(wide: Map) -> bool:
    """Whether an expression in the body depends on the number of the iteration."""
    return any(isinstance(n, Func) and n.expr is not None and wide.dim in dims_used(n.expr) for n in walk(wide.body))


def _peeled(g: Graph, x: int) -> tuple[Graph, int]:
    """The graph with iteration 0 of the x-map in it, and the position of that copy's first node."""
    wide = g.nodes[x]
    assert isinstance(wide, Map)
    taken = set(g.values)
    heads: list[Node] = []
    to: dict[str, str] = {}
    for i in wide.ins:
        to[i.name] = i.value
        if i.each:
            to[i.name] = fresh(f"{i.name}_0", taken)
            heads.append(Head(to[i.name], i.value, wide.dim))
    copy, firsts = apart(wide.body, taken, to)
    ends: list[Node] = []
    results: list[Out] = []
    for o, first in zip(wide.results, firsts, strict=True):
        rest = fresh(f"{o.name}_rest", taken)
        results.append(replace(o, name=rest))
        ends.append(Cons(o.name, first, rest, wide.dim) if o.reduce is None else _combine(o, first, rest))
    tail = replace(wide, results=tuple(results), start=1)
    before, after = g.nodes[:x], g.nodes[x + 1 :]
    return replace(g, nodes=(*before, *heads, *copy, tail, *ends, *after)), x + len(heads)


def _combine(o: Out, first: str, rest: str) -> Func:
    ops = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
    e: Expr = call(ops[str(o.reduce)], arg(0), arg(1))
    return Func(o.name, ELEMENTWISE, (first, rest), e)


@dataclass(frozen=True, slots=True)
class PeelFirstIteration(Law):
    """Rule 7. The first iteration of the x-map is done in the graph, where its y-map meets the outer one."""

    name = "peel off first iteration"
    number = 7
    statement = "map_x(g) = g at x = 0, followed by map_x(g) from x = 1"
    condition = (
        "nothing in the map depends on the number of the iteration, no sum in it is a significand, "
        "and the two y-maps can be fused afterwards"
    )

    def attempts(self, g: Graph) -> Iterator[Match | Refusal]:
        types = infer(g, _around(g))
        for variant, y, x, z in _meetings(g):
            wide = g.nodes[x]
            assert isinstance(wide, Map)
            why: str | None = None
            if _uses_position(wide):
                why = f"its body depends on the position along {wide.dim}"
            elif any(o.exponent for o in wide.results):
                why = "it accumulates significands, which have to be merged by their exponents"
            elif any(types[i.value].raw for i in wide.ins):
                why = "it takes a whole array"
            else:
                new, copy = _peeled(g, x)
                why = _fusable(new, variant, y if y < x else y + len(new.nodes) - len(g.nodes), copy + z)
            if why is not None:
                yield Refusal(self, g, (y, x, z), why)
                continue
            yield Match(self, g, (y, x, z), f"first iteration of the {wide.dim}-map ({variant})", wide.dim, variant)

    def apply(self, m: Match) -> Graph:
        new, _ = _peeled(m.graph, m.nodes[1])
        return prune(replace(new, nodes=in_order(new.nodes, (p.name for p in new.inputs))))


def _around(g: Graph) -> tuple[str, ...]:
    """Dims that expressions of the graph may name: those of maps around it, which it does not know itself."""
    used = {d for n in walk(g) if isinstance(n, Func) and n.expr is not None for d in dims_used(n.expr)}
    inside = {n.dim for n in walk(g) if isinstance(n, Map)}
    return tuple(sorted(used - inside))
