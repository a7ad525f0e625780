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

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

Node = torch.fx.Node
_NEVER = 1 << 62


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
    net = _Network(2 * len(place) + 2)
    source, sink = 2 * len(place), 2 * len(place) + 1
    for u in here:
        written = u.returned or any(levels[n] == level + 1 for n in users[u.node])
        net.edge(2 * place[u.node], 2 * place[u.node] + 1, u.nbytes if written else 2 * u.nbytes)
        if u.node not in free:
            net.edge(source, 2 * place[u.node], _NEVER)
    for n in given:
        net.edge(2 * place[n], 2 * place[n] + 1, weights[n])
    for n, k in place.items():
        for user in users[n]:
            if user in own:
                net.edge(2 * k + 1, 2 * place[user], _NEVER)
                net.edge(2 * place[user], 2 * k, _NEVER)  # what runs early reads early
            elif levels[user] >= level + 2 if n in own else levels[user] == level + 2:
                net.edge(2 * k + 1, sink, _NEVER)
    early = net.source_side(source, sink)
    return [u.node for k, u in enumerate(here) if 2 * k not in early]


class _Network:
    """Maximal flow by shortest augmenting paths (Edmonds and Karp 1972): graphs here have few tensors worth a cut."""

    def __init__(self, n: int):
        self.left: list[dict[int, int]] = [{} for _ in range(n)]

    def edge(self, a: int, b: int, capacity: int) -> None:
        self.left[a][b] = self.left[a].get(b, 0) + capacity
        self.left[b].setdefault(a, 0)

    def source_side(self, source: int, sink: int) -> set[int]:
        """Vertices before the minimal cut that is nearest to the source."""
        while True:
            came = self._search(source)
            if sink not in came:
                return set(came)
            path = list(_back(came, sink))
            most = min(self.left[a][b] for a, b in path)
            for a, b in path:
                self.left[a][b] -= most
                self.left[b][a] += most

    def _search(self, source: int) -> dict[int, int]:
        came = {source: source}
        todo = deque([source])
        while todo:
            a = todo.popleft()
            for b, capacity in self.left[a].items():
                if capacity > 0 and b not in came:
                    came[b] = a
                    todo.append(b)
        return came


def _back(came: Mapping[int, int], end: int) -> Iterable[tuple[int, int]]:
    while came[end] != end:
        yield came[end], end
        end = came[end]
