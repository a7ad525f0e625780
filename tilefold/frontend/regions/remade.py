"""What a region reads of an earlier one, and can compute itself of less, is computed there again.

Operators that are not covered cut a graph, and what stands on both sides of a cut is often the same maps of the same
arguments: a gradient reads on one side of a scan's kernel what its argument was made of on the other. Each of them in
memory is written and read; a few vectors that they are made of are not.

A later region's choice is exact, a minimal cut: tensors are vertices, one that it reads costs its bytes, twice if it
is written for that alone; one that is computed again costs its elements, by what a GPU's vector units compute in the
time of a byte. Arguments, and results of anything but maps, can only be read; what the region's own operators read in
any case, it reads once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch

from tilefold.frontend.regions.flow import NEVER, Network
from tilefold.frontend.regions.levels import Unit

Node = torch.fx.Node
#: Maps of an element in the time of a byte from a GPU's memory: a map takes about one instruction an element.
MAPS_A_BYTE = 16


def remade(
    units: Sequence[Unit], levels: Mapping[Node, int], nbytes: Mapping[Node, int], again: Mapping[Node, int]
) -> dict[int, set[Node]]:
    """What each level computes again. units: in an order in which they could run; nbytes: of arguments; again: elements
    of units that may be computed again."""
    found: dict[int, set[Node]] = {}
    by_node = {u.node: u for u in units}
    readers: dict[Node, set[int]] = {u.node: set() for u in units}
    for u in units:
        for n in u.reads:
            readers[n].add(levels[u.node])
    for level in sorted({levels[u.node] for u in units if u.covered}):
        own = [u for u in units if levels[u.node] == level]
        crossing = {n for u in own for n in u.reads if levels[n] < level}
        makers = _makers(crossing, level, by_node, levels, again)
        if not crossing.isdisjoint(makers):
            chosen = _chosen(own, level, makers, by_node, levels, readers, nbytes, again)
            found[level] = chosen
            for n in chosen:
                readers[n].discard(level)
            for i in (i for n in chosen for i in by_node[n].reads if i not in chosen):
                readers[i].add(level)
    return {level: nodes for level, nodes in found.items() if nodes}


def unneeded(units: Sequence[Unit], levels: Mapping[Node, int], copies: Mapping[int, AbstractSet[Node]]) -> set[Node]:
    """Units that no level needs any more where they were: all that reads them computes them itself."""
    found: set[Node] = set()
    users: dict[Node, list[Node]] = {}
    for u in reversed(units):
        for n in u.reads:
            users.setdefault(n, []).append(u.node)
        places = [(v, levels[v]) for v in users.get(u.node, ()) if v not in found]
        places += [(v, at) for v in users.get(u.node, ()) for at, nodes in copies.items() if v in nodes]
        copied = any(u.node in nodes for nodes in copies.values())
        if copied and not (u.returned or u.fixed) and all(u.node in copies.get(at, ()) for _, at in places):
            found.add(u.node)
    return found


def _makers(
    crossing: AbstractSet[Node],
    level: int,
    units: Mapping[Node, Unit],
    levels: Mapping[Node, int],
    again: Mapping[Node, int],
) -> set[Node]:
    """Units of earlier levels that may be computed again, of what crosses into a level."""
    found: set[Node] = set()
    todo = list(crossing)
    while todo:
        n = todo.pop()
        if n not in found and n in again and levels[n] < level:
            found.add(n)
            todo += units[n].reads
    return found


def _chosen(
    own: Sequence[Unit],
    level: int,
    makers: AbstractSet[Node],
    units: Mapping[Node, Unit],
    levels: Mapping[Node, int],
    readers: Mapping[Node, AbstractSet[int]],
    nbytes: Mapping[Node, int],
    again: Mapping[Node, int],
) -> set[Node]:
    """The makers that a level computes again, by a minimal cut. Costs in bytes times `MAPS_A_BYTE`."""
    wanted = {n for u in own for n in (*u.reads, *u.arguments) if levels.get(n, -1) != level}
    sources = {n for m in makers for n in (*units[m].reads, *units[m].arguments)}
    place = {n: k for k, n in enumerate(n for n in (*nbytes, *units) if n in wanted | makers | sources)}
    net = Network(2 * len(place) + 2)
    source, sink = 2 * len(place), 2 * len(place) + 1
    for n, k in place.items():
        size = units[n].nbytes if n in units else nbytes[n]
        alone = n in units and not units[n].returned and readers[n] - {levels[n]} <= {level}
        net.edge(2 * k, 2 * k + 1, MAPS_A_BYTE * size * (2 if alone and n in makers else 1))
        net.edge(source, 2 * k, max(again[n], 1) if n in makers else NEVER)
        if n in wanted:
            net.edge(2 * k + 1, sink, NEVER)
        for i in (*units[n].reads, *units[n].arguments) if n in makers else ():
            net.edge(2 * place[i] + 1, 2 * k, NEVER)
    kept = net.source_side(source, sink)
    return {n for n in makers if 2 * place[n] not in kept}
