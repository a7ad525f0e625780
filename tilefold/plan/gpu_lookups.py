"""Elements that are found by the values of others, beside products: looked up once, in a kernel of their own.

    inside    every thread block finds the places of the elements that it needs, and reads each by itself
    apart     a kernel of a few blocks looks all of them up, and every other block reads neighbours

A bias of windows or of distances (`table[index[i, j], h]`, with what is made of it) is the same for all sequences and
windows. What depends on it alone goes along.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tilefold.algebra.expr import Call, Expr, Index, Load, dims_used, loads, transform, walk
from tilefold.block.group import Group, Limits
from tilefold.block.legal import one_kernel
from tilefold.names import fresh
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph, expr_flops, out_dims
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of

Members = tuple[str, ...]


def lookups_apart(
    p: Program, groups: Sequence[Group], machine: Gpu, limits: Limits, calls: Collection[Members] = ()
) -> tuple[Program, list[Group]]:
    """The program, in which lookups among other things are statements, and its groups, with those beside products
    apart where that is estimated faster. limits: of a kernel; calls: of a library."""
    made: list[Group] = []
    g = Graph.of(p)
    for x in groups:
        sides = frozenset[str]() if x.members in calls else _sides(g, x)
        other, whole = _named(p, x) if sides else (p, x)
        after = g if other is p else Graph.of(other)
        found = _apart(after, whole, sides, machine, limits) if sides else (x,)
        if len(found) > 1:
            p, g = other, after
        made += found if len(found) > 1 else (x,)
    return p, made


def _sides(g: Graph, x: Group) -> frozenset[str]:
    """Rows and columns of a group's products of matrices."""
    found = [product_of(g.by_name[m]) for m in x.members]
    return frozenset[str]().union(*(f.left ^ f.right for f in found if f is not None and f.left != f.right))


def _named(p: Program, x: Group) -> tuple[Program, Group]:
    """With a statement for each lookup in a group whose elements are fewer than those it is read for."""
    taken = {*(i.name for i in p.inputs), *(r for c in p.body for r in c.results), *(c.name for c in p.body)}
    body: list[Compute] = []
    made: dict[Load, Load] = {}
    members = list(x.members)
    for c in p.body:
        for ld in dict.fromkeys(_lookups(c.body)) if c.name in x.members else ():
            own = dims_used(ld)
            if c.body == ld or own.issuperset((*c.dims, *c.rdims)):
                continue
            if ld not in made:
                dims = tuple(d for d in (*c.dims, *c.rdims) if d in own)
                body.append(Compute(fresh(f"{c.name}_read", taken), dims, p.dtype_of(ld.tensor), ld, loc=c.loc))
                made[ld] = Load(body[-1].name, tuple(Index(d) for d in dims))
                members.append(body[-1].name)
            c = replace(c, body=_with(c.body, ld, made[ld]))
        body.append(c)
    if not made:
        return p, x
    at = {c.name: n for n, c in enumerate(body)}
    return replace(p, body=tuple(body)), replace(x, members=tuple(sorted(members, key=at.__getitem__)))


def _with(e: Expr, old: Expr, new: Expr) -> Expr:
    return transform(e, lambda k: new if k == old else None)


def _apart(g: Graph, x: Group, sides: frozenset[str], machine: Gpu, limits: Limits) -> tuple[Group, ...]:
    for m in x.members:
        part = _part(g, x, m)
        if not part or len(part) == len(x.members) or not _pays(g, x, part, sides, machine):
            continue
        rest = tuple(n for n in x.members if n not in part)
        made = [one_kernel(g, members, limits) for members in (part, rest)]
        if all(isinstance(y, Group) for y in made):
            first, second = made
            assert isinstance(first, Group)
            assert isinstance(second, Group)
            return (first, *_apart(g, second, sides, machine, limits))
    return (x,)


def _part(g: Graph, x: Group, m: str) -> Members:
    """A map with lookups, members that only it needs and maps of its elements alone; none where it needs others too."""
    c = g.by_name[m]
    if c.reducer is not None or not list(_lookups(c.body)):
        return ()
    part = {m}
    for n in reversed(x.members):
        inside = [u for u in g.consumers[n] if u in x.members]
        if n not in part and inside and part.issuperset(inside):
            part.add(n)
    for n in x.members:
        own = g.by_name[n]
        needed = [u for u in g.producers[n] if u in x.members]
        if own.reducer is None and needed and part.issuperset(needed) and set(out_dims(own)) <= set(out_dims(c)):
            part.add(n)
    closed = all(u in part or u not in x.members for n in part for u in g.producers[n])
    return tuple(n for n in x.members if n in part) if closed else ()


def _pays(g: Graph, x: Group, part: Members, sides: frozenset[str], machine: Gpu) -> bool:
    """Whether one kernel more, which writes what every block then reads, takes less time than lookups in all blocks."""
    inside = 0.0
    moved = 0.0
    for n in part:
        c = g.by_name[n]
        others = set(x.parallel) - set(out_dims(c))
        times = 1.0
        for d in others:
            times *= max(1.0, g.extent(d) / (machine.rows if d in sides else 1))
        inside += times * sum(_work(g, ld, machine) for ld in _lookups(c.body))
        inside += times * g.points(out_dims(c)) * expr_flops(c.body)
        if any(u not in part for u in g.consumers[n]):
            moved += times * g.nbytes([n])
    near = next(t for t in machine.tiers if t.name == "L2")
    return inside / machine.vector > machine.second_kernel + moved / (machine.cache_reached * near.bandwidth)


def _lookups(e: Expr) -> Iterator[Load]:
    """Loads at places that other loads give, and that no other such place is made of."""
    for ld in loads(e):
        if any(isinstance(k, Load) for ix in ld.index for k in walk(ix)):
            yield ld


def _work(g: Graph, ld: Load, machine: Gpu) -> float:
    """Of the places that are looked up, in units of an add: integers, and a read by itself. Neighbours at such a place
    (a row of a table) are read as any others."""
    found = [ix for ix in ld.index if any(isinstance(k, Load) for k in walk(ix))]
    places = g.points({d for ix in found for d in dims_used(ix)})
    return places * (machine.lookup + sum(isinstance(k, Call) for ix in found for k in walk(ix)))
