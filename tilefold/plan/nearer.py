"""Groups whose kernels are forecast to be far from their floor, cut in two where that takes less time.

Laws say when operators may share a kernel, and prices of a few bytes when that pays; what a kernel then costs, with
its tiles and loops, is forecast once it is rendered. Where that is much longer than its memory or its arithmetic
takes (rows that a thread block cannot keep, sums over two axes in one loop nest), the cheapest cuts are rendered and
forecast too, and the best of them taken, its parts looked at again. A product that a cut leaves alone takes what a
call of the library does, which computes it then.

Microseconds forecast for an H100, the group whole and cut: a group norm by hand in training 680 and 190 (measured
whole: 848), a layer norm over two axes 335 and 55 (248), the softmax of a graph's dense edges 5546 and 21 (290).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilefold.block.group import Group
from tilefold.plan.cut import added_bytes, cuts
from tilefold.plan.gpu_forms import Predicted
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph

#: Times its floor, and seconds beyond it, from which a kernel is far; share of its time that parts may take.
FAR, BEYOND, SHARE = 2.5, 8e-6, 0.8
#: Times the floor of parts that is good enough: no more cuts are tried.
NEAR = 1.25
#: Cuts that are forecast, the cheapest first.
MOST_CUTS = 16


def nearer(
    g: Graph,
    x: Group,
    machine: Gpu,
    forecast: Callable[[Group], Predicted | None],
    groups: Callable[..., Sequence[Group]],
) -> list[Group]:
    """The group, or what it is cut into. forecast: of all kernels of a group, None where it is none; groups: those of
    parts that are all legal, else none.

    Nothing is forecast where bounds already tell: a cut is done with once its parts so far take too long; and what took
    too long by itself takes no less as a share of a larger part, but for its results, which may stay in registers
    there."""
    own = None if len(x.members) == 1 else forecast(x)
    if own is None or own.seconds < max(FAR * own.floor, own.floor + BEYOND):
        return [x]
    least, chosen = SHARE * own.seconds, list[Group]()
    slow: list[tuple[frozenset[str], float]] = []
    for first, second in cuts(g, x.members)[:MOST_CUTS]:
        if NEAR * (own.floor + added_bytes(g, first, second) / machine.bandwidth) >= least:
            break  # the others add more
        if any(n >= least and (some.issubset(first) or some.issubset(second)) for some, n in slow):
            continue
        parts, seconds = list(groups(first, second)), 0.0
        for part in parts:
            found = forecast(part)
            if found is None:
                break
            seconds += found.seconds
            slow.append((frozenset(part.members), found.seconds - _written(g, part) / machine.bandwidth))
            if seconds >= least:
                break
        else:
            if parts:
                least, chosen = seconds, parts
    return [y for part in chosen for y in nearer(g, part, machine, forecast, groups)] or [x]


def _written(g: Graph, x: Group) -> float:
    """Bytes of what a group writes."""
    return g.nbytes(r for m in x.members if g.escapes(m, x.members) for r in g.by_name[m].results)
