"""Minimal cuts: which vertices of a network stay on the side of the source when the cheapest edges are cut.

Maximal flow by blocking flows (Dinic, "Algorithm for solution of a problem of maximum flow in networks with power
estimation", 1970). Capacities are whole numbers, so that equal costs stay equal.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

#: Capacity of an edge that is never cut.
NEVER = 1 << 62


class Network:
    """A directed network of n vertices, numbered from 0."""

    def __init__(self, n: int):
        self.left: list[dict[int, int]] = [{} for _ in range(n)]

    def edge(self, a: int, b: int, capacity: int) -> None:
        """Room for more flow from a to b."""
        self.left[a][b] = self.left[a].get(b, 0) + capacity
        self.left[b].setdefault(a, 0)

    def source_side(self, source: int, sink: int) -> set[int]:
        """Vertices before the minimal cut that is nearest to the source."""
        while True:
            far = self._distances(source)
            if sink not in far:
                return set(far)
            self._block(source, sink, far)

    def _distances(self, source: int) -> dict[int, int]:
        """Edges with room from the source, for each vertex that can be reached."""
        far = {source: 0}
        todo = deque([source])
        while todo:
            a = todo.popleft()
            for b, capacity in self.left[a].items():
                if capacity > 0 and b not in far:
                    far[b] = far[a] + 1
                    todo.append(b)
        return far

    def _block(self, source: int, sink: int, far: dict[int, int]) -> None:
        """Send flow along shortest paths until each has a full edge."""
        ahead = {a: [b for b in self.left[a] if far.get(b, -1) == d + 1] for a, d in far.items()}
        path = [source]
        while path:
            a = path[-1]
            if a == sink:
                path = self._send(path)
                continue
            while ahead[a] and self.left[a][ahead[a][-1]] == 0:
                ahead[a].pop()
            if ahead[a]:
                path.append(ahead[a][-1])
                continue
            path.pop()  # no way on from here
            if path:
                ahead[path[-1]].pop()

    def _send(self, path: list[int]) -> list[int]:
        """Send what a path holds; what is left of the path before its first full edge."""
        edges = list(pairwise(path))
        most = min(self.left[a][b] for a, b in edges)
        for a, b in edges:
            self.left[a][b] -= most
            self.left[b][a] += most
        full = next(k for k, (a, b) in enumerate(edges) if self.left[a][b] == 0)
        return path[: full + 1]
