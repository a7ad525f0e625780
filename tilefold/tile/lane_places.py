"""Places of extremes kept per lane: argmax and argmin over a long axis without a reduction across lanes in their loop.

A lane meets its indices in order, and holds the best element so far with the first place that has it; what is no number
is better than any number, and the first of such stays. Once the loop has ended the extreme of the lanes is the extreme,
and its place is the least of the lanes' that have an element as good,

    m = max over lanes of m_lane,    i = min over lanes of i_lane where m_lane = m or m_lane is no number.

A lane that has met nothing has the place -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilefold.algebra.evaluate import COMBINE
from tilefold.algebra.expr import Expr, Index, Load, call, lit, loads, transform
from tilefold.tile import ir
from tilefold.tile.lane_rules import first_fill

#: Of each kind of extreme: what reduces, and the comparison that holds where an element is no better.
KINDS = {"argmax": ("max", "le"), "argmin": ("min", "ge")}
#: The place of no element among those of which the least is asked for.
NONE = lit(2**31 - 1)


@dataclass(frozen=True, slots=True)
class Places:
    """A loop that finds the place of an extreme, and nothing else: its statement, what its results start as, and
    buffers for the extreme itself."""

    at: ir.For
    select: ir.Select
    fills: tuple[ir.Fill, ir.Fill]
    extremes: tuple[str, ...] = ()


def places_of(s: ir.For, before: Sequence[ir.Stmt], buffers: dict[str, ir.Buffer]) -> Places | None:
    """The loop, if it selects one element of tensors by its place along the loop, which 31 bits hold."""
    found = [x for x in s.body if isinstance(x, ir.Select)]
    if len(found) != 1 or found[0].op not in KINDS:
        return None
    (x,) = found
    fills = first_fill(x.buf, before), first_fill(x.index_buf, before)
    plain = x.accumulate and x.rdims == (s.dim,) and x.payload == Index(s.dim) and s.dim not in buffers[x.buf].dims
    if not plain or fills[0] is None or fills[1] is None or not buffers[x.buf].dtype.is_float:
        return None
    extremes = [n.buf for n in s.body if isinstance(n, ir.Reduce)]
    same = [ir.Reduce(n, KINDS[x.op][0], x.rdims, x.expr, True) for n in extremes]
    if [n for n in s.body if n is not x] != same or any(first_fill(n, before) is None for n in extremes):
        return None
    if any({*buffers[n].dims} != {*buffers[x.buf].dims} for n in extremes):
        return None
    read = any(ld.tensor in buffers for ld in loads(x.expr))
    return None if read else Places(s, x, (fills[0], fills[1]), tuple(extremes))


def met(p: Places, best: ir.Buffer, at: ir.Buffer, place: Expr, exists: Expr | None = None) -> tuple[ir.Stmt, ir.Stmt]:
    """The element at a place, after what the lanes hold. exists: the lanes that have one, where not all do."""
    reducer, no_better = KINDS[p.select.op]
    value = transform(p.select.expr, lambda n: place if n == Index(p.at.dim) else None)
    old, old_at = _whole(best), _whole(at)
    better = call("and", call("not", call(no_better, value, old)), call("eq", old, old))
    taken = call("or", call("lt", old_at, lit(0)), better)
    if exists is not None:
        taken, value = call("and", exists, taken), call("where", exists, value, p.fills[0].value)
    better_of = call(COMBINE[reducer], old, value)
    return ir.Map(at.name, call("where", taken, place, old_at)), ir.Map(best.name, better_of)


def of_all(p: Places, best: ir.Buffer, at: ir.Buffer, lane: str) -> tuple[ir.Stmt, ...]:
    """The extreme of all lanes, and its first place."""
    s = p.select
    mine, mine_at = _whole(best), _whole(at)
    dims = tuple(Index(d) for d in best.dims if d != lane)
    top, first = Load(s.buf, dims), Load(s.index_buf, dims)
    good = call("or", call("eq", mine, top), call("ne", mine, mine))
    asked = call("where", call("and", call("ge", mine_at, lit(0)), good), mine_at, NONE)
    return (
        ir.Reduce(s.buf, KINDS[s.op][0], (lane,), mine, False),
        ir.Reduce(s.index_buf, "min", (lane,), asked, False),
        ir.Map(s.index_buf, call("where", call("eq", first, NONE), lit(-1), first)),
        *(ir.Map(n, top) for n in p.extremes),
    )


def _whole(b: ir.Buffer) -> Load:
    return Load(b.name, tuple(Index(d) for d in b.dims))
