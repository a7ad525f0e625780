"""Maps that are written anyway and that products read once for several heads: keys of a cache with the newest in place.

Inside the kernel of such a product a map is computed again for each head, whose queries then lie in no tile together:
a cache of 32 x 8 x 2,048 keys and values that 32 heads share, given back with a place that is new, decoded in 340 us on
an H100, where reading what was written takes 100. What nobody else needs stays where it is (`tensor.inline`).
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.expr import Index, Load, loads
from tilefold.plan.library import unrounded
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import divided, product_of
from tilefold.tensor.rewrite import drop_dead, rename_loads, substitute_map


def of_results(p: Program) -> Program:
    """The program in which such products read the result that a map is stored as, and not the map."""
    g = Graph.of(p)
    maps = {ld.tensor: g.by_name[ld.tensor] for c in p.body for ld in _of_heads(c) if ld.tensor in g.by_name}
    results = [g.by_name[n] for n in dict.fromkeys(p.outputs) if n in g.by_name]
    stored = {n: o for n, m in maps.items() for o in results if _is_stored(p, m, o)}
    if not stored:
        return p

    def read(ld: Load) -> Load:
        return replace(ld, tensor=stored[ld.tensor].name) if ld.tensor in stored else ld

    body: dict[str, Compute] = {}
    for c in p.body:  # a result comes where its map was
        o = replace(stored[c.name], body=substitute_map(c, _whole(c, stored[c.name]))) if c.name in stored else c
        body.setdefault(o.name, replace(o, body=rename_loads(o.body, read)))
    return drop_dead(replace(p, body=tuple(body.values())))


def of_several_heads(g: Graph) -> frozenset[str]:
    """Maps among the results that a product reads at d // c: they have kernels of their own."""
    read = {ld.tensor for c in g.program.body for ld in _of_heads(c)} & {*g.program.outputs}
    return frozenset(n for n in read if n in g.by_name and g.by_name[n].reducer is None)


def _of_heads(c: Compute) -> list[Load]:
    """What a product reads for several heads."""
    return [] if product_of(c) is None else [ld for ld in loads(c.body) if divided(ld)]


def _is_stored(p: Program, m: Compute, o: Compute) -> bool:
    """Whether a result is all of a map, element by element."""
    alike = m.reducer is None and o.reducer is None and m.name not in p.outputs and m.dtype is o.dtype
    if not alike or [p.sizes[d] for d in m.dims] != [p.sizes[d] for d in o.dims]:
        return False
    read = _whole(m, o)
    return unrounded(o) in (substitute_map(m, read), read)


def _whole(m: Compute, o: Compute) -> Load:
    """What a result that is all of a map reads of it."""
    return Load(m.name, tuple(map(Index, o.dims)))
