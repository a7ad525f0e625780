"""Rows that are put together of parts of one length, as rows of parts.

Law, for k = q n + r:

    y[i, k] = where(k < n, a[i, k], where(k < 2 n, b[i, k - n], ..))  is
    y[i, q, r] = where(q < 1, a[i, r], where(q < 2, b[i, r], ..))

What each part is made of is then read at the index that it is computed for: the gradients of logits, means and scales
that a layer made side by side, sums of which other gradients are, are made and put together by one kernel, where
another one read all of them from memory before.

Side conditions: y is a result that nothing reads, all that is computed and read along k has the same extent, which
divides y's, and its first place in y is a multiple of it. Rounding: none.
"""

from __future__ import annotations

from tilefold.algebra.expr import Const, Index, dims_used, loads
from tilefold.tensor.index_simplify import const, poly
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.narrow import narrow
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import dims_of
from tilefold.tensor.split_dims import cut


def parts_of_rows(p: Program) -> Program:
    """The program in which such results have an axis more."""
    read = {ld.tensor for c in p.body for ld in loads(c.body)}
    dims = [d for c in p.body for d in dims_of(c)]
    cuts = {
        c.dims[-1]: const(n)
        for c in p.body
        if c.name in p.outputs and c.name not in read and (n := _part(p, c)) and dims.count(c.dims[-1]) == 1
    }
    return narrow(cut(p, cuts)) if cuts else p


def _part(p: Program, c: Compute) -> int:
    """The extent of the parts that a row is put together of; 0 of others."""
    size = p.sizes[c.dims[-1]] if c.dims and c.reducer is None and product_of(c) is None else None
    if not isinstance(size, Const):
        return 0
    k, made, found = c.dims[-1], {x.name for x in p.body}, set[tuple[int, int]]()
    for ld in loads(c.body):
        if ld.tensor not in made or k not in dims_used(ld):
            continue
        terms, extent = poly(ld.index[-1], p.sizes), p.shape_of(ld.tensor)[-1]
        own = any(k in dims_used(e) for e in ld.index[:-1])
        if own or terms.keys() - {(Index(k),), ()} or terms.get((Index(k),)) != 1 or not isinstance(extent, Const):
            return 0
        found.add((int(extent.value), -terms.get((), 0)))
    parts = {n for n, _ in found}
    n = parts.pop() if len(parts) == 1 else 0
    whole = int(size.value)
    return n if 1 < n < whole and whole % n == 0 and all(at % n == 0 for _, at in found) else 0
