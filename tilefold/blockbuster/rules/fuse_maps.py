"""Rules 1 and 2: two maps over the same dim become one (Blockbuster, section 3.1).

rule 1    map_x(F) then map_x(G)              =  map_x(F then G)
rule 2    map_x(F) beside map_x(G)            =  map_x(F beside G)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.blockbuster.edit import apart, consumers, in_order, merge_ins, prune, reachable
from tilefold.blockbuster.ir import Graph, In, Map, Node, Out, Param
from tilefold.blockbuster.rules.law import Law, Match, Refusal
from tilefold.names import free


def why_not_consecutive(g: Graph, u: int, v: int) -> str | None:
    """Why map v, which uses map u, cannot be fused into it; None if it can."""
    first, second = g.nodes[u], g.nodes[v]
    assert isinstance(first, Map) and isinstance(second, Map)
    if first.start != second.start:
        return f"one of them starts at iteration {max(first.start, second.start)}"
    lists = {o.name for o in first.results if o.reduce is None}
    for i in second.ins:
        if i.value in first.outs and i.value not in lists:
            return f"{i.value} is complete only after the last iteration"
        if i.value in lists and not i.each:
            return f"every iteration of the second needs all of {i.value}"
    if between := [k for k in reachable(g, u) if k != v and v in reachable(g, k)]:
        return f"there is a path through {', '.join(g.nodes[between[0]].outs)}"
    return None


def why_not_siblings(g: Graph, u: int, v: int) -> str | None:
    """Why two maps with a common parent cannot be fused; None if they can."""
    first, second = g.nodes[u], g.nodes[v]
    assert isinstance(first, Map) and isinstance(second, Map)
    if first.start != second.start:
        return f"one of them starts at iteration {max(first.start, second.start)}"
    if v in reachable(g, u) or u in reachable(g, v):
        return "one of them depends on the other"
    return None


def fuse(g: Graph, u: int, v: int) -> Graph:
    """One map in place of two: u's body, then v's, with lists between them replaced by items."""
    first, second = g.nodes[u], g.nodes[v]
    assert isinstance(first, Map) and isinstance(second, Map)
    inside = {o.name: value for o, value in first.pairs if o.reduce is None}
    taken = set(first.body.values)
    ins, params, names = list(first.ins), list(first.body.inputs), dict[str, str]()
    for i, p in zip(second.ins, second.body.inputs, strict=True):
        if i.value in inside:
            names[i.name] = inside[i.value]
            continue
        name = free(i.name, taken)
        taken.add(name)
        names[i.name] = name
        ins.append(In(i.value, name, i.each))
        params.append(Param(name, p.type))
    nodes, outputs = apart(second.body, taken, names)
    used = consumers(g)
    results: list[tuple[Out, str]] = [
        (o, value) for o, value in first.pairs if o.reduce is not None or set(used[o.name]) != {v}
    ]
    results += list(zip(second.results, outputs, strict=True))
    body = Graph(tuple(params), (*first.body.nodes, *nodes), tuple(value for _, value in results))
    fused = merge_ins(Map(first.dim, tuple(ins), body, tuple(o for o, _ in results), first.start))
    rest: list[Node] = [n for k, n in enumerate(g.nodes) if k not in (u, v)]
    rest.insert(min(u, v), fused)
    return prune(replace(g, nodes=in_order(rest, (p.name for p in g.inputs))))


@dataclass(frozen=True, slots=True)
class FuseConsecutiveMaps(Law):
    """Rule 1. The list between two maps is not stored: each item is used where it is made."""

    name = "fuse consecutive maps"
    number = 1
    statement = "map_x(F) followed by map_x(G) is map_x(F followed by G)"
    condition = "the second takes the first's lists item by item, and no other path leads from the first to it"

    def attempts(self, g: Graph) -> Iterator[Match | Refusal]:
        for u, first in enumerate(g.nodes):
            for v, second in enumerate(g.nodes):
                if not (isinstance(first, Map) and isinstance(second, Map)) or first.dim != second.dim:
                    continue
                if u == v or not set(first.outs) & set(second.uses):
                    continue
                why = why_not_consecutive(g, u, v)
                if why is not None:
                    yield Refusal(self, g, (u, v), why)
                    continue
                passed = ", ".join(x for x in first.outs if x in second.uses)
                yield Match(self, g, (u, v), f"{first.dim}-maps through {passed}", first.dim)

    def apply(self, m: Match) -> Graph:
        return fuse(m.graph, *m.nodes)


@dataclass(frozen=True, slots=True)
class FuseSiblingMaps(Law):
    """Rule 2. Two maps that read the same value read it once."""

    name = "fuse sibling maps"
    number = 2
    statement = "map_x(F) and map_x(G) of a common operand are one map_x(F, G)"
    condition = "neither depends on the other"

    def attempts(self, g: Graph) -> Iterator[Match | Refusal]:
        for u, first in enumerate(g.nodes):
            for v, second in enumerate(g.nodes[u + 1 :], u + 1):
                if not (isinstance(first, Map) and isinstance(second, Map)) or first.dim != second.dim:
                    continue
                shared = [x for x in dict.fromkeys(first.uses) if x in second.uses]
                if not shared:
                    continue
                why = why_not_siblings(g, u, v)
                if why is not None:
                    yield Refusal(self, g, (u, v), why)
                    continue
                yield Match(self, g, (u, v), f"{first.dim}-maps that read {', '.join(shared)}", first.dim)

    def apply(self, m: Match) -> Graph:
        return fuse(m.graph, *m.nodes)
