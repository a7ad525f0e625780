"""The levels of a graph's operators: which run together, so that few bytes cross from one region to the next.

Every unit (an operator with the results that are picked from it) gets a level: even if Tilefold covers it, odd if not.
A unit's level is at least that of what it reads, one more where coverage changes. The units of one level and kind run
together; edges never lead to a lower level, nor leave a level and return.

First every unit is as early as it can be. Then, level by level, those move to the next level of their kind for which
fewer bytes are moved: what a later region alone needs is computed there, unless what it is computed from is larger than
it is. Between two levels the choice is exact, a minimal cut (as rematerialisation in AOTAutograd is one). Tensors are
vertices. One that crosses costs its bytes twice, written and read; once, if it is written anyway; an argument or a
tensor of an earlier level costs them where both levels read it. What cannot wait is the source, readers in later levels
are the sink. Of equal cuts the latest is taken, so that a level that nothing has to wait for disappears.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilefold.frontend.regions.flow import NEVER, Network

Node = torch.fx.Node


@dataclass(frozen=True, slots=True)
class Unit:
    """An operator.

    reads: the units that it depends on. arguments: the graph's that it reads. after: the level after which its sizes
    are known (-1: from the start). first: the lowest that it may have (negative: before all regions, if it is uncovered
    and reads nothing of theirs). nbytes: of its results. fixed: a size is read off it, so that it stays as early as it
    can be. returned: it is a result of the graph, and written anyway.
    """

    node: Node
    covered: bool
    reads: tuple[Node, ...]
    arguments: tuple[Node, ...]
    after: int
    first: int
    nbytes: int
    fixed: bool
    returned: bool


def earliest(unit: Unit, levels: Mapping[Node, int]) -> int:
    """The lowest level of its kind at which a unit can run."""
    at = max([unit.first, *(levels[n] for n in unit.reads)])
    if unit.after >= 0:
        at = max(at, unit.after + 1)
    if at < 0 and not unit.covered:
        return at
    parity = 0 if unit.covered else 1
    return max(at, 0) + (max(at, 0) + parity) % 2


def settled(units: Sequence[Unit], levels: Mapping[Node, int], nbytes: Mapping[Node, int]) -> dict[Node, int]:
    """The levels with units delayed where fewer bytes are moved. units: in an order in which they could run; nbytes: of
    arguments."""
    found = dict(levels)
    users: dict[Node, list[Node]] = {}
    weights = {**nbytes, **{u.node: u.nbytes for u in units}}
    for u in units:
        users.setdefault(u.node, [])
        for n in (*u.reads, *u.arguments):
            users.setdefault(n, []).append(u.node)
    for level in range(max(found.values(), default=0) - 1):
        here = [u for u in units if found[u.node] == level]
        if here:
            found.update((n, level + 2) for n in _delayed(here, level, found, users, weights))
    return found


def _delayed(
    here: Sequence[Unit],
    level: int,
    levels: Mapping[Node, int],
    users: Mapping[Node, Sequence[Node]],
    weights: Mapping[Node, int],
) -> list[Node]:
    """The units of a level that move to the next of their kind."""
    free: set[Node] = set()
    for u in reversed(here):
        if not u.fixed and all(n in free or levels[n] >= level + 2 for n in users[u.node]):
            free.add(u.node)
    if not free:
        return []
    own = {u.node for u in here}
    given = dict.fromkeys(n for u in here for n in (*u.reads, *u.arguments) if n not in own)
    place = {n: k for k, n in enumerate([*(u.node for u in here), *given])}
    net = Network(2 * len(place) + 2)
    source, sink = 2 * len(place), 2 * len(place) + 1
    for u in here:
        written = u.returned or any(levels[n] == level + 1 for n in users[u.node])
        net.edge(2 * place[u.node], 2 * place[u.node] + 1, u.nbytes if written else 2 * u.nbytes)
        if u.node not in free:
            net.edge(source, 2 * place[u.node], NEVER)
    for n in given:
        net.edge(2 * place[n], 2 * place[n] + 1, weights[n])
    for n, k in place.items():
        for user in users[n]:
            if user in own:
                net.edge(2 * k + 1, 2 * place[user], NEVER)
                net.edge(2 * place[user], 2 * k, NEVER)  # what runs early reads early
            elif levels[user] >= level + 2 if n in own else levels[user] == level + 2:
                net.edge(2 * k + 1, sink, NEVER)
    early = net.source_side(source, sink)
    return [u.node for k, u in enumerate(here) if 2 * k not in early]
