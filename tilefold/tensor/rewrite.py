"""Small program rewrites that the tensor passes share: dead code, common statements, renaming."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import is_not

from tilefold.algebra.expr import (
    Expr,
    Index,
    Load,
    Rewritten,
    children,
    dims_named,
    loads,
    rebuild,
    rename_dims,
    substitute,
    tensors_read,
)
from tilefold.tensor.ir import Compute, Program


def dims_of(c: Compute) -> tuple[str, ...]:
    """Every dim a statement ranges over."""
    return (*c.dims, *c.rdims)


def drop_dead(p: Program) -> Program:
    """Without the statements no output depends on, and the dims only they used."""
    live = set(p.outputs)
    kept: list[Compute] = []
    for c in reversed(p.body):
        if live & set(c.results):
            live |= tensors_read(c.body)
            kept.append(c)
    return prune_dims(replace(p, body=tuple(reversed(kept))))


def prune_dims(p: Program) -> Program:
    """Without the dims that nothing mentions (a body may mention one by its size alone)."""
    used: set[str] = set()
    for c in p.body:
        used.update(dims_of(c), dims_named(c.body))
    return replace(p, sizes={d: e for d, e in p.sizes.items() if d in used})


def rename(p: Program, names: Mapping[str, str]) -> Program:
    """Rename dims everywhere; several may get one name where they are the same size."""

    def one(c: Compute) -> Compute:
        if names.keys().isdisjoint(dims_of(c)) and dims_named(c.body).isdisjoint(names):
            return c
        return replace(
            c,
            dims=tuple(names.get(d, d) for d in c.dims),
            rdims=tuple(names.get(d, d) for d in c.rdims),
            body=rename_dims(c.body, names),
        )

    sizes: dict[str, Expr] = {}
    for d, e in p.sizes.items():
        sizes.setdefault(names.get(d, d), e)
    return replace(p, sizes=sizes, body=tuple(map(one, p.body)))


def rename_loads(e: Expr, change: Callable[[Load], Expr | None]) -> Expr:
    """Rewrite loads, innermost first. What is shared stays so."""
    return _loads_renamed(e, change, {})


def _loads_renamed(e: Expr, change: Callable[[Load], Expr | None], done: Rewritten) -> Expr:
    if not loads(e):
        return e
    known = done.get(id(e))
    if known is not None:
        return known[1]
    kids, made = children(e), e
    new = tuple([_loads_renamed(k, change, done) for k in kids])
    if any(map(is_not, new, kids)):
        made = rebuild(e, new)
    out = change(made) if isinstance(made, Load) else None
    made = made if out is None else out
    done[id(e)] = e, made
    return made


def read_as_results(p: Program) -> Program:
    """Maps whose values a result of the program has too are read there, and not stored again.

    Side condition: same dtype and body, and neighbours side by side along the same dim; other dims are in any order.
    """
    results = {_map_key(c): c for c in p.body if c.reducer is None and {*c.results} <= {*p.outputs}}
    instead = {c.name: (c, results[k]) for c in p.body if c.name not in p.outputs and (k := _map_key(c)) in results}
    if not instead:
        return p

    def there(n: Load) -> Expr | None:
        if n.tensor not in instead:
            return None
        c, result = instead[n.tensor]
        at = dict(zip(c.dims, n.index, strict=True))
        return Load(result.name, tuple(at[d] for d in result.dims))

    body = [replace(c, body=rename_loads(c.body, there)) for c in p.body if c.name not in instead]
    return in_order(replace(p, body=tuple(body)))


def _map_key(c: Compute) -> tuple[object, ...]:
    return c.reducer, frozenset(c.dims), c.dims[-1:], c.dtype, c.body


def in_order(p: Program) -> Program:
    """The statements sorted so that each comes after what it reads, otherwise as they are."""
    ready = {i.name for i in p.inputs}
    left, out = list(p.body), []
    while left:
        n = next(n for n, c in enumerate(left) if tensors_read(c.body) <= ready)
        c = left.pop(n)
        ready |= set(c.results)
        out.append(c)
    return replace(p, body=tuple(out))


def substitute_map(m: Compute, load: Load) -> Expr:
    """Body of a map at the element that a load reads."""
    return substitute(m.body, {Index(d): i for d, i in zip(m.dims, load.index, strict=True)})
