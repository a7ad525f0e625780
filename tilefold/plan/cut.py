"""Ways to cut a group that does not fit one kernel in two, by what they cost.

A cut puts some members, and all that they depend on, into the first kernel and the rest into the second. Its price is
the memory traffic that it adds: a value that crosses is read again, and written if nothing else wanted it in memory;
what both parts read from outside is read twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilefold.algebra.expr import tensors_read
from tilefold.tensor.analysis import Graph
from tilefold.tensor.sizes import estimate

Members = tuple[str, ...]


def cuts(g: Graph, members: Members) -> list[tuple[Members, Members]]:
    """The ways to cut at least two members, each part in program order: the cheapest first, then the most even."""
    inside = frozenset(members)
    order = [c.name for c in g.program.body if c.name in inside]
    found: list[tuple[float, int, Members, Members]] = []
    for first in _first_parts(g, order):
        a = tuple(m for m in order if m in first)
        b = tuple(m for m in order if m not in first)
        found.append((added_bytes(g, a, b), abs(len(a) - len(b)), a, b))
    return [(a, b) for _, _, a, b in sorted(found)]


def _first_parts(g: Graph, order: Sequence[str]) -> Iterable[frozenset[str]]:
    """A member with all it depends on; all but a member and what depends on it; and the first n in order."""
    inside = frozenset(order)
    seen: set[frozenset[str]] = {frozenset(), inside}
    prefix: set[str] = set()
    for m in order:
        prefix.add(m)
        for part in (_closed(m, g.producers, inside), inside - _closed(m, g.consumers, inside), frozenset(prefix)):
            if part not in seen:
                seen.add(part)
                yield part


def _closed(m: str, step: Mapping[str, tuple[str, ...]], inside: frozenset[str]) -> frozenset[str]:
    found, todo = {m}, [m]
    while todo:
        fresh = [r for r in step[todo.pop()] if r in inside and r not in found]
        found.update(fresh)
        todo += fresh
    return frozenset(found)


def added_bytes(g: Graph, a: Members, b: Members) -> float:
    """Bytes of memory traffic that two kernels, b after a, have more than one of both."""
    p = g.program
    both = (*a, *b)
    made = {r: m for m in both for r in g.by_name[m].results}
    read = [{t for m in part for t in tensors_read(g.by_name[m].body)} for part in (a, b)]
    total = 0.0
    for t in read[1]:
        if t in made and made[t] in a:
            c = g.by_name[made[t]]
            total += g.points(c.dims) * p.dtype_of(t).nbytes * (1 if g.escapes(made[t], both) else 2)
        elif t not in made and t in read[0]:
            total += _bytes(g, t)
    return total


def _bytes(g: Graph, tensor: str) -> float:
    n = 1.0
    for e in g.program.shape_of(tensor):
        n *= max(1, estimate(e))
    return n * g.program.dtype_of(tensor).nbytes


def components(g: Graph, members: Members) -> list[Members]:
    """Members that have nothing to do with each other apart: neither uses the other's result, nor do both read one
    tensor from outside."""
    made = {r: m for m in members for r in g.by_name[m].results}
    of = {m: {m} for m in members}
    owner: dict[str, str] = {}
    for m in members:
        for t in tensors_read(g.by_name[m].body):
            other = made.get(t) or owner.setdefault(t, m)
            if of[other] is not of[m]:
                of[other] |= of[m]
                for x in of[m]:
                    of[x] = of[other]
    parts = list({id(of[m]): of[m] for m in members}.values())
    return [tuple(m for m in members if m in part) for part in parts]
