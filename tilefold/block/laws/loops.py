"""Loops of a kernel: streaming in blocks, the order of parallel loops, peeling of masked blocks.

tile:    S over all of d  =  for d: S over a block of d            (a reduction becomes a state that is accumulated)
reorder: forall a: forall b: S  =  forall b: forall a: S
peel:    for l in a .. c: S  =  for l in a .. b: S; for l in b .. c: S, with masks decided between (`block.peel`)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilefold.block.laws.fusion import axes_of
from tilefold.block.laws.law import Args, Law
from tilefold.block.laws.nests import NamedBlock, Nest, Pass, changed
from tilefold.errors import ScheduleError
from tilefold.tensor.analysis import out_dims


def tile(b: NamedBlock, name: str, dim: str) -> NamedBlock:
    """Run `name`'s kernel block by block along `dim`: parallel dims do already, an axis becomes a serial loop."""
    n, c = b.nest_of(name), b.definition(name)
    if dim in n.parallel:
        return b
    p = _pass_over(b, n, name, dim)
    if p is not None:
        if n.segments is not None or n.peeled:
            raise ScheduleError(f"the pass of {name} is {'split' if n.segments else 'peeled'} already", loc=c.loc)
        passes = tuple(replace(q, loop=dim) if q is p else q for q in n.passes)
        return changed(b, (n,), replace(n, passes=passes))
    if dim not in out_dims(c):
        raise ScheduleError(f"no loop of {name} is over {dim}", loc=c.loc, hint=_loops_hint(b, n, name))
    if n.pass_of(name) is not None:
        raise ScheduleError(f"{name} is accumulated over {c.rdims[0]}: all of {dim} is its state", loc=c.loc)
    if not b.graph.escapes(name, n.members):
        user = b.graph.consumers[name][0]
        raise ScheduleError(
            f"{name} is computed where {user} uses it",
            dependency=f"{name} -> {user}",
            loc=c.loc,
            hint=f"tile {user}",
        )
    rows = (*(r for r in n.rows if r[0] != name), (name, dim))
    return changed(b, (n,), replace(n, rows=rows))


def _pass_over(b: NamedBlock, n: Nest, name: str, dim: str) -> Pass | None:
    """The pass that a loop over `dim` is for: that of `name`, else the only one, unless `name` is written along it."""
    found = [p for p in n.passes if dim in axes_of(b.graph, p)]
    own = [p for p in found if name in p.reductions]
    written = dim in out_dims(b.definition(name)) and b.graph.escapes(name, n.members)
    if own or written or len(found) != 1:
        return own[0] if own else None
    return found[0]


def _loops_hint(b: NamedBlock, n: Nest, name: str) -> str:
    p = n.pass_of(name)
    dims = (*n.parallel, *(axes_of(b.graph, p) if p is not None else ()))
    return f"there are {', '.join(dims)}" if dims else "it has no loops"


def reorder(b: NamedBlock, name: str, *dims: str) -> NamedBlock:
    """The parallel loops of `name`'s kernel in the order of `dims`, outermost first; the others keep their places
    outside of them.
    """
    n = b.nest_of(name)
    check_parallel(b, name, dims)
    rest = tuple(d for d in n.parallel if d not in dims)
    return changed(b, (n,), replace(n, parallel=(*rest, *dims)))


def check_parallel(b: NamedBlock, name: str, dims: tuple[str, ...]) -> None:
    """ScheduleError where one of `dims` is not a parallel loop of the kernel of `name`, and what makes it serial."""
    n = b.nest_of(name)
    for d in dims:
        if d in n.parallel:
            continue
        carried = next((p.reductions[-1] for p in n.passes if d in axes_of(b.graph, p)), None)
        if carried is not None:
            raise ScheduleError(
                f"the loop over {d} carries {carried} from block to block",
                dependency=f"{carried} -> {carried} over {d}",
                loc=b.definition(carried).loc,
                hint=f"split_k_update({carried!r}, {d!r}) makes its segments independent",
            )
        raise ScheduleError(f"the kernel of {name} has no parallel loop over {d}", hint=_loops_hint(b, n, name))
    if len(set(dims)) != len(dims):
        raise ScheduleError(f"a dim is named twice: {', '.join(dims)}")


def peel(b: NamedBlock, name: str, loop: str) -> NamedBlock:
    """Take the mask out of the blocks of `loop`, in `name`'s kernel, on which it is true."""
    n = b.nest_of(name)
    if loop in n.peeled:
        raise ScheduleError(f"the loop over {loop} is peeled already")
    if loop not in {p.loop for p in n.passes} | {d for _, d in n.rows}:
        raise ScheduleError(f"the kernel of {name} has no serial loop over {loop}", hint=f"tile it over {loop} first")
    return changed(b, (n,), replace(n, peeled=(*n.peeled, loop)))


def _axes(b: NamedBlock) -> Iterator[Args]:
    for n in b.nests:
        for m in n.members:
            for d in (*out_dims(b.definition(m)), *b.definition(m).rdims):
                if d not in n.parallel:
                    yield m, d


def _last_first(b: NamedBlock) -> Iterator[Args]:
    for n in b.nests:
        if len(n.parallel) > 1:
            yield n.members[0], *reversed(n.parallel)


TILE = Law(
    "tile",
    "S over all of d = for d: S over a block of d",
    "d is an axis of the pass, or a dim along which the kernel writes",
    tile,
    _axes,
)
REORDER = Law(
    "reorder",
    "forall a: forall b: S = forall b: forall a: S",
    "both loops are parallel: no value is carried from block to block",
    reorder,
    _last_first,
)
PEEL = Law(
    "peel",
    "for l in a .. c: S = for l in a .. b: S; for l in b .. c: S",
    "the mask is a conjunction of linear comparisons of loop indices",
    peel,
    _axes,
)
