"""Sums of one element of a window each: what a reduction gives for each place of few.

Law: s[c, k] = sum over r of f(c, k, r), for k = 0 .. n - 1, is s'0[c] at k = 0, s'1[c] at k = 1, ..

The gradient of a weight of one channel a group is such a sum: dw[c, k] = sum over n, y of x[n, c, y + k] dy[n, c, y].
Each element of dy is used for every tap, at the same place of the sums: one pass over both has them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tilefold.algebra.expr import Const, Expr, Index, Load, call, substitute
from tilefold.names import fresh
from tilefold.tensor.index_simplify import const
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.narrow import narrow
from tilefold.tensor.rewrite import prune_dims
from tilefold.tensor.windows import settled


def taps_apart(p: Program, taps: Mapping[str, Sequence[str]]) -> Program:
    """The program with a sum for each element of these dims of statements, of constant extent, and a map of them."""
    if not taps:
        return p
    taken = set(p.names)
    body = [x for c in p.body for x in (_apart(p, c, taps[c.name], taken) if c.name in taps else [c])]
    return narrow(prune_dims(replace(p, body=tuple(body))))


def _apart(p: Program, c: Compute, taps: Collection[str], taken: set[str]) -> list[Compute]:
    counts = [int(e.value) for d in taps if isinstance(e := p.sizes[d], Const)]
    kept = tuple(d for d in c.dims if d not in taps)
    found: list[Compute] = []
    for at in itertools.product(*map(range, counts)):
        body = settled(substitute(c.body, {Index(d): const(k) for d, k in zip(taps, at, strict=True)}), p)
        name = fresh(f"{c.name}_{'_'.join(map(str, at))}", taken)
        found.append(replace(c, name=name, dims=kept, dtype=c.dtype.compute, body=body))
    place: Expr = const(0)
    for d, n in zip(taps, counts, strict=True):
        place = place * n + Index(d)
    read = [Load(x.name, tuple(map(Index, kept))) for x in found]
    picked: Expr = read[-1]
    for k in reversed(range(len(read) - 1)):
        picked = call("where", call("eq", place, const(k)), read[k], picked)
    return [*found, replace(c, body=picked, reducer=None, rdims=())]
