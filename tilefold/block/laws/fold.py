"""Fold fusion: a reduction joins the loop of the reductions that it depends on.

rolling_update:  for l: m (+)= f;  for l: t (x)= F(m)
              =  for l: m' = m (+) f; t = repair(t, m, m') (x) F(m'); m = m'

(Neptune 4.2, eq. 7; RedFuser eq. 16), where the repair is derived and proved (`algebra.derive`). The
maps between are inlined into F (Neptune's dataflow reorganisation). In a pass of one block there is
nothing to repair, and what the repair delays is still delayed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilefold.block.laws.fusion import axes_of, fuse, with_passes
from tilefold.block.laws.law import Args, Law
from tilefold.block.laws.nests import NamedBlock, feeding
from tilefold.errors import ScheduleError


def rolling_update(b: NamedBlock, name: str, loop: str) -> NamedBlock:
    """Fuse the reduction `name` into the pass over `loop` of the reductions that it depends on.

    ScheduleError: it depends on none, or no repair exists, with the dependency and the reason.
    """
    c = b.definition(name)
    if c.reducer is None or loop not in c.rdims:
        what = "a map" if c.reducer is None else f"a reduction over {', '.join(c.rdims)}"
        raise ScheduleError(f"{name} is {what}, it has no update over {loop}", loc=c.loc)
    if b.nest_of(name).pass_of(name) is None:
        raise ScheduleError(f"{name} is computed block by block inside another pass already", loc=c.loc)
    passed = [(n, p) for n in b.nests for p in n.passes if loop in axes_of(b.graph, p) and name not in p.reductions]
    candidates = [(n, p) for n, p in passed if feeding(b.graph, name, frozenset(p.reductions))]
    if not candidates:
        raise ScheduleError(
            f"{name} depends on no other reduction over {loop}",
            loc=c.loc,
            hint=f"fuse(..., at={loop!r}) joins reductions that do not depend on each other",
        )
    nest, target = candidates[-1]
    made = frozenset(target.reductions)
    between = [
        m
        for m in feeding(b.graph, name, frozenset(b.graph.by_name))
        if b.definition(m).reducer is None and feeding(b.graph, m, made)
    ]
    b = fuse(b, target.reductions[0], *between, name)
    nest = b.nest_of(name)
    chosen = [p for p in nest.passes if made & set(p.reductions) or name in p.reductions]
    return with_passes(b, nest, chosen, loop)


def _dependent(b: NamedBlock) -> Iterator[Args]:
    for c in b.program.body:
        if c.reducer is not None:
            for axis in c.rdims:
                yield c.name, axis


ROLLING_UPDATE = Law(
    "rolling_update",
    "for l: m (+)= f; for l: t (x)= F(m) = for l: m' = m (+) f; t = repair(t, m, m') (x) F(m')",
    "the repair exists: a Fold of the cascade is derived, proved and checked",
    rolling_update,
    _dependent,
)
