"""Recomputation: maps that a plan stores only for other kernels, computed again in those instead.

A 0-1 programme over a finished plan. Kernel K picks one variant v = (R, W): the stored maps R that it computes again
from their own operands, and the results W that it writes (none: the kernel is dropped).

    minimise    sum of cost(v) y[v]
    such that   sum over the variants of K of y[v] = 1                                     for each kernel K
                y[v] <= sum of y[u] over the variants u of t's kernel that write t          for each v that reads t

No cycle can arise: what a map reads is known before the kernel that the map was in. Solved by SciPy's HiGHS; the copies
are made in the program, which is then planned again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations

import numpy as np

from tilefold.algebra.expr import tensors_read
from tilefold.names import fresh
from tilefold.tensor.analysis import Graph, renamed
from tilefold.tensor.ir import Compute, Input, Program
from tilefold.tensor.rewrite import drop_dead

#: Most maps that one kernel may compute again.
MOST = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """A variant of kernel number `kernel`. `program`: what it computes, alone (None: nothing, it is dropped)."""

    kernel: int
    again: tuple[str, ...]
    written: frozenset[str]
    program: Program | None = field(compare=False)

    @property
    def reads(self) -> frozenset[str]:
        """Tensors that it reads, program inputs included."""
        return frozenset() if self.program is None else frozenset(i.name for i in self.program.inputs)


def choices(
    p: Program, kernels: Sequence[tuple[str, ...]], apart: frozenset[str] = frozenset(), most: float = math.inf
) -> list[Choice]:
    """All variants of all kernels (members in program order, kernels in the order they run); none where there are more
    than `most` (a kernel of n stored maps has 2^n). `apart`: library calls."""
    g = Graph.of(p)
    owner = {m: k for k, members in enumerate(kernels) for m in members}
    stored = {
        m
        for m in owner
        if g.by_name[m].reducer is None and m not in {*p.outputs, *apart} and g.escapes(m, kernels[owner[m]])
    }
    out: dict[Choice, None] = {}
    for k, members in enumerate(kernels):
        near = [m for m in sorted(_maps_above(g, members, stored)) if owner[m] != k]
        needed = [m for m in members if g.escapes(m, members)]
        optional = [m for m in needed if m in stored]
        for again in _subsets(near[: 2 * MOST], MOST):
            for kept in _subsets(optional, len(optional)):
                written = frozenset(m for m in needed if m not in optional or m in kept)
                out[_choice(p, g, k, members, again, written)] = None
                if len(out) > most:
                    return []
    return list(out)


def _choice(
    p: Program, g: Graph, k: int, members: tuple[str, ...], again: tuple[str, ...], written: frozenset[str]
) -> Choice:
    if not written:
        return Choice(k, (), written, None)
    return Choice(k, again, written, part(p, g, {*members, *again}, written))


def part(p: Program, g: Graph, members: set[str], written: frozenset[str]) -> Program:
    """The program of these members alone: what they need from outside is its input, what is `written` its output."""
    live: set[str] = set()
    todo = [m for m in written]
    while todo:
        m = todo.pop()
        if m in members and m not in live:
            live.add(m)
            todo += g.producers[m]
    body = tuple(c for c in p.body if c.name in live)
    mine = {r for c in body for r in c.results}
    read = {t for c in body for t in tensors_read(c.body)} - mine
    inputs = [i for i in p.inputs if i.name in read]
    inputs += [
        Input(r, p.dtype_of(r), p.shape_of(r)) for c in p.body for r in c.results if r in read and c.name not in live
    ]
    outputs = tuple(r for c in body if c.name in written for r in c.results)
    return replace(p, inputs=tuple(inputs), body=body, outputs=outputs)


def _maps_above(g: Graph, members: tuple[str, ...], stored: set[str]) -> set[str]:
    """Stored maps that the members read, directly or through other stored maps."""
    found: set[str] = set()
    todo = list(members)
    while todo:
        for r in g.producers[todo.pop()]:
            if r in stored and r not in found and r not in members:
                found.add(r)
                todo.append(r)
    return found


def _subsets(items: Sequence[str], most: int) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(items, n) for n in range(min(most, len(items)) + 1))


def solve(p: Program, found: Sequence[Choice], cost: Callable[[Choice], float]) -> list[Choice]:
    """The cheapest variant of each kernel such that everything read is written."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 (half a second to load)

    owner = {r: c.name for c in p.body for r in c.results}
    costs = np.array([0.0 if v.program is None else cost(v) for v in found])
    rows: list[np.ndarray] = []
    low: list[float] = []
    high: list[float] = []
    for k in sorted({v.kernel for v in found}):
        rows.append(np.array([float(v.kernel == k) for v in found]))
        low.append(1.0)
        high.append(1.0)
    for n, v in enumerate(found):
        for t in filter(v.reads.__contains__, owner):
            row = np.array([float(owner[t] in u.written) for u in found])
            row[n] -= 1.0
            rows.append(row)
            low.append(0.0)
            high.append(np.inf)
    scale = costs.max() or 1.0
    done = milp(
        costs / scale,
        constraints=LinearConstraint(np.array(rows), np.array(low), np.array(high)),
        bounds=Bounds(0, 1),
        integrality=np.ones(len(found)),
    )
    assert done.x is not None, done.message  # keeping every kernel as it is is always feasible
    return [v for v, y in zip(found, done.x, strict=True) if y > 0.5]


def rewritten(p: Program, kernels: Sequence[tuple[str, ...]], chosen: Sequence[Choice]) -> Program:
    """The program with a copy of each map for every kernel that computes it again; what nothing reads is dropped, but
    for dims: kernels without a parallel dim need one that no statement has (`block.fuse.UNIT`)."""
    taken = set(p.names)
    body: dict[str, list[Compute]] = {c.name: [c] for c in p.body}
    by_name = {c.name: c for c in p.body}
    for v in chosen:
        if not v.again:
            continue
        names = {m: fresh(f"{m}_again", taken) for m in v.again}
        for m in v.again:
            c = by_name[m]
            body[m].append(replace(c, name=names[m], body=renamed(c.body, names)))
        for m in kernels[v.kernel]:
            body[m][0] = replace(body[m][0], body=renamed(body[m][0].body, names))
    return replace(drop_dead(replace(p, body=tuple(c for c in p.body for c in body[c.name]))), sizes=p.sizes)
