"""Operator DAGs as bit masks: ideals (down-sets), and the candidates between nested ideals.

Node k is bit k; nodes are in topological order. A *candidate* is a set of nodes that one kernel could
compute: S = J \\ I for ideals I < J, which is the same as a convex set. Every partition of the DAG
into kernels that can run one after the other is a chain of ideals, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dag:
    """`preds[k]` and `succs[k]` are masks of node k's direct neighbours."""

    names: tuple[str, ...]
    preds: tuple[int, ...]
    succs: tuple[int, ...]

    @staticmethod
    def of(names: Sequence[str], producers: Mapping[str, Iterable[str]]) -> Dag:
        """From names in topological order; ValueError where a producer comes after its consumer."""
        at = {n: k for k, n in enumerate(names)}
        preds, succs = [0] * len(names), [0] * len(names)
        for k, name in enumerate(names):
            for r in producers.get(name, ()):
                if at[r] >= k:
                    raise ValueError(f"{r} does not come before {name}")
                preds[k] |= 1 << at[r]
                succs[at[r]] |= 1 << k
        return Dag(tuple(names), tuple(preds), tuple(succs))

    @property
    def everything(self) -> int:
        return (1 << len(self.names)) - 1

    def mask(self, members: Iterable[str]) -> int:
        at = {n: k for k, n in enumerate(self.names)}
        return sum(1 << at[m] for m in set(members))

    def members(self, mask: int) -> tuple[str, ...]:
        """Names of a set of nodes, in topological order."""
        return tuple(self.names[k] for k in bits(mask))

    def ready(self, done: int) -> int:
        """Nodes outside the ideal `done` whose producers are all in it."""
        found = 0
        for k in bits(self.everything & ~done):
            if self.preds[k] & ~done == 0:
                found |= 1 << k
        return found

    def ready_after(self, ready: int, step: int, done: int) -> int:
        """`ready(done)`, from the ready nodes before `step` (the last part of `done`) ran."""
        found = ready & ~step
        for k in bits(step):
            for u in bits(self.succs[k] & ~done):
                if self.preds[u] & ~done == 0:
                    found |= 1 << u
        return found

    def descendants(self) -> tuple[int, ...]:
        """For each node, the mask of the nodes that depend on it (itself not included)."""
        return _closed(self.succs, reversed(range(len(self.names))))

    def ancestors(self) -> tuple[int, ...]:
        """For each node, the mask of the nodes that it depends on (itself not included)."""
        return _closed(self.preds, range(len(self.names)))

    def convex(self, mask: int) -> bool:
        """Whether no path leaves the set and returns."""
        below = self.descendants()
        after = 0
        for k in bits(mask):
            after |= below[k]
        return not any(below[k] & mask for k in bits(after & ~mask))


def _closed(direct: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """What each node reaches in one step or more; `order`: of the nodes, those that a node reaches before it."""
    found = [0] * len(direct)
    for k in order:
        for u in bits(direct[k]):
            found[k] |= found[u] | 1 << u
    return tuple(found)


def bits(mask: int) -> Iterator[int]:
    """Positions of the ones, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def piece(mask: int, links: Sequence[int]) -> int:
    """The part of a set that the symmetric relation `links` (masks by node) joins to its lowest node."""
    reached = todo = mask & -mask
    while todo:
        k = todo.bit_length() - 1
        fresh = links[k] & mask & ~reached
        reached |= fresh
        todo = (todo ^ (1 << k)) | fresh
    return reached


def connected(mask: int, links: Sequence[int]) -> bool:
    """Whether the set is one piece under `links`, and not empty."""
    return mask != 0 and piece(mask, links) == mask
