"""Split a fold over segments of its axis, and combine the partial states.

RedFuser's multi-segment strategy, Neptune's split-k update, FlashDecoding: the first kernel
folds each segment on its own and writes the states; the second merges them,

    var = R over segments of repair(var_part, D_part, D)                   (RedFuser eq. 11)

and finishes. The combine kernel is derived from the Fold, not written for an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, Size, call, dims_used, lit, loads, transform
from tilefold.algebra.fold import NEW, OLD, Fold, StateVar
from tilefold.block.build import Builder, Loops, apart, in_parallel, loop_dim, plain
from tilefold.block.group import ANY, Limits
from tilefold.block.ir import Block, Let, Loop, Node, Result, Store
from tilefold.block.parallel import splittable
from tilefold.block.stages import Stage, StagePlan
from tilefold.names import free
from tilefold.tensor.analysis import Graph, out_dims
from tilefold.tensor.index_simplify import poly

#: Segments a split axis is cut into.
SEGMENTS = 16
#: Elements of 16 bits that a thread loads at once; indices from which a segment begins at a multiple of them, and the
#: multiple, of a line of the cache.
VECTOR, LONG_SHARE, RUN = 8, 1 << 10, 64


@dataclass(frozen=True, slots=True)
class SplitNests:
    """Bodies of the two kernels, the partial results between them, the dims they add, and the results that the first
    kernel writes: maps along the axis that need nothing of the fold."""

    partial: tuple[Node, ...]
    combine: tuple[Node, ...]
    parts: tuple[Result, ...]
    sizes: dict[str, Expr]
    early: frozenset[str] = frozenset()


def early_maps(g: Graph, plan: StagePlan, axis: str) -> frozenset[str]:
    """Members that are written along the axis of the first stage and need nothing of any stage: each segment writes its
    own."""
    members = plan.group.members
    return frozenset(
        m
        for m in members
        if g.escapes(m, members)
        and g.by_name[m].reducer is None
        and plan.ready[m] < 0
        and axis in out_dims(g.by_name[m])
    )


def worth_splitting(g: Graph, plan: StagePlan, limits: Limits = ANY) -> bool:
    """One pass over a long axis, few parallel blocks, and no result that streams along the axis."""
    if len(plan.stages) != 1 or not splittable(g, plan.group, limits):
        return False
    return g.points(plan.stages[0].axes) >= limits.long_axis and loop_dim(g, plan.stages[0]) is not None


def next_axis(g: Graph, plan: StagePlan, axis: str | None) -> str | None:
    """The axis that is cut where the one that a fold streams over has too few indices: each of these is then by itself,
    as a parallel dim is. The one behind it; None where positions are part of the state, or results lie along axes that
    the segments cannot write (`early_maps`): those of all axes are written wherever these are cut."""
    axes, members = plan.stages[0].axes, plan.group.members
    at = axes.index(axis) + 1 if axis in axes else len(axes)
    if len(plan.stages) > 1 or plan.inner or at >= len(axes) or any(v.index_name for v in plan.stages[0].fold.state):
        return None
    early = early_maps(g, plan, axes[at])
    along = [(m, set(out_dims(g.by_name[m]))) for m in members if g.escapes(m, members)]
    if any(set(axes) & own and not (m in early and set(axes) <= own) for m, own in along):
        return None
    return axes[at] if all(isinstance(g.program.sizes[d], Const) for d in axes) else None


def split(g: Graph, plan: StagePlan, loops: Loops, segments: int = SEGMENTS) -> SplitNests:
    """The two kernels of a plan whose first stage is cut along the axis it streams over.

    Where there are as many segments as that axis has indices, or more, each index is cut along the `next_axis`, evenly:
    a tile of a streamed axis is two indices at least. Later stages, over other axes, run in the combine kernel.
    """
    stage, axis = plan.stages[0], loops.stages[0]
    assert axis is not None
    outer: tuple[str, ...] = ()
    beside = next_axis(g, plan, axis)
    if beside is not None and segments >= g.extent(axis):
        segments = -(-segments // int(g.extent(axis)))
        outer, axis = (axis,), beside
        loops = replace(loops, stages=(axis,))
    segment = free(f"{axis}_seg", g.program.names)
    cut = (*outer, segment)
    sizes: dict[str, Expr] = {segment: lit(segments)}
    first = Builder(g, plan, loops)
    early = early_maps(g, plan, axis)
    first.to_write = [m for m in first.to_write if m in early]
    first.fold_pass(0, _at_each(stage, outer), axis, *share_of(axis, segment, segments, g.program.sizes[axis]))
    parts: list[Result] = []
    for v in stage.fold.state:
        name, index = first.state_names(stage.fold, v)
        dims = _part_dims(g, plan, v, cut)
        for value, result, dtype in ((name, v.name, v.dtype), (index, v.index_name, DType.I64)):
            if value is not None and result is not None:
                held = _part(g, plan, result)
                parts.append(Result(held, dims, dtype))
                first.outer.nodes.append(Store(held, plain(dims), dims, Load(value, plain((*outer, *v.dims)))))
    second = Builder(g, plan, loops)
    second.to_write = [m for m in second.to_write if m not in early]
    columns = _own_columns(g, plan, second.to_write)
    for v in stage.fold.state:
        second.outer.nodes.append(_merge(second, stage, v, cut, sizes, g))
    second.finish(stage)
    for m in [m for m in stage.reductions if m in second.to_write]:
        second.store(m, second.outer)
    for k, later in enumerate(plan.stages[1:], 1):
        second.stage(k, later)
        for m in [m for m in later.reductions if m in second.to_write]:
            second.store(m, second.outer)
    second.write_rest()
    nest = tuple(first.outer.nodes)
    for d in reversed(cut):
        nest = (Loop("forall", d, nest, single=True),)
    return SplitNests(
        in_parallel(nest, apart(plan, loops)),
        in_parallel(tuple(second.outer.nodes), (*plan.group.parallel, *columns)),
        tuple(parts),
        sizes,
        early,
    )


def share_of(axis: str, segment: str, segments: int, extent: Expr | None = None) -> tuple[Expr, Expr]:
    """Where a segment's indices of an axis begin and end. extent: of the axis; long shares of a known one begin at
    multiples of what a thread loads at once, which loads are torn apart for otherwise."""
    length = call("floordiv", call("add", Size(axis), segments - 1), segments)
    each = -(-int(extent.value) // segments) if isinstance(extent, Const) else 0
    if each >= LONG_SHARE and each % VECTOR:
        length = call("mul", call("floordiv", call("add", length, RUN - 1), RUN), RUN)
    at = call("tile_start", Index(segment))
    return call("mul", at, length), call("minimum", Size(axis), call("mul", call("add", at, 1), length))


def with_even_shares(b: Block) -> Block:
    """`b` with long shares of axes of known extents beginning at multiples of what a thread loads at once: a segment of
    an axis that several were joined to (`block.collapse`) has whole indices of the first, rows of an odd length. What
    the segments have is combined, whichever indices each of them has."""

    def one(n: Node) -> Node:
        if not isinstance(n, Loop):
            return n
        n = replace(n, body=tuple(map(one, n.body)))
        segment = _segment(n)
        extent = b.sizes[n.dim]
        if segment is None or not isinstance(extent, Const) or not isinstance(count := b.sizes[segment], Const):
            return n
        each = poly(n.start.args[1], b.sizes) if isinstance(n.start, Call) else {}
        if set(each) != {()} or each[()] < LONG_SHARE or each[()] % VECTOR == 0:
            return n
        start, stop = share_of(n.dim, segment, int(count.value), extent)
        return replace(n, start=start, stop=stop)

    return replace(b, body=tuple(map(one, b.body)))


def _segment(n: Loop) -> str | None:
    """The dim of which each index has a share of a loop's axis, as many indices as others have."""
    match n.start, n.stop:
        case (
            Call("mul", (Call("tile_start", (Index(d),)) as at, length)),
            Call("minimum", (_, Call("mul", (Call("add", (ahead, Const(1))), other)))),
        ) if ahead == at and other == length:
            return d
    return None


def _at_each(stage: Stage, outer: tuple[str, ...]) -> Stage:
    """The stage at one index of the outer axes: its states are those of all, which each index has of its own."""
    if not outer:
        return stage
    states = {v.name for v in stage.fold.state}

    def one(n: Expr) -> Expr | None:
        state = isinstance(n, Load) and n.tensor.removesuffix(NEW).removesuffix(OLD) in states
        return Load(n.tensor, (*plain(outer), *n.index)) if state and isinstance(n, Load) else None

    axes = tuple(d for d in stage.axes if d not in outer)
    state = tuple(
        replace(
            v,
            dims=(*outer, *v.dims),
            element=transform(v.element, one),
            repair=None if v.repair is None else transform(v.repair, one),
        )
        for v in stage.fold.state
    )
    return replace(stage, axes=axes, fold=replace(stage.fold, axes=axes, state=state, finish=()))


def _own_columns(g: Graph, plan: StagePlan, written: Sequence[str]) -> tuple[str, ...]:
    """Dims that the combine kernel is parallel over besides the fold's own: all of its results have them."""
    axes = {d for s in plan.stages for d in s.axes}
    common = [d for d in out_dims(g.by_name[written[-1]]) if d not in plan.group.parallel and d not in axes]
    return tuple(d for d in common if all(d in out_dims(g.by_name[m]) for m in written))


def _merge(b: Builder, stage: Stage, v: StateVar, cut: tuple[str, ...], sizes: dict[str, Expr], g: Graph) -> Let:
    """One state variable of the whole from its parts, moved to the whole's D. cut: the dims that tell parts apart."""
    name, index = b.state_names(stage.fold, v)
    rdims = cut
    at: dict[str, Expr] = {}
    if v.reducer == "topk":
        slot = v.dims[-1]
        each = _part(g, b.plan, slot)
        sizes[each] = g.program.sizes[slot]
        at[slot] = Index(each)
        rdims = (*cut, each)
    held = {r: w for w in stage.fold.state for r in (w.name, w.index_name) if r}

    def part(result: str) -> Load:
        w = held[result]
        same = {d: lit(0) for d in b.plan.group.parallel if d not in w.dims}
        index = tuple({**same, **at}.get(d, Index(d)) for d in _part_dims(g, b.plan, w, cut))
        return Load(_part(g, b.plan, result), index)

    value: Expr = part(v.name)
    if v.repair is not None:
        value = _moved(b, stage.fold, v, part)
    payload = part(v.index_name) if v.index_name else None
    return Let(name, v.dims, v.dtype, value, v.reducer, rdims, index, payload)


def _moved(b: Builder, fold: Fold, v: StateVar, part: Callable[[str], Load]) -> Expr:
    """The repair with this variable and D read from the parts, and D' from the merged state."""
    assert v.repair is not None

    def one(n: Expr) -> Expr | None:
        if not isinstance(n, Load):
            return None
        if n.tensor.endswith(NEW):
            return n
        base = n.tensor.removesuffix(OLD)
        return part(base) if base in {w.name for w in fold.state} else None

    return b.in_fold(fold, transform(v.repair, one), b.outer)


def _part(g: Graph, plan: StagePlan, name: str) -> str:
    """What holds the parts of a state, or counts the slots of one; nothing in the program is called so. A state that is
    no value of the program (a count, which may have the name of a dim) has the name of its group too: other kernels
    count as well."""
    own = name if name in g.results else f"{plan.group.members[-1]}_{name}"
    return free(f"{own}_part", g.program.names)


def column_dim(g: Graph, plan: StagePlan) -> str | None:
    """The parallel dim along which elements that the first stage reads are neighbours in memory, if what is reduced is
    not: the fold runs down columns. Tensors count by their elements, as if their last axis was contiguous; where as
    many are in columns as in rows (channels last, and first), it has columns."""
    members, axes = plan.group.members, set(plan.stages[0].axes)
    mine = {r for m in members for r in g.by_name[m].results}
    found: dict[str | None, float] = {}
    for ld in dict.fromkeys(ld for m in members for ld in loads(g.by_name[m].body)):
        if ld.tensor in mine or not axes & set(dims_used(ld)):
            continue
        last = dims_used(ld.index[-1])
        along = None if axes & set(last) else next((d for d in plan.group.parallel if d in last), None)
        found[along] = found.get(along, 0.0) + g.points(set(dims_used(ld)))
    return max(found, key=lambda d: (found[d], d is not None)) if found and not plan.inner else None


def _part_dims(g: Graph, plan: StagePlan, v: StateVar, cut: tuple[str, ...]) -> tuple[str, ...]:
    """Axes of a partial state in memory: parallel dims and segments, then what else it has; segments first where blocks
    hold columns, so that they write rows.

    A state that is the same for all blocks of a parallel dim (a count) is written by each of them.
    """
    parallel = plan.group.parallel
    head = (*parallel, *cut) if column_dim(g, plan) is None else (*cut, *parallel)
    return (*head, *[d for d in v.dims if d not in head])
