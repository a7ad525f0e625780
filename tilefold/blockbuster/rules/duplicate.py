"""Rule 8: a row scale that several matrix products share is computed for each (Blockbuster, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.blockbuster.edit import consumers, in_order, rename
from tilefold.blockbuster.ir import Graph, Map
from tilefold.blockbuster.rules.law import Law, Match, Refusal
from tilefold.blockbuster.rules.patterns import mapped_row_op, product
from tilefold.names import fresh


@dataclass(frozen=True, slots=True)
class DuplicateMappedScale(Law):
    """Rule 8. Each product gets a scale (or shift) of its own, which rules 4 and 5 can then move."""

    name = "duplicate mapped scale"
    number = 8
    statement = "y = f(x) used twice is y = f(x) and y' = f(x) used once each"
    condition = "every use of the scaled (or shifted) matrix is the left side of a matrix product over its blocks"

    def attempts(self, g: Graph) -> Iterator[Match | Refusal]:
        used = consumers(g)
        for at, n in enumerate(g.nodes):
            row = mapped_row_op(n, ("row_scale", "row_shift"))
            if row is None or len(used[row.out]) < 2:
                continue
            for k in used[row.out]:
                p = product(g.nodes[k]) if k >= 0 else None
                if p is None or p.left.value != row.out or p.inner != row.dim:
                    what = "an output" if k < 0 else ", ".join(g.nodes[k].outs)
                    yield Refusal(self, g, (at,), f"{row.out} is also used by {what}, which is no product of it")
                    break
            else:
                note = f"{row.out} for each of its {len(used[row.out])} products"
                yield Match(self, g, (at, used[row.out][-1]), note, row.dim)

    def apply(self, m: Match) -> Graph:
        g, (at, user) = m.graph, m.nodes
        scale, reader = g.nodes[at], g.nodes[user]
        assert isinstance(scale, Map) and isinstance(reader, Map)
        (old,) = scale.outs
        new = fresh(old, set(g.values))
        ins = tuple(replace(i, value=new) if i.value == old else i for i in reader.ins)
        nodes = [replace(reader, ins=ins) if k == user else n for k, n in enumerate(g.nodes)]
        nodes.insert(user, rename(scale, {old: new}))
        return replace(g, nodes=in_order(nodes, (p.name for p in g.inputs)))
