"""Rule 3: a reduction joins the map that makes its list (Blockbuster, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.blockbuster.edit import consumers, in_order, producers, prune
from tilefold.blockbuster.ir import Graph, Map, Out, Reduce
from tilefold.blockbuster.rules.law import Law, Match, Refusal


@dataclass(frozen=True, slots=True)
class FuseMapReduction(Law):
    """Rule 3. reduce_x(map_x(F)) is a serial loop that accumulates F's items as they come."""

    name = "fuse map with reduction"
    number = 3
    statement = "reduce(op, map_x(F)) = the loop over x of acc = acc op F"
    condition = "the reduction is over the map's dim; a list with other uses is still stored"

    def attempts(self, g: Graph) -> Iterator[Match | Refusal]:
        made = producers(g)
        for r, n in enumerate(g.nodes):
            if not isinstance(n, Reduce) or n.arg not in made:
                continue
            m = made[n.arg]
            source = g.nodes[m]
            if not isinstance(source, Map):
                yield Refusal(self, g, (m, r), f"{n.arg} is put together from several maps")
                continue
            out = next(o for o in source.results if o.name == n.arg)
            if out.reduce is not None or source.dim != n.dim or source.start:
                yield Refusal(self, g, (m, r), f"{n.arg} is no list over all of {n.dim} made by one map")
                continue
            yield Match(self, g, (m, r), f"{n.dim}-map with the {n.op} of {n.arg}", n.dim)

    def apply(self, m: Match) -> Graph:
        g, (at, r) = m.graph, m.nodes
        source, reduce = g.nodes[at], g.nodes[r]
        assert isinstance(source, Map) and isinstance(reduce, Reduce)
        alone = consumers(g)[reduce.arg] == [r]
        pairs = [(o, v) for o, v in source.pairs if not (alone and o.name == reduce.arg)]
        value = next(v for o, v in source.pairs if o.name == reduce.arg)
        pairs.append((Out(reduce.out, reduce.op), value))
        body = replace(source.body, outputs=tuple(v for _, v in pairs))
        fused = replace(source, body=body, results=tuple(o for o, _ in pairs))
        rest = [fused if k == at else n for k, n in enumerate(g.nodes) if k != r]
        return prune(replace(g, nodes=in_order(rest, (p.name for p in g.inputs))))
