"""Kernel fusion and loop fusion: values stay in the block that made them.

fuse:   forall P: A; forall P: B  =  forall P: A; B
        where B reads what A stores only in the block of P that stored it. The stores that nothing else reads
        go, so a buffered edge becomes an unbuffered one (Blockbuster rules 1 to 3). With a loop l,
        the passes over l become one:  for l: A; for l: B  =  for l: A; B
        where B depends on no reduction of A over l (else: `fold`).
extend: forall P: A; forall d: B  =  forall P: forall d: A; B
        where A, which lacks d, writes nothing outside of the block (Blockbuster rule 6: A is repeated).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilefold.block.laws.law import Args, Law
from tilefold.block.laws.nests import NamedBlock, Nest, Pass, changed, feeding, merge_members
from tilefold.errors import ScheduleError
from tilefold.tensor.analysis import Graph, out_dims


def fuse(b: NamedBlock, *names: str, at: str | None = None) -> NamedBlock:
    """The kernels of `names` as one, parallel over the dims that all of them are.

    at: an axis; the reductions of `names` over it that depend on none of the others then share a pass.
    """
    old = tuple(dict.fromkeys(b.nest_of(m) for m in names))
    b = _merged(b, old) if len(old) > 1 else b
    return b if at is None else _one_pass(b, names, at)


def _merged(b: NamedBlock, old: tuple[Nest, ...]) -> NamedBlock:
    for n in old:
        if n.segments is not None or n.peeled:
            what = "split" if n.segments is not None else "peeled"
            raise ScheduleError(f"{n.members[-1]} is {what} already", hint=f"fuse before it is {what}")
    last = max(old, key=lambda n: position(b.graph, n.members[-1]))
    parallel = tuple(d for d in last.parallel if all(d in n.parallel for n in old))
    new = merge_members(b.graph, old, parallel)
    return changed(b, old, new)


def position(g: Graph, name: str) -> int:
    """Place of a definition in its program."""
    return next(k for k, c in enumerate(g.program.body) if c.name == name)


def _one_pass(b: NamedBlock, names: tuple[str, ...], at: str) -> NamedBlock:
    n = b.nest_of(names[0])
    chosen = [p for p in n.passes if set(p.reductions) & set(names) and at in axes_of(b.graph, p)]
    if not chosen:
        raise ScheduleError(f"none of {', '.join(names)} reduces over {at} in a pass")
    for r in (r for p in chosen for r in p.reductions):
        late = feeding(b.graph, r, frozenset(x for q in chosen if r not in q.reductions for x in q.reductions))
        if late:
            raise ScheduleError(
                f"{r} reads {late[-1]}, which is known only after the loop over {at}",
                dependency=f"{late[-1]} -> {r}",
                loc=b.definition(r).loc,
                hint=f"rolling_update({r!r}, {at!r}) repairs it",
            )
    return with_passes(b, n, chosen, at)


def with_passes(b: NamedBlock, n: Nest, chosen: list[Pass], loop: str) -> NamedBlock:
    """`chosen` passes of a nest as one; it streams over `loop` if one of them does, else as the first that streams."""
    order = {m: k for k, m in enumerate(n.members)}
    names = sorted((r for p in chosen for r in p.reductions), key=order.__getitem__)
    loops = [p.loop for p in chosen if p.loop is not None]
    streamed = loop if loop in loops else next(iter(loops), None)
    passes = [p for p in n.passes if p not in chosen]
    at = n.passes.index(chosen[0])
    passes.insert(at, Pass(tuple(names), streamed))
    return changed(b, (n,), replace(n, passes=tuple(passes)))


def axes_of(g: Graph, p: Pass) -> tuple[str, ...]:
    """The axes a pass reduces over."""
    return g.by_name[p.reductions[0]].rdims


def extend(b: NamedBlock, name: str, dim: str) -> NamedBlock:
    """Make the kernel of `name` parallel over `dim` too; members without it run in every block of it."""
    n, c = b.nest_of(name), b.definition(name)
    if dim not in out_dims(c) or dim in n.parallel:
        state = "parallel over it already" if dim in n.parallel else f"over {', '.join(out_dims(c)) or 'no dim'}"
        raise ScheduleError(f"{name} cannot be extended over {dim}: it is {state}", loc=c.loc)
    if any(dim in (p.loop, *axes_of(b.graph, p)) for p in n.passes):
        held = next(p for p in n.passes if dim in axes_of(b.graph, p)).reductions[0]
        raise ScheduleError(
            f"{held} reduces over {dim}, so its blocks are not independent",
            dependency=f"{held} -> {name}",
            loc=b.definition(held).loc,
        )
    order = dict.fromkeys(d for m in reversed(n.members) for d in out_dims(b.definition(m)))
    wanted = {*n.parallel, dim}
    rows = tuple(r for r in n.rows if r[1] != dim)
    return changed(b, (n,), replace(n, parallel=tuple(d for d in order if d in wanted), rows=rows))


def _pairs(b: NamedBlock) -> Iterator[Args]:
    for c in b.program.body:
        for r in b.graph.producers[c.name]:
            if b.nest_of(r) is not b.nest_of(c.name):
                yield r, c.name


def _local_dims(b: NamedBlock) -> Iterator[Args]:
    for n in b.nests:
        for m in n.members:
            for d in out_dims(b.definition(m)):
                if d not in n.parallel:
                    yield m, d


FUSE = Law(
    "fuse",
    "forall P: A; forall P: B = forall P: A; B",
    "B reads what A computes in the same block of P, and nothing outside stands between them",
    fuse,
    _pairs,
)
EXTEND = Law(
    "extend",
    "forall P: A; forall d: B = forall P: forall d: A; B",
    "what lacks d writes nothing, and nothing reduces over d",
    extend,
    _local_dims,
)
