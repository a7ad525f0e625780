"""Which sums by keys (`tensor.keyed`) are additions in any order, and which are folds: the price of either.

    fold       every row looks at all elements: points / LOOKED
    additions  elements / ADDED, the last cache's rate; those of one row wait for each other: a row's / QUEUED;
               zeros are written before, by a launch of its own

The order of additions is another at each call, as of eager's: where torch is to be deterministic all are folds, but
maxima, which are the same in any order.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from tilefold.algebra.expr import Const, Index, Load
from tilefold.names import fresh
from tilefold.plan.hardware import Gpu
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.joined_keys import joined
from tilefold.tensor.keyed import keyed, with_values

#: Indices a row from which on atomic additions queue at few addresses, and eager's sort is faster: 1,048,576 indices of
#: 32 rows of 8 columns (T5's relative biases) took 16 ms on an H200, where all of a step of four layers took eager 14.
CROWDED = 2048
#: Elements a second that are compared with a row and summed, of all multiprocessors: 33 million in 19 us forecast for
#: an H100 where pairs of rows share what is read, in 41 where not.
LOOKED = 1.5e12
#: Elements a second that are added at places of their own, and at one place (H100: 15.4 million in 24 us with what they
#: are computed from; 30 ns each for a row that all indices name).
ADDED, QUEUED = 0.7e12, 3.3e7


def with_sums_added(p: Program, machine: Gpu) -> tuple[Program, frozenset[str]]:
    """The program, and its sums that additions are faster for: each has the elements of all that are added up, and
    computes them itself."""
    ordered = torch.are_deterministic_algorithms_enabled()
    found = frozenset(c.name for c in p.body if not (ordered and c.reducer == "sum") and _pays(p, c, machine))
    if not found:
        return p, found
    p = joined(p, frozenset(c.name for c in p.body if c.name in found and c.reducer == "sum"))
    found &= {c.name for c in p.body}
    p = with_values(p, found)
    return _wide(p, found)


def _wide(p: Program, sums: frozenset[str]) -> tuple[Program, frozenset[str]]:
    """The program in which these sums have at least float32, and maps round them once; the sums' names."""
    taken, body, wide = set(p.names), list[Compute](), set[str]()
    for c in p.body:
        if c.name not in sums:
            body.append(c)
            continue
        total = c if c.dtype is c.dtype.compute else replace(c, name=fresh(c.name, taken), dtype=c.dtype.compute)
        wide.add(total.name)
        body.append(total)
        if total is not c:
            read = Load(total.name, tuple(map(Index, c.dims)))
            body.append(replace(c, reducer=None, rdims=(), body=read))
    return replace(p, body=tuple(body)), frozenset(wide)


def _pays(p: Program, c: Compute, machine: Gpu) -> bool:
    found = keyed(c, p.sizes)
    sizes = [p.sizes[d] for d in (*c.dims, *c.rdims)]
    if found is None or not all(isinstance(n, Const) and int(n.value) > 0 for n in sizes):
        return False
    extent = {d: int(n.value) for d, n in zip((*c.dims, *c.rdims), sizes, strict=True)}  # type: ignore[attr-defined]
    rows, elements = prod(extent[d] for d in found.keys), prod(extent[d] for d in found.dims)
    each = prod(extent[d] for d in c.rdims) / rows
    seconds = max(elements / ADDED, each / QUEUED) + machine.second_kernel
    return seconds < rows * elements / LOOKED
