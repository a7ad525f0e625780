"""The order of parallel loops.

Law: parallel loops commute. Which of them runs innermost decides what stays in a cache from one block to the next, and
so what is read again; nothing else changes. Loops with bounds of their own, and those of segments, stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilefold.block.ir import Block, Loop, Node
from tilefold.block.verify import verify
from tilefold.errors import ScheduleError


def parallel(b: Block) -> tuple[str, ...]:
    """Dims of the parallel loops around everything that may change places, outermost first."""
    return tuple(n.dim for n in _nest(b.body))


def interchanged(b: Block, order: Sequence[str]) -> Block:
    """`b` with its parallel loops in another order, outermost first. ScheduleError: these are not its loops."""
    nest = {n.dim: n for n in _nest(b.body)}
    if set(order) != set(nest) or len(order) != len(nest):
        has = ", ".join(nest) or "none"
        raise ScheduleError(
            f"{b.name} has no parallel loops over {', '.join(order)}", hint=f"those that may move: {has}"
        )
    body = _nest(b.body)[-1].body
    for d in reversed(order):
        body = (Loop("forall", d, body),)
    return verify(replace(b, body=body))


def _nest(nodes: tuple[Node, ...]) -> tuple[Loop, ...]:
    match nodes:
        case (Loop("forall", _, body, None, None, False) as n,):
            return (n, *_nest(body))
    return ()
