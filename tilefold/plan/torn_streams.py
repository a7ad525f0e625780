"""Streams that are in memory all the same: a product whose result was copied for each of its ends (`tensor.streams`),
where no kernel could be made of one end, so that this end's product is a call of its own.

Computing it again saves less then, for the others could read it: the cheaper way is taken. And 16 bits of it differ
from what they compute: the sum in a softmax's gradient, of rounded products p[j] dp[j], is subtracted from dp[j] that
was not rounded. In the first rows of causal attention, of few keys, that is all there is (error of the keys' gradient:
eager's four times).
"""

from __future__ import annotations

from collections.abc import Collection

from tilefold.block.fuse import Fused
from tilefold.plan.selected import Calls, priced
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Program
from tilefold.tensor.product import product_of
from tilefold.tensor.streams import Pays, streams


def torn(p: Program, copies: Collection[frozenset[str]], fused: Fused, pays: Pays | None) -> frozenset[str]:
    """Products of `p` that stream, one copy of which is written by its kernel. copies: made of p's streams, with their
    ends; fused: what became of them. pays: see `streams`."""
    if not copies:
        return frozenset()
    g, own, every = Graph.of(fused.program), Graph.of(p), streams(p, pays)
    written = {m for k in fused.kernels for m in k.plan.group.members if g.escapes(m, k.plan.group.members)}
    products = {m for m in written if product_of(g.by_name[m]) is not None}
    found = set[str]()
    for s in every:
        made = [m for m in s.members if product_of(own.by_name[m]) is not None]
        whole = {own.points(own.by_name[m].dims) for m in made}  # no ends, whose first stages are products too
        of = frozenset().union(*(c for c in copies if not c.isdisjoint((*s.members, *s.ends)))).difference(s.ends)
        if any(g.points(g.by_name[m].dims) in whole for m in products & of):
            found.update(made)
    return frozenset(found)


def seconds(fused: Fused, target: GpuTarget, calls: Calls) -> float:
    """What a fused program takes: its kernels' forecasts, and prices of what none is of (products that ended up alone,
    which a library computes, and its calls)."""
    found = 0.0
    for x in priced(fused, target, calls):
        kernels = [k for k in fused.kernels if k.plan.group.members == x.members]
        alone = len(x.members) == 1 and product_of(Graph.of(fused.program).by_name[x.members[0]]) is not None
        forecast = None if x.members in calls or alone else target.predicted(kernels)
        found += x.cost.seconds if forecast is None else forecast.seconds
    return found
