"""Which Computes share a kernel: groups over common parallel dims.

A group is legal when every value that crosses an internal edge is computed in the same
block of the parallel dims as it is used (plain indices), when no path leaves the group and
returns, and when what stays local to a block is bounded. Dims that only cheap members lack
are kept parallel, and those members repeated per block (recomputation).

Growing is greedy along edges, nearest producer first; every refusal is recorded with its
reason. (The exact planner over ideals of the DAG replaces the greed later; the legality
test stays.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilefold.algebra.expr import Load, dims_used, loads, tensors_read
from tilefold.errors import SourceLoc
from tilefold.tensor.analysis import Graph, is_static, out_dims, plain_axes
from tilefold.tensor.ir import Program
from tilefold.tensor.product import product_of

#: Most elements, over one index of the parallel dims, that a block may keep of one value.
LOCAL_LIMIT = 2048
#: Extent that may change from parallel to local because a partner of the merge lacks the dim.
LOST_LIMIT = 512
#: Repeated work is accepted up to this share of the work it sits beside.
REPEAT_SHARE = 1 / 16
#: Bytes between kernels that are not worth fewer thread blocks, as a share of what the first kernel reads.
LITTLE = 1 / 16
#: Block length along a parallel dim that repeated members are charged for.
REPEAT_BLOCK = 128
#: By default a merge must leave this many independent blocks, if one of its parts had them.
ENOUGH_PARALLEL = 2
#: Fewer blocks than this are worth cutting along a reduced axis of at least LONG_AXIS elements.
FEW_BLOCKS = 4
LONG_AXIS = 1 << 16


@dataclass(frozen=True, slots=True)
class Group:
    """Members in program order and the dims their kernel is parallel over (order of the last member)."""

    members: tuple[str, ...]
    parallel: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a producer and its consumer do not share a kernel."""

    producer: str
    consumer: str
    reason: str
    loc: SourceLoc | None = None


@dataclass(frozen=True, slots=True)
class Grouping:
    groups: tuple[Group, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What merging keeps to. apart: computes that stay alone. workers: independent blocks to be left. both: blocks to
    be left where each of two kernels has so many (sums over rows and sums over columns have none in common).
    in_registers: what a kernel computes is read where it was computed, as values in registers are."""

    apart: frozenset[str] = frozenset()
    workers: int = ENOUGH_PARALLEL
    both: int = 1
    in_registers: bool = False


def group(
    p: Program,
    apart: frozenset[str] = frozenset(),
    workers: int = ENOUGH_PARALLEL,
    both: int = 1,
    in_registers: bool = False,
    calls: Iterable[tuple[str, ...]] = (),
) -> Grouping:
    """Partition the program. Computes in `apart` (library calls) stay alone, those of one of `calls` together; for the
    rest see `Bounds`."""
    g = Graph.of(p)
    bounds = Bounds(apart, workers, both, in_registers)
    of: dict[str, Group] = {c.name: Group((c.name,), out_dims(c)) for c in p.body}
    for call in calls:
        of |= dict.fromkeys(call, Group(call, out_dims(g.by_name[call[-1]])))
    refusals: dict[tuple[str, str], Refusal] = {}
    changed = True
    while changed:
        changed = False
        refusals.clear()
        for c in p.body:
            for r in reversed(g.producers[c.name]):
                a, b = of[r], of[c.name]
                if a is b:
                    continue
                merged = merge(g, a, b, of, bounds)
                if isinstance(merged, str):
                    refusals[(r, c.name)] = Refusal(r, c.name, merged, c.loc)
                    continue
                of.update(dict.fromkeys(merged.members, merged))
                changed = True
        changed = _merge_siblings(g, of, bounds) or changed
    unique = dict.fromkeys(of[c.name] for c in p.body)
    return Grouping(_ordered(g, list(unique), of), tuple(refusals.values()))


def merge(g: Graph, a: Group, b: Group, of: dict[str, Group], bounds: Bounds) -> Group | str:
    """The union of two groups, or the reason why it is not one kernel."""
    members = tuple(c.name for c in g.program.body if c.name in a.members or c.name in b.members)
    reduced = {d for m in members for d in g.by_name[m].rdims}
    if bounds.apart & set(members):
        return "a library call computes it"
    if _path_outside(g, a, b, of):
        return "another kernel stands between them"
    whole = one_kernel(g, members, in_registers=bounds.in_registers)
    if isinstance(whole, str):
        return whole
    parallel = whole.parallel
    lost = {d for x in (a, b) for d in x.parallel if d not in parallel and d not in reduced}
    if bounds.in_registers and lost:
        kept = [m for m in members if g.by_name[m].reducer is None and g.escapes(m, members)]
        shorter = next((m for m in kept if lost & _wider(g, a, b, m)), None)
        if shorter is not None:
            return f"{shorter} goes to memory, and its kernel would not be parallel over {', '.join(sorted(lost))}"
    if g.points(lost) > LOST_LIMIT or not all(is_static(g.program.sizes[d]) for d in lost):
        return f"the parallel dim {', '.join(sorted(lost))} would be lost"
    left = g.points(parallel)
    if left < bounds.both and left * bounds.both <= g.points(a.parallel) and _little_between(g, a, b):
        return f"only {g.points(parallel)} independent blocks would be left, to save little"
    least = min(bounds.workers, max(g.points(a.parallel), g.points(b.parallel)))
    few = g.points(parallel) < least and not splittable(g, members, parallel)
    if few or g.points(parallel) < min(bounds.both, g.points(a.parallel), g.points(b.parallel)):
        return f"only {g.points(parallel)} independent blocks would be left"
    return Group(members, parallel)


def _little_between(g: Graph, a: Group, b: Group) -> bool:
    """Whether what goes from one group to the other is little beside what the first reads: a row's log-sum-exp, which
    a sum over rows takes. Such a sum is a kernel of its own, so that rows have thread blocks of their own. (Products of
    vectors, the scores of decoding, are folded in the loop that reads their operands.)"""
    if not any(g.by_name[m].reducer and not _of_vectors(g, m) for m in a.members):
        return False
    between = {r for m in b.members for r in g.producers[m] if r in a.members}
    if not between:
        return False
    read = {t for m in a.members for t in tensors_read(g.by_name[m].body)} - set(a.members)
    return g.nbytes(between) <= LITTLE * g.nbytes(read)


def _of_vectors(g: Graph, m: str) -> bool:
    product = product_of(g.by_name[m])
    return product is not None and bool(product.of_one_side)


def _wider(g: Graph, a: Group, b: Group, m: str) -> set[str]:
    """Dims that the partner of m's group is parallel over and m does not have."""
    partner = b if m in a.members else a
    return set(partner.parallel) - set(out_dims(g.by_name[m]))


def legal(g: Graph, members: tuple[str, ...], workers: int = ENOUGH_PARALLEL) -> Group | str:
    """The group of a convex set of members, or the reason why it is not one kernel: `merge`'s test for a whole set."""
    whole = one_kernel(g, members)
    if isinstance(whole, str):
        return whole
    parallel = whole.parallel
    reduced = {d for m in members for d in g.by_name[m].rdims}
    for m in members:
        lost = {d for d in out_dims(g.by_name[m]) if d not in parallel and d not in reduced}
        if g.points(lost) > LOST_LIMIT or not all(is_static(g.program.sizes[d]) for d in lost):
            return f"the parallel dim {', '.join(sorted(lost))} of {m} would be lost"
    least = min(workers, max(g.points(out_dims(g.by_name[m])) for m in members))
    if g.points(parallel) < least and not splittable(g, members, parallel):
        return f"only {g.points(parallel)} independent blocks would be left"
    return Group(members, parallel)


def one_kernel(g: Graph, members: tuple[str, ...], *, in_registers: bool = False) -> Group | str:
    """The group of members whose values do not cross from block to block, or the one that does; whatever it costs.
    in_registers: see `Bounds`."""
    parallel = parallel_dims(g, members)
    if isinstance(parallel, str):
        return parallel
    crossing = _crossing(g, members, parallel) or (_moved(g, members) if in_registers else None)
    return Group(members, parallel) if crossing is None else crossing


def _crossing(g: Graph, members: tuple[str, ...], parallel: tuple[str, ...]) -> str | None:
    """The reason, if a value crosses an internal edge from one block of the parallel dims to another."""
    for name in members:
        c = g.by_name[name]
        for r in g.producers[name]:
            if r not in members:
                continue
            producer = g.by_name[r]
            crossing = [d for d in producer.dims if d in parallel and d not in plain_axes(c, producer)]
            if crossing:
                return f"{name} reads {r} across blocks of {', '.join(crossing)}"
    return None


def _moved(g: Graph, members: tuple[str, ...]) -> str | None:
    """The reason, if a value is read at another position than it is computed for (x[i + 1], the halves of a rotation).
    Maps of tensors in memory are computed again there, unless they are results or operands of a reduction."""
    kept: set[str] = set()
    for name in members:
        c = g.by_name[name]
        for r in (r for r in g.producers[name] if r in kept or (c.reducer and r in members)):
            producer = g.by_name[r]
            if any(g.extent(d) > 1 for d in set(producer.dims) - plain_axes(c, producer)):
                return f"{name} reads {r} at a computed position"
        if c.reducer is not None or kept & set(g.producers[name]) or g.escapes(name, members):
            kept.add(name)
    return None


def parallel_dims(g: Graph, members: tuple[str, ...]) -> tuple[str, ...] | str:
    """Dims that the kernel of `members` can be parallel over, or why there is no such kernel."""
    computes = [g.by_name[m] for m in members]
    outs = {c.name: set(out_dims(c)) for c in computes}
    reduced = {d for c in computes for d in c.rdims}
    order = list(dict.fromkeys(d for c in reversed(computes) for d in out_dims(c)))
    chosen: list[str] = []
    for d in order:
        lacking = [m for m in members if d not in outs[m]]
        if not lacking or (d not in reduced and _cheap_to_repeat(g, members, lacking, d)):
            chosen.append(d)
    for c in computes:
        if c.reducer is None and not g.escapes(c.name, members):
            continue  # maps are recomputed block by block
        kept = [d for d in out_dims(c) if d not in chosen and d not in reduced]
        size = g.points(kept)
        # a result that is only written out streams; one that accumulates has to fit
        if c.reducer is not None and (size > LOCAL_LIMIT or not all(is_static(g.program.sizes[d]) for d in kept)):
            return f"a block would have to keep {c.name} over all of {', '.join(kept)}"
    return tuple(chosen)


def splittable(g: Graph, members: tuple[str, ...], parallel: tuple[str, ...]) -> bool:
    """Whether a kernel with few blocks may be cut along a long reduced axis instead.

    Few and known parallel blocks, and no result that streams along what is reduced.
    """
    if g.points(parallel) >= FEW_BLOCKS or not all(is_static(g.program.sizes[d]) for d in parallel):
        return False
    last = [m for m in members if g.by_name[m].rdims and g.points(g.by_name[m].rdims) >= LONG_AXIS]
    axes = {d for m in last for d in g.by_name[m].rdims}
    return bool(last) and not any(g.escapes(m, members) and axes & set(out_dims(g.by_name[m])) for m in members)


def _cheap_to_repeat(g: Graph, members: Iterable[str], lacking: list[str], d: str) -> bool:
    """Whether the members without dim d may run again in every block of d."""
    if any(g.escapes(m, members) for m in lacking):
        return False
    having = [m for m in members if m not in lacking]
    blocks = max(1, g.extent(d) // REPEAT_BLOCK)
    return sum(map(g.flops, lacking)) * blocks <= REPEAT_SHARE * sum(map(g.flops, having))


def _path_outside(g: Graph, a: Group, b: Group, of: dict[str, Group]) -> bool:
    """Whether a path from a to b (or back) runs through a third group."""
    inside = {a.members, b.members}
    for start, goal in ((a, b), (b, a)):
        todo = [u for m in start.members for u in g.consumers[m] if of[u].members not in inside]
        seen = set(todo)
        while todo:
            for u in (w for m in of[todo.pop()].members for w in g.consumers[m]):
                if of[u].members == goal.members:
                    return True
                if u not in seen and of[u].members not in inside:
                    seen.add(u)
                    todo.append(u)
    return False


def _merge_siblings(g: Graph, of: dict[str, Group], bounds: Bounds) -> bool:
    """Join groups that read the same, so that it is read once: reductions over the same dims; on a GPU, where a kernel
    waits for memory, also maps of the same elements."""
    groups = list(dict.fromkeys(of.values()))
    read = [_reads(g, x, maps=bounds.in_registers) for x in groups]
    for i, a in enumerate(groups):
        for j, b in enumerate(groups[i + 1 :], i + 1):
            if set(a.parallel) != set(b.parallel) or not read[i] & read[j]:
                continue
            if _path_outside(g, a, b, of) or _path_outside(g, b, a, of):
                continue
            merged = merge(g, a, b, of, bounds)
            if not isinstance(merged, str):
                of.update(dict.fromkeys(merged.members, merged))
                return True
    return False


def _reads(g: Graph, group: Group, *, maps: bool) -> set[tuple[str, tuple[str, ...]] | Load]:
    """Tensors that the group reduces, and over what; of one that only maps, which elements it reads for each of its
    own."""
    computes = [g.by_name[m] for m in group.members]
    found: set[tuple[str, tuple[str, ...]] | Load] = set()
    for c in computes:
        if c.reducer is not None:
            found |= {(t, c.rdims) for t in _external_tensors(g, c.name)}
    if not maps or found or any(c.reducer is not None for c in computes):
        return found
    mine = {r for c in computes for r in c.results}
    found.update(
        ld
        for c in computes
        for ld in loads(c.body)
        if ld.tensor not in mine and dims_used(ld).issuperset(group.parallel)
    )
    return found


def _external_tensors(g: Graph, name: str) -> set[str]:
    """Program inputs that a Compute reads, also through the maps it uses."""
    inputs = {i.name for i in g.program.inputs}
    c = g.by_name[name]
    found = set(tensors_read(c.body)) & inputs
    for r in g.producers[name]:
        if g.by_name[r].reducer is None:
            found |= _external_tensors(g, r)
    return found


def _ordered(g: Graph, groups: list[Group], of: dict[str, Group]) -> tuple[Group, ...]:
    """Groups in an order in which producers come first."""
    done: list[Group] = []

    def visit(x: Group) -> None:
        if x in done:
            return
        for m in x.members:
            for r in g.producers[m]:
                if of[r] is not x:
                    visit(of[r])
        done.append(x)

    for x in groups:
        visit(x)
    return tuple(done)
