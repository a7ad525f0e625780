"""Splitting a pass into segments that are independent blocks, and a kernel that combines them.

split_k_update:  for l: S (+)= F  =  forall s: (for l in segment s: S_s (+)= F);  S = (+) over s of repair(S_s, D_s, D)

(Neptune 4.3, eq. 11; RedFuser's multi-segment strategy, eq. 11), D being what S depends on.
privatize is the case in which nothing depends on anything else, so no repair is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilefold.block.laws.fusion import axes_of
from tilefold.block.laws.law import Args, Law
from tilefold.block.laws.nests import NamedBlock, Nest, changed, feeding
from tilefold.block.split import SEGMENTS
from tilefold.errors import ScheduleError


def split_k_update(b: NamedBlock, name: str, loop: str, segments: int = SEGMENTS) -> NamedBlock:
    """Cut the pass that computes the reduction `name` into segments of `loop`, combined by the derived merge."""
    n = _checked(b, name, loop, segments)
    passes = tuple(replace(p, loop=loop) if name in p.reductions else p for p in n.passes)
    return changed(b, (n,), replace(n, passes=passes, segments=segments))


def privatize(b: NamedBlock, name: str, loop: str, segments: int = SEGMENTS) -> NamedBlock:
    """`split_k_update` for a pass whose reductions do not depend on each other."""
    n = _checked(b, name, loop, segments)
    made = next(p.reductions for p in n.passes if name in p.reductions)
    for r in made:
        late = feeding(b.graph, r, frozenset(made))
        if late:
            raise ScheduleError(
                f"{r} depends on {late[-1]}, which differs from segment to segment",
                dependency=f"{late[-1]} -> {r}",
                loc=b.definition(r).loc,
                hint="split_k_update repairs it",
            )
    return split_k_update(b, name, loop, segments)


def _checked(b: NamedBlock, name: str, loop: str, segments: int) -> Nest:
    n, c = b.nest_of(name), b.definition(name)
    p = n.pass_of(name)
    if p is None or loop not in axes_of(b.graph, p):
        raise ScheduleError(f"{name} has no pass over {loop}", loc=c.loc)
    if n.segments is not None or n.peeled:
        raise ScheduleError(f"the pass of {name} is {'split' if n.segments else 'peeled'} already", loc=c.loc)
    if segments < 1:
        raise ScheduleError(f"{segments} segments", hint="at least one")
    if f"{loop}_seg" in b.program.sizes:
        raise ScheduleError(f"the program has a dim {loop}_seg", hint="rename it")
    return n


def _streams(b: NamedBlock) -> Iterator[Args]:
    for n in b.nests:
        for p in n.passes:
            for axis in axes_of(b.graph, p):
                yield p.reductions[0], axis, 3


SPLIT_K_UPDATE = Law(
    "split_k_update",
    "for l: S (+)= F = forall s: (for l in s: S_s (+)= F); S = (+) over s of repair(S_s, D_s, D)",
    "one pass, nothing written along l, and the Fold of the pass has a merge",
    split_k_update,
    _streams,
)
PRIVATIZE = Law(
    "privatize",
    "for l: S (+)= f = forall s: (for l in s: S_s (+)= f); S = (+) over s of S_s",
    "one pass of reductions that do not depend on each other, and nothing written along l",
    privatize,
    _streams,
)
