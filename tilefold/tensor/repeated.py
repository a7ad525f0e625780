"""Statements that compute what an earlier one has already computed.

    the same statement   same dims in the same order, same reducer, dtype and body; a reduction's body may read elements
                         from a map that another has in itself (the exponentials of a softmax, beside its logarithm's)
    the same product     of two tensors, whose dims are bound names: those of the same extents are the same (a b and its
                         transpose, which have other rows)
    its transpose        s[i, j] = sum[k] a[i, k] b[j, k], t[i, j] = sum[k] b[i, k] a[j, k]:  t[i, j] = s[j, i], for
                         factors commute. Where maps alone read t: what folds it would read s across.

Side condition: not both outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilefold.algebra.expr import Expr, Load, dims_used, rename_dims, tensors_read
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import dims_of, rename_loads, substitute_map

#: A tensor, and where each axis of it is one of what stands for it.
_Alias = tuple[str, tuple[int, ...]]


def drop_repeated(p: Program) -> Program:
    """Readers of what is computed again read what was computed first."""
    seen: dict[object, tuple[Compute, tuple[int, ...]]] = {}
    alias: dict[str, _Alias] = {}
    body: list[Compute] = []
    folded = _folded(p)
    maps = {c.name: c for c in p.body if c.reducer is None and c.dtype.is_float and not c.dtype.rounds}
    for c in p.body:
        if alias and not tensors_read(c.body).isdisjoint(alias):
            c = replace(c, body=rename_loads(c.body, lambda n: _read(n, alias)))
        if c.name in maps:
            maps[c.name] = c
        key, order = _key(p, c, maps)
        first = seen.get(key)
        turned = first is not None and first[1] != order
        if first is None or set(c.results) & set(p.outputs) or (turned and c.name in folded):
            seen.setdefault(key, (c, order))
            body.append(c)
        else:
            at = tuple(order.index(n) for n in first[1])
            alias.update({mine: (name, at) for mine, name in zip(c.results, first[0].results, strict=True)})
    return replace(p, body=tuple(body))


def _read(n: Load, alias: dict[str, _Alias]) -> Load | None:
    found = alias.get(n.tensor)
    return None if found is None else Load(found[0], tuple(n.index[at] for at in found[1]))


def _element(c: Compute, maps: Mapping[str, Compute]) -> Expr:
    """What a statement has of an element, with the maps that a reduction reads written out."""

    def one(n: Load) -> Expr | None:
        m = maps.get(n.tensor)
        return substitute_map(m, n) if m is not None and m.dtype is c.dtype.compute else None

    return c.body if c.reducer is None else rename_loads(c.body, one)


def _key(p: Program, c: Compute, maps: Mapping[str, Compute]) -> tuple[object, tuple[int, ...]]:
    """What statements that compute the same have in common, and which of its dims each axis of the result is."""
    found = product_of(c)
    plain = tuple(range(len(c.dims)))
    if found is None or found.loads is None or found.left == found.right:
        return (c.dims, c.rdims, _element(c, maps), c.reducer, c.dtype, c.index_name is None), plain
    ways = [_factors(p, c, *pair) for pair in (found.loads, found.loads[::-1])]
    return min(ways, key=repr)


def _factors(p: Program, c: Compute, a: Load, b: Load) -> tuple[object, tuple[int, ...]]:
    """The key of a product, with its dims named in the order in which these factors have them."""
    dims = dims_of(c)
    used = dict.fromkeys(d for ld in (a, b) for ix in ld.index for d in dims if d in dims_used(ix))
    names = {d: n for n, d in enumerate((*used, *(d for d in dims if d not in used)))}
    bound = {d: f"@{n}" for d, n in names.items()}
    kept = tuple(sorted(names[d] for d in c.dims))
    sides = rename_dims(a, bound), rename_dims(b, bound)
    key = (sides, tuple(p.sizes[d] for d in names), kept, c.reducer, c.dtype)
    return key, tuple(names[d] for d in c.dims)


def _folded(p: Program) -> frozenset[str]:
    """What reductions read, or maps that they read."""
    found: set[str] = set()
    for c in reversed(p.body):
        if c.reducer is not None or not found.isdisjoint(c.results):
            found |= tensors_read(c.body)
    return frozenset(found)
