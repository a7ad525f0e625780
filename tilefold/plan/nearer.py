"""Groups whose kernels are forecast to be far from their floor, cut in two where that takes less time.

Laws say when operators may share a kernel, and prices of a few bytes when that pays; what a kernel then costs, with
its tiles and loops, is forecast once it is rendered. Where that is much longer than its memory or its arithmetic
takes (rows that a thread block cannot keep, sums over two axes in one loop nest), the cheapest cuts are rendered and
forecast too, and the best of them taken, its parts looked at again. A product that a cut leaves alone takes what a
call of the library does, which computes it then.

Microseconds forecast for an H100, the group whole and cut: a group norm by hand in training 680 and 190 (measured
whole: 848), a layer norm over two axes 335 and 55 (248), the softmax of a graph's dense edges 5546 and 21 (290).

What no cut makes less of is the arithmetic: each distinct operation has to be done once, and where that is most of the
time nothing is cut (gradients of log gamma: 450 forecasts, in 70 s, of kernels that stay whole).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

from tilefold.algebra.expr import Call, Cast, Expr, dims_used, tensors_read
from tilefold.block.group import Group
from tilefold.plan.cut import Members, added_bytes, cuts
from tilefold.plan.dataflow import GPU_UNITS, operation_units
from tilefold.plan.gpu_forms import Predicted
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph
from tilefold.tensor.product import product_of

#: Times its floor, and seconds beyond it, from which a kernel is far; share of its time that parts may take.
FAR, BEYOND, SHARE = 2.5, 8e-6, 0.8
#: Times the floor of parts that is good enough: no more cuts are tried.
NEAR = 1.25
#: Times what a group reads and writes that a cut may pass through memory: hidden rows of eight times their length may,
#: and rows of sixteen neighbours, not scores of every pair.
PASSED = 8
#: Of the time of a group without products that what a cut passes through memory may take, whatever there is to read: of
#: a map of every pair summed along either axis, one thread block had all of the second sum (forecast 22 ms, cut 0.4).
REPAID = 8
#: Cuts that are forecast, the cheapest first; those whose parts are cut again where none is enough.
MOST_CUTS, HOPES = 16, 4
#: Of those that differ only in maps which one or the other kernel computes.
ALIKE = 4
#: Parts of a group that are looked at: of those that are cut again, and their cuts, there are thousands in a long chain
#: (the gradient of a structural similarity: 4,879, and 20 s; 209 of them differ).
MOST_PARTS = 40
#: Characters of the kernels that are forecast, behind which all parts that follow stay whole, and of a part at least: a
#: million take three to seven seconds (the 81 sums of a cost volume: 200 forecasts, in a minute, and nothing was cut; a
#: wavelet transform of five levels and its inverse, 41 statements: 119 in 46 s, for 2 % of its time).
MOST_FORECAST, LEAST_FORECAST = 1_500_000, 10_000


def nearer(
    g: Graph,
    x: Group,
    machine: Gpu,
    forecast: Callable[[Group], Predicted | None],
    groups: Callable[..., Sequence[Group]],
) -> tuple[list[Group], float]:
    """The group, or what it is cut into, and seconds of that. forecast: of all kernels of a group, None where it is
    none; groups: those of parts that are all legal, else none.

    Nothing is forecast where bounds already tell: a cut is done with once what its parts take at least is too long; and
    what took too long by itself takes no less as a share of a larger part, but for its results, which may stay in
    registers there. Where no cut in two is enough, what is behind a part that is near its floor is cut again first, in
    the `HOPES` best. Parts that several cuts leave are looked at once."""
    known: dict[Group, tuple[list[Group], float]] = {}
    asked = dict[Group, int]()

    def counted(y: Group) -> Predicted | None:
        found = forecast(y)
        asked[y] = max(LEAST_FORECAST, 0 if found is None else found.text)
        return found

    def ended() -> bool:
        return sum(asked.values()) >= MOST_FORECAST

    def again(y: Group) -> tuple[list[Group], float]:
        if y not in known:
            if len(known) >= MOST_PARTS or ended():
                return _whole(y, forecast(y))
            known[y] = _nearer(g, y, machine, counted, groups, again, ended)
        return known[y]

    return again(x)


def _nearer(
    g: Graph,
    x: Group,
    machine: Gpu,
    forecast: Callable[[Group], Predicted | None],
    groups: Callable[..., Sequence[Group]],
    again: Callable[[Group], tuple[list[Group], float]],
    ended: Callable[[], bool],
) -> tuple[list[Group], float]:
    """`nearer` of a group that was not looked at. again: of its parts; ended: whether no more is forecast."""
    own = forecast(x)
    if own is None or len(x.members) == 1 or not _far(own):
        return _whole(x, own)
    least, chosen, hopes = SHARE * own.seconds, list[Group](), list[tuple[float, list[Group]]]()
    floor = max(own.floor, _arithmetic(g, x, machine))
    slow: list[tuple[frozenset[str], float]] = []
    names = frozenset[str]().union(*(tensors_read(g.by_name[m].body) for m in x.members)).difference(x.members)
    most = PASSED * (g.nbytes(names) + _written(g, x))
    if all(product_of(g.by_name[m]) is None for m in x.members):
        most = max(most, own.seconds * machine.bandwidth / REPAID)
    most = min(machine.passed * machine.tiers[-1].capacity, most)
    for first, second in _tried(g, x.members):
        added = added_bytes(g, first, second)
        if added > most or NEAR * (floor + added / machine.bandwidth) >= least or ended():
            break  # the others add more
        if any(n >= least and (some.issubset(first) or some.issubset(second)) for some, n in slow):
            continue
        parts, seconds, bound = list(groups(first, second)), 0.0, 0.0
        for part in parts:
            found = forecast(part)
            if found is None:
                break
            seconds += found.seconds
            slow.append((frozenset(part.members), found.seconds - _written(g, part) / machine.bandwidth))
            if seconds >= least and (bound == 0.0 or NEAR * bound >= least):
                break
            bound += found.floor if _far(found) else found.seconds
        else:
            if parts and seconds < least:
                least, chosen = seconds, parts
            elif parts:
                hopes.append((bound, parts))
    made = [again(part) for part in chosen]
    for bound, parts in sorted(hopes, key=lambda h: h[0])[: 0 if chosen else HOPES]:
        if NEAR * bound < least:
            cut = [again(part) for part in parts]
            seconds = sum(n for _, n in cut)
            if seconds < least:
                least, made = seconds, cut
    return ([y for part, _ in made for y in part], least) if made else _whole(x, own)


def _tried(g: Graph, members: Sequence[str]) -> list[tuple[Members, Members]]:
    """The cheapest cuts, of those that have the same reductions and results in their first kernel no more than `ALIKE`:
    between the steps of a recurrence there are as many as steps, each cheap, and what is slow is behind them. And the
    cheapest that write maps first, of which several make use: for their sake all those are one kernel (two networks of
    one concatenation, which no cut but this one takes apart)."""
    ends = frozenset(m for m in members if g.by_name[m].reducer is not None or g.escapes(m, members))
    found, alike = list[tuple[Members, Members]](), Counter[frozenset[str]]()
    for first, second in cuts(g, tuple(members)):
        kind = ends & {*first}
        alike[kind] += 1
        if alike[kind] <= ALIKE:
            found.append((first, second))
    maps = (way for way in found[MOST_CUTS:] if all(g.by_name[m].reducer is None for m in way[0]))
    return [*found[:MOST_CUTS], *islice(maps, ALIKE)]


def _whole(x: Group, own: Predicted | None) -> tuple[list[Group], float]:
    """A group as it is, and its seconds."""
    return [x], math.inf if own is None else own.seconds


def _arithmetic(g: Graph, x: Group, machine: Gpu) -> float:
    """Seconds of the distinct operations of a group's statements, but of matrix products; quotients taken for
    products."""
    found = dict[Expr, float]()
    todo = [c.body for c in map(g.by_name.__getitem__, x.members) if product_of(c) is None]
    while todo:
        match todo.pop():
            case Cast(arg=arg):
                todo.append(arg)
            case Call(op, args) as e if e not in found:
                units = GPU_UNITS["mul"] if op == "div" else operation_units(e, GPU_UNITS)
                found[e] = units * g.points(tuple(sorted(dims_used(e))))
                todo += args
    return sum(found.values()) / machine.vector


def _far(x: Predicted) -> bool:
    return x.seconds >= max(FAR * x.floor, x.floor + BEYOND)


def _written(g: Graph, x: Group) -> float:
    """Bytes of what a group writes."""
    return g.nbytes(r for m in x.members if g.escapes(m, x.members) for r in g.by_name[m].results)
