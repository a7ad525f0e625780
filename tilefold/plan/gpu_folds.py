"""Folds that only read, on a GPU: sums over rows, columns, images and batches, and what is made of them.

Their time is that of reading. A thread block reads its share at `block_rate` or `stream_rate` at most, all blocks at
`unit_rate` a multiprocessor (`hardware.Gpu`), so that cutting a fold into segments gains nothing where the blocks
already use the memory. A row of 8192 float32 is read in 0.8 us by one block, less than a second kernel costs; one of
32768 in 3.3 us, which 64 segments save. Blocks that run down columns have neighbouring ones, as many as loads are wide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Index, dims_used, loads
from tilefold.block.build import ROW_IN_CACHE, Loops, loop_dim, rewritten_rows
from tilefold.block.fuse import with_unit
from tilefold.block.group import Group, Limits
from tilefold.block.legal import one_kernel
from tilefold.block.split import column_dim, next_axis
from tilefold.block.stages import StagePlan, inline_maps, plan_stages
from tilefold.block.twins import Decided, Renaming, Twins
from tilefold.plan.hardware import Gpu
from tilefold.plan.parts import of_elements, of_parts, repeated
from tilefold.tensor.analysis import Graph, expr_flops, is_static, out_dims
from tilefold.tensor.ir import Compute, Program
from tilefold.tile.pieces import is_single, power_of_two

#: How many times as many indices another axis has that is cut into segments instead of the first.
OTHER_AXIS = 4
#: Neighbours of a step, of which half a sector is.
LEAST_STEP = 4


def streamed_axis(g: Graph, plan: StagePlan, k: int, machine: Gpu) -> str | None:
    """The axis that stage k streams over: of several the first, if a thread block holds all of the others (an image in
    a loop over a batch), else the longest; None where all of them are one block.

    Segments are of that axis. Where the first has fewer indices than would fill the machine, and another `OTHER_AXIS`
    times as many (sequences of a batch, their positions), it is the longest too; and where neighbours in memory lie
    along the first (channels of a group, last), of which a step would have few. It is another than the longest where
    that leaves a step few neighbours (`_of_runs`).
    """
    axes, longest = plan.stages[k].axes, loop_dim(g, plan.stages[k])
    if longest is None or len(axes) == 1 or plan.inner or not all(is_static(g.program.sizes[d]) for d in axes):
        return longest
    beside = math.prod(power_of_two(int(g.extent(d))) for d in axes[1:])
    first = g.extent(axes[0])
    few = first * _blocks(g, plan, machine) < machine.cores * machine.column_blocks
    whole = beside <= machine.beside and not (few and g.extent(longest) >= OTHER_AXIS * first)
    if whole and not _along(g, plan, axes[0]):
        return axes[0]
    return _of_runs(g, plan, k, machine) or longest


def _of_runs(g: Graph, plan: StagePlan, k: int, machine: Gpu) -> str | None:
    """The axis that stage k streams over where a step of its longest would have few neighbours: a block holds what is
    not read in one run with it. The first of which a step has more, and that has an index for each multiprocessor (with
    the one behind it, all in all); else the one beside which least is held. None where a block holds neighbours
    (`machine.columns`) of the longest beside the others."""
    axes, longest = plan.stages[k].axes, loop_dim(g, plan.stages[k])
    if longest is None or len(axes) == 1 or plan.inner or not all(is_static(g.program.sizes[d]) for d in axes):
        return None
    held = {d: _held(g, plan, axes, d) for d in axes}
    few = {d for d in axes if held[d] * machine.columns > machine.beside}
    if longest not in few:
        return None
    rows = g.points(plan.group.parallel)
    alone = rows == 1  # then indices of the axis are cut again (`segments_of_reads`)
    blocks = {d: g.points(axes[n : n + 2]) if alone else rows * g.extent(d) for n, d in enumerate(axes)}
    found = next((d for d in axes if d not in few and blocks[d] >= machine.cores), None)
    if found is not None or not (alone or column_dim(g, plan) is not None):
        return found
    # so they are of columns, of which a block has neighbours, where blocks are too few
    tall, width = (1, 1) if alone else (_blocks(g, plan, machine), machine.least_columns)
    both = (
        d
        for d, e in itertools.pairwise(axes)
        if tall * g.points((d, e)) >= machine.cores
        and (alone or tall * g.extent(d) < machine.cores * machine.column_blocks)
        and LEAST_STEP * width * held[d] <= machine.read_at_once * g.extent(e)
    )
    return next(both, min(axes, key=lambda d: held[d]) if alone else None)


def _held(g: Graph, plan: StagePlan, axes: Sequence[str], axis: str) -> float:
    """Indices of other axes that a step of an axis holds of a tensor. Those behind it, up to a parallel dim, are read
    in one run with it, as if tensors were contiguous: launches make one axis of them where strides allow it, and where
    nothing is read along some of them alone (weights of channels)."""
    read = {ld for m in plan.group.members for ld in loads(g.by_name[m].body)}
    along = {d: {ld for ld in read if d in dims_used(ld)} for d in axes}
    most = 1.0
    for ld in along[axis]:
        places = [ix.dim if isinstance(ix, Index) else None for ix in ld.index]
        run = {axis}
        for d in places[places.index(axis) + 1 :] if axis in places else ():
            if d is None or along.get(d) != along[axis]:
                break
            run.add(d)
        most = max(most, math.prod(g.extent(d) for d in axes if d not in run and ld in along[d]))
    return most


def _along(g: Graph, plan: StagePlan, axis: str) -> bool:
    """Whether most elements that the group reads along an axis have neighbours along it, as if the last axis of tensors
    was contiguous."""
    read = _read_along(g, plan, axis)
    last = {
        ld.tensor
        for m in plan.group.members
        for ld in loads(g.by_name[m].body)
        if ld.index and axis in dims_used(ld.index[-1])
    }
    return 2 * sum(n for t, n in read.items() if t in last) > sum(read.values())


def whole_columns(g: Graph, plan: StagePlan, loops: Loops) -> frozenset[str]:
    """The dim of which each thread block has all indices, as single values (`tile.pieces.singles`): of few columns, no
    power of two, that lie side by side in memory (coordinates of points). Blocks of their own would each read all
    sectors, and a tile of columns has lanes for none. Not of what is written along the loops: stores would not share
    their lines."""
    d, members = column_dim(g, plan) if plan.stages else None, plan.group.members
    if d is None or not isinstance(g.program.sizes[d], Const) or not is_single(int(g.extent(d))):
        return frozenset()
    local = {x for m in members if g.escapes(m, members) for x in out_dims(g.by_name[m])} - {*plan.group.parallel}
    return frozenset() if local or None in loops.stages else frozenset({d})


def columns_fit(g: Graph, plan: StagePlan, machine: Gpu) -> bool:
    """Whether a thread block can hold what `block.build` keeps of a stage: whole rows, or enough whole columns, of each
    tensor that the stage reads."""
    kept = [k for k in range(len(plan.stages)) if rewritten_rows(g, plan, k)]
    if not kept or column_dim(g, plan) is None:
        return True
    most = max(math.prod(power_of_two(int(g.extent(d))) for d in plan.stages[k].axes) for k in kept)
    read = {t for k in kept for d in plan.stages[k].axes[:1] for t in _read_along(g, plan, d)}
    registers = max(1.0, sum(g.program.dtype_of(t).nbytes for t in read) / DType.F32.nbytes)
    return most * machine.least_columns * registers <= machine.held_columns


def segments_of_reads(g: Graph, plan: StagePlan, axis: str, machine: Gpu) -> int | None:
    """Segments that fill the machine, of a fold that only reads, if they save more than a second kernel costs."""
    axes = set(plan.stages[0].axes)
    units, extent, tall = machine.cores, g.extent(axis), _blocks(g, plan, machine)
    alone = g.points(plan.group.parallel) == 1 and _of_runs(g, plan, 0, machine) is not None
    beside = next_axis(g, plan, axis) if alone or column_dim(g, plan) is not None else None
    each = 1 if beside is None else int(g.extent(beside))
    if _column(g, plan) is None and len(axes) == 1 and not plan.inner:
        shares = _alone_seconds(g, plan, machine) / machine.turn
        most = max(machine.most_segments, extent // machine.long_segment, shares)
        n = int(min(units * machine.blocks_a_unit // tall, extent // machine.least_segment, most))
    else:
        width = machine.columns if column_dim(g, plan) is not None else 1
        read = max(g.points(axes), *_read_along(g, plan, axis).values(), *(n for n, _ in _computed(g, plan)), 0)
        shares = max(read * width // machine.least_read, width * _alone_seconds(g, plan, machine) / machine.turn)
        most = int(min(extent * each, shares, machine.most_read_segments))
        n = max(1, min(int(units * machine.column_blocks // tall), most))
        if n > extent or (n == extent and beside is not None):  # all indices by themselves, each cut evenly
            n = int(extent) * equal(int(n // extent), lambda k: each % k == 0)
            return n if _saved(g, plan, axis, n, machine) > machine.second_kernel else None
        n = min(range(n, max(n, min(2 * n, most)) + 1), key=lambda k: _idle(tall * k, units)) if n > 1 else 1
    n = equal(n, lambda k: extent % (k * machine.one_tile) == 0 or (len(axes) > 1 and extent % k == 0))
    return n if n > 1 and _saved(g, plan, axis, n, machine) > machine.second_kernel else None


def _idle(blocks: int, units: int) -> float:
    """Time that multiprocessors wait for those with a thread block more, as a share of their own."""
    return -(-blocks // units) * units / blocks - 1


def equal(n: int, fits: Callable[[int], bool]) -> int:
    """n segments or up to half of them, where these have no ragged ends."""
    return next((k for k in range(n, n // 2, -1) if fits(k)), n)


def _column(g: Graph, plan: StagePlan) -> str | None:
    """The dim of which a thread block has neighbours. Of a fold over several axes it may be any dim among them, if two
    or more are behind it: images are laid out with channels first or last, which only calls know, and the number of
    segments serves both. Of rows (sums over the first and the last axis) it is none."""
    found = column_dim(g, plan)
    if found is not None or plan.inner or len(plan.stages[0].axes) == 1:
        return found
    axes = set(plan.stages[0].axes)
    for ld in dict.fromkeys(ld for m in plan.group.members for ld in loads(g.by_name[m].body)):
        dims = [dims_used(ix) for ix in ld.index]
        places = [n for n, d in enumerate(dims) if axes & d]
        first, last = (places[0], places[-2]) if len(places) > 1 else (len(dims), 0)
        among = [d for d in plan.group.parallel if g.extent(d) > 1 and any(d in x for x in dims[first:last])]
        if among:
            return among[-1]
    return None


def _blocks(g: Graph, plan: StagePlan, machine: Gpu) -> int:
    """Thread blocks of one kernel: each has one row, or neighbouring columns."""
    column = _column(g, plan)
    rows = math.prod(g.extent(d) for d in plan.group.parallel if d != column)
    return max(1, int(rows if column is None else rows * -(-g.extent(column) // machine.columns)))


def _saved(g: Graph, plan: StagePlan, axis: str, n: int, machine: Gpu) -> float:
    """Seconds of reading, or of what is computed of it, that n segments of the axis save."""
    units, column = machine.cores, _column(g, plan)
    width = 1 if column is None else min(machine.columns, g.extent(column))
    read = _read_along(g, plan, axis)
    elements = width * sum(read.values())
    each = width * sum(k * g.program.dtype_of(t).nbytes for t, k in read.items())
    together = each * _blocks(g, plan, machine) / (units * machine.unit_rate)
    alone = width * sum(n * flops for n, flops in _computed(g, plan)) / (machine.vector / units)

    def seconds(k: int) -> float:
        waves = -(-_blocks(g, plan, machine) * k // units)
        worked = waves * alone / k
        if column is None:
            rate = machine.block_rate if elements / k <= ROW_IN_CACHE else machine.stream_rate
            reading, beside = max(together, each / k / rate), max(1.0, _blocks(g, plan, machine) * k / units)
            return max(reading, worked) + min(reading, worked) / beside  # a block by itself reads, then computes
        idle = _idle(_blocks(g, plan, machine) * k, units)
        return max(together * (1 + idle), each / k / machine.stream_rate, worked)

    return seconds(1) - seconds(n)


def _alone_seconds(g: Graph, plan: StagePlan, machine: Gpu) -> float:
    """Seconds in which a thread block by itself reads all of a row, or of a column, and computes what it makes of it:
    a segment has as much as takes longer than to wait for memory once. Elements of a few numbers each, sectors of which
    one element is needed, and long expressions are more than their count says."""
    mine = {r for m in plan.group.members for r in g.by_name[m].results}
    axes = {d for stage in plan.stages for d in stage.axes}
    nbytes: dict[str, float] = {}
    for ld in dict.fromkeys(ld for m in plan.group.members for ld in loads(g.by_name[m].body)):
        if ld.tensor in mine or not ld.index or not axes & dims_used(ld):
            continue
        last = ld.index[-1]
        beside = bool(dims_used(last)) and not loads(last)
        each = g.program.dtype_of(ld.tensor).nbytes if beside else machine.sector
        most = math.inf if beside else g.nbytes([ld.tensor])
        places = g.points(dims_used(ld) - {*plan.group.parallel})
        nbytes[ld.tensor] = min(nbytes.get(ld.tensor, 0.0) + places * each, most)
    computed = sum(n * flops for n, flops in _computed(g, plan)) / (machine.vector / machine.cores)
    return sum(nbytes.values()) / machine.block_rate + computed


def _computed(g: Graph, plan: StagePlan) -> list[tuple[float, float]]:
    """Of each member of a fold: the elements that one row or column computes, and arithmetic of one."""
    found: list[tuple[float, float]] = []
    for m in plan.group.members:
        c = g.by_name[m]
        dims = {*out_dims(c), *c.rdims} - {*plan.group.parallel}
        found.append((g.points(dims), float(expr_flops(c.body) + (c.reducer is not None))))
    return found


def _read_along(g: Graph, plan: StagePlan, axis: str) -> dict[str, float]:
    """Elements that one block reads along the axis, of each tensor that no member computes."""
    members = plan.group.members
    mine = {r for m in members for r in g.by_name[m].results}
    found: dict[str, float] = {}
    for ld in dict.fromkeys(ld for m in members for ld in loads(g.by_name[m].body)):
        dims = dims_used(ld)
        if ld.tensor not in mine and axis in dims:
            elements = math.prod(g.extent(d) for d in dims if d not in plan.group.parallel)
            found[ld.tensor] = max(elements, found.get(ld.tensor, 0.0))
    return found


def separated(
    p: Program,
    g: Graph,
    groups: Sequence[Group],
    machine: Gpu,
    calls: Collection[tuple[str, ...]] = (),
    fits: Callable[[Group], bool] = lambda _: True,
) -> tuple[Program, list[Group]]:
    """The groups, with what is written along a reduced axis in kernels of its own where that is estimated faster.

    A kernel that reduces few long rows or columns and then writes them again (a batch norm in training, a softmax down
    columns) has few thread blocks. In two kernels the first is cut into segments, the second is parallel over all that
    it writes; both read the input, as the one does that cannot hold it. Maps that both need are computed in both, but
    for what needs nothing of the fold and is of fewer bytes than what it is made of (the gradient behind an activation,
    which a residual passes on): the first kernel writes it, the second reads it. fits: whether a kernel can be made of
    a group that keeps columns.
    """
    done: list[Group] = []
    bodies: dict[str, Compute] = {}
    todo = list(reversed(groups))
    twins, known = Twins(g), Decided(_of_twin)
    while todo:
        x = todo.pop()
        later = _Later() if x.members in calls else known.of(*twins.keyed(x), partial(_later, g, x, machine, fits))
        staged, late = later.staged, later.late
        first = tuple(m for m in x.members if m not in late)
        again = frozenset(first) - frozenset(later.read)
        changed = {m: _alone(g, g.by_name[m], again) for m in late}
        after = Graph.of(_with(p, changed)) if late else g
        both = (first, late) if first and late else ()
        parts = [one_kernel(after, part, Limits(in_registers=True)) for part in both]
        if parts and all(isinstance(part, Group) for part in parts):
            made = [part for part in parts if isinstance(part, Group)]
            bodies |= changed
            if staged:
                p, g, twins = after.program, after, Twins(after)
            done += made[:1] if staged else made
            todo += made[1:] if staged else []
        else:
            done.append(x)
    return _with(p, bodies), done


def _with(p: Program, bodies: dict[str, Compute]) -> Program:
    return replace(p, body=tuple(bodies.get(c.name, c) for c in p.body))


def _alone(g: Graph, c: Compute, again: frozenset[str]) -> Compute:
    """The map with the maps among `again` put in: it reads memory, what others write there, and what was reduced."""
    return replace(c, body=inline_maps(g, c.body, lambda m: m in again and g.by_name[m].reducer is None))


def _read_later(g: Graph, x: Group, first: Sequence[str], late: Sequence[str], machine: Gpu) -> set[str]:
    """Maps that the first kernel computes for its fold, and that the late maps had better read than compute again: less
    is read and written so. (What is written anyway costs no writing.)"""
    plan = plan_stages(g, with_unit(x))
    axes = set(plan.stages[0].axes)
    folded = {c.name for m in plan.stages[0].reductions for c in g.reached(m, g.producers, lambda c: c.reducer is None)}
    dims = {d for m in late for d in out_dims(g.by_name[m])}

    def moved(kept: set[str]) -> float:
        bodies = [_alone(g, g.by_name[m], frozenset(first) - kept).body for m in late]
        found = {ld for e in bodies for ld in loads(e)}
        read = sum(of_elements(g, [ld for ld in found if ld.tensor == t]) for t in {ld.tensor for ld in found})
        parts = [of_parts(e) for e in bodies]
        again = sum(math.inf if x is None else repeated(g, x, machine) for x in parts)
        return read + again + sum(g.nbytes([m]) for m in kept if not g.escapes(m, x.members))

    kept: set[str] = set()
    for m in reversed(first):
        c = g.by_name[m]
        if c.reducer is None and m in folded and plan.ready[m] < 0 and axes | dims <= set(out_dims(c)):
            more, less = moved({*kept, m}), moved(kept)
            if more < less or (more == less and g.escapes(m, x.members)):
                kept.add(m)
    return kept


@dataclass(frozen=True, slots=True)
class _Later:
    """Members of a group that a second kernel had better compute: a second fold and what comes after, else maps. read:
    those of the first that it reads."""

    staged: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    read: tuple[str, ...] = ()


def _of_twin(found: _Later, names: Renaming) -> _Later:
    return _Later(*map(names.tensors, (found.staged, found.late, found.read)))


def _later(g: Graph, x: Group, machine: Gpu, fits: Callable[[Group], bool]) -> _Later:
    staged = _later_stage(g, x, machine)
    late = staged or _late(g, x, machine, fits)
    first = [m for m in x.members if m not in late]
    read = _read_later(g, x, first, late, machine) if late else ()
    return _Later(tuple(staged), tuple(late), tuple(m for m in first if m in read))


def _late(g: Graph, members: Group, machine: Gpu, fits: Callable[[Group], bool]) -> list[str]:
    """Maps of a group that had better be computed by a second kernel, and what the group makes of them."""
    reduced = {d for m in members.members for d in g.by_name[m].rdims}
    maps = [m for m in members.members if g.by_name[m].reducer is None and reduced & set(out_dims(g.by_name[m]))]
    if not any(g.escapes(m, members.members) for m in maps):
        return []  # nothing is written along what is reduced
    plan = plan_stages(g, with_unit(members))
    if len(plan.stages) != 1 or plan.inner:
        return []
    axes = set(plan.stages[0].axes)
    if not all(is_static(g.program.sizes[d]) and g.extent(d) > 0 for d in (*axes, *members.parallel)):
        return []
    late = [
        m
        for m in members.members
        if g.by_name[m].reducer is None and g.escapes(m, members.members) and axes & set(out_dims(g.by_name[m]))
        if not (plan.ready[m] < 0 and axes <= set(out_dims(g.by_name[m])))
    ]
    kept = all(rewritten_rows(g, plan, 0) for _ in late[:1]) and columns_fit(g, plan, machine)
    if not late:
        return []
    if kept and (column_dim(g, plan) is None or fits(members)):
        return []
    if _apart_seconds(g, plan, late, machine) >= _whole_seconds(g, plan, late, machine):
        return []
    after = frozenset[str]().union(*map(g.below, late))  # a copy, a bias's gradient
    return [m for m in members.members if m in late or m in after]


def _later_stage(g: Graph, members: Group, machine: Gpu) -> list[str]:
    """What comes after the first of several folds, if a second kernel had better compute it: its fold is over fewer
    axes (the mean of each image behind a batch norm in training), so that it has more thread blocks; or over some of
    the same (variances of components about means that are sums of all points), so that no segments of one kernel
    compute both."""
    if sum(g.by_name[m].reducer is not None for m in members.members) < 2:
        return []
    plan = plan_stages(g, with_unit(members))
    if len(plan.stages) < 2 or plan.inner or not {*plan.stages[0].axes} & {d for s in plan.stages[1:] for d in s.axes}:
        return []
    fewer = len(plan.stages) == 2 and {*plan.stages[1].axes} < {*plan.stages[0].axes}
    if not fewer and any(rewritten_rows(g, plan, k) for k in range(len(plan.stages))):
        return []  # a block keeps what several folds read
    axes = set(plan.stages[0].axes)
    if not all(is_static(g.program.sizes[d]) and g.extent(d) > 0 for d in (*axes, *members.parallel)):
        return []
    late = [
        m for m in members.members if plan.ready[m] > 0 or (plan.ready[m] == 0 and axes & set(out_dims(g.by_name[m])))
    ]
    written = [m for m in late if g.escapes(m, members.members)]
    more = 0.0 if fewer else 2 * machine.second_kernel  # both folds are cut, and what is left is combined
    apart = _apart_seconds(g, plan, written, machine) + more
    return late if apart < _whole_seconds(g, plan, written, machine) else []


def _moved(g: Graph, plan: StagePlan, late: Sequence[str]) -> tuple[float, float]:
    """Bytes that a pass over the axes reads, and that the late maps write."""
    (axis, *_) = plan.stages[0].axes
    rows = math.prod(g.extent(d) for d in plan.group.parallel)
    read = rows * sum(n * g.program.dtype_of(t).nbytes for t, n in _read_along(g, plan, axis).items())
    return read, sum(g.points(out_dims(g.by_name[m])) * g.by_name[m].dtype.nbytes for m in late)


def _whole_seconds(g: Graph, plan: StagePlan, late: Sequence[str], machine: Gpu) -> float:
    """Estimate of one kernel that reads its rows or columns twice."""
    read, written = _moved(g, plan, late)
    column = column_dim(g, plan)
    each = machine.unit_rate if column is None else machine.stream_rate
    rows = math.prod(g.extent(d) for d in plan.group.parallel if d != column)
    running = rows if column is None else rows * -(-g.extent(column) // machine.columns)
    return (2 * read + written) / min(running * each, machine.cores * machine.unit_rate)


def _apart_seconds(g: Graph, plan: StagePlan, late: Sequence[str], machine: Gpu) -> float:
    """Estimate of two kernels, and of the one that combines segments of the first."""
    read, written = _moved(g, plan, late)
    return (2 * read + written) / (machine.cores * machine.unit_rate) + 2 * machine.second_kernel
