"""Laws that change definitions: recomputation, and scales moved through sums.

recompute:       x = e; u = F(x); w = G(x)  =  x = e; x' = e; u = F(x); w = G(x')
swap_scale_dot:  sum over r of a * f  =  a * (sum over r of f),  a without r   (Blockbuster rules 4 and 5; CODA's
                 row scale through a product). The sum over nothing stays 0, whatever a is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilefold.algebra.expr import Call, Const, Expr, Index, Load, Size, call, dims_used, loads, transform
from tilefold.block.contract import factors, product
from tilefold.block.laws.law import Args, Law
from tilefold.block.laws.nests import NamedBlock, Nest, Pass, alone, ordered, recheck
from tilefold.errors import ScheduleError
from tilefold.names import free
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute


def recompute(b: NamedBlock, name: str, consumer: str) -> NamedBlock:
    """Give `consumer` its own copy of `name`, called `name_consumer`, so that it need not be stored for it."""
    c, user = b.definition(name), b.definition(consumer)
    if name not in b.graph.producers[consumer]:
        raise ScheduleError(f"{consumer} does not read {name}", loc=user.loc)
    if b.nest_of(name) is b.nest_of(consumer):
        raise ScheduleError(f"{name} is computed in the kernel of {consumer} already", loc=user.loc)
    if b.graph.consumers[name] == (consumer,) and not set(c.results) & set(b.program.outputs):
        raise ScheduleError(
            f"only {consumer} reads {name}",
            dependency=f"{name} -> {consumer}",
            loc=user.loc,
            hint=f"fuse({name!r}, {consumer!r})",
        )
    names = {r: free(f"{r}_{consumer}", b.program.names) for r in c.results}
    copy = replace(c, name=names[c.name], index_name=names[c.index_name] if c.index_name else None)

    def renamed(e: Expr) -> Expr | None:
        return Load(names[e.tensor], e.index) if isinstance(e, Load) and e.tensor in names else None

    body: list[Compute] = []
    for d in b.program.body:
        body.append(replace(d, body=transform(d.body, renamed)) if d.name == consumer else d)
        if d.name == name:
            body.append(copy)
    at = b.nests.index(b.nest_of(name))
    return _with(b, body, (*b.nests[: at + 1], alone(copy), *b.nests[at + 1 :]))


def swap_scale_dot(b: NamedBlock, name: str) -> NamedBlock:
    """Take the factors of the sum `name` that do not vary along its axes out of it: `name_dot` is the sum."""
    c, n = b.definition(name), b.nest_of(name)
    if c.reducer != "sum":
        raise ScheduleError(f"{name} is no sum: a scale moves only through sums", loc=c.loc)
    parts = factors(c.body)
    scale = [f for f in parts if not dims_used(f) & set(c.rdims) and loads(f)]
    rest = [f for f in parts if f not in scale]
    if not scale:
        varying = sorted({ld.tensor for f in rest for ld in loads(f)})
        raise ScheduleError(
            f"every factor of {name} varies along {', '.join(c.rdims)}",
            dependency=f"{varying[0]} -> {name}" if varying else None,
            loc=c.loc,
        )
    if not rest or any(isinstance(f, Const) for f in rest[:1]):
        raise ScheduleError(f"nothing of {name} is left to sum", loc=c.loc)
    dot = free(f"{name}_dot", b.program.names)
    summed = replace(c, name=dot, dtype=c.dtype.compute, body=product(rest))
    value: Expr = product([Load(dot, tuple(Index(d) for d in c.dims)), *scale])
    for d in c.rdims:
        value = call("where", call("eq", Size(d), 0), 0.0, value)
    scaled = Compute(name, c.dims, c.dtype, value, loc=c.loc, origin=c.origin)
    body = [x for d in b.program.body for x in ((summed, scaled) if d.name == name else (d,))]
    return _with(b, body, tuple(_swapped(x, name, dot) if x is n else x for x in b.nests))


def _swapped(n: Nest, name: str, dot: str) -> Nest:
    """The nest with the sum under its new name and the map after it."""
    members = tuple(x for m in n.members for x in ((dot, name) if m == name else (m,)))
    passes = tuple(Pass(tuple(dot if r == name else r for r in p.reductions), p.loop) for p in n.passes)
    return replace(n, members=members, passes=passes)


def _with(b: NamedBlock, body: list[Compute], nests: tuple[Nest, ...]) -> NamedBlock:
    """The program with other definitions; every nest is checked again."""
    g = Graph.of(replace(b.program, body=tuple(body)))
    done = NamedBlock(g, ordered(g, nests))
    for n in done.nests:
        recheck(done, n)
    return done


def _edges(b: NamedBlock) -> Iterator[Args]:
    for c in b.program.body:
        for r in b.graph.producers[c.name]:
            yield r, c.name


def _sums(b: NamedBlock) -> Iterator[Args]:
    for c in b.program.body:
        if c.reducer == "sum" and isinstance(c.body, Call):
            yield (c.name,)


RECOMPUTE = Law(
    "recompute",
    "x = e; u = F(x); w = G(x) = x = e; x' = e; u = F(x); w = G(x')",
    "x has another reader, in another kernel",
    recompute,
    _edges,
)
SWAP_SCALE_DOT = Law(
    "swap_scale_dot",
    "sum over r of a * f = a * (sum over r of f)",
    "a does not vary along r",
    swap_scale_dot,
    _sums,
)
