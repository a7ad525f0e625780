"""The greedy grouping: where a program is too large to be planned, for comparison, and of what a GPU runs.

It grows groups along edges, nearest producer first, under the same test as the exact selection (`block.legal`); every
refusal is recorded with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilefold.algebra.expr import Load, dims_used, loads, tensors_read
from tilefold.block.fuse import Fused, fuse_group, prepare
from tilefold.block.legal import ANY, Group, Grouping, Limits, Refusal, legal
from tilefold.tensor.analysis import Graph, out_dims
from tilefold.tensor.ir import Program


def fuse(
    p: Program,
    apart: frozenset[str] = frozenset(),
    limits: Limits = ANY,
    *,
    calls: Iterable[tuple[str, ...]] = (),
) -> Fused:
    """Fuse `p`. Members of `apart` become kernels of their own that the caller may replace, those of a
    call together."""
    p = prepare(p, apart)
    g = Graph.of(p)
    grouping = group(p, apart, limits, calls=calls)
    kernels = tuple(k for x in grouping.groups for k in fuse_group(g, x))
    return Fused(p, kernels, grouping)


def group(
    p: Program,
    apart: frozenset[str] = frozenset(),
    limits: Limits = ANY,
    *,
    calls: Iterable[tuple[str, ...]] = (),
) -> Grouping:
    """Partition the program. Computes in `apart` (library calls) stay alone, those of one of `calls` together."""
    g = Graph.of(p)
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
                merged = merge(g, a, b, of, apart, limits)
                if isinstance(merged, str):
                    refusals[(r, c.name)] = Refusal(r, c.name, merged, c.loc)
                    continue
                of.update(dict.fromkeys(merged.members, merged))
                changed = True
        changed = _merge_siblings(g, of, apart, limits) or changed
    unique = dict.fromkeys(of[c.name] for c in p.body)
    return Grouping(ordered(g, list(unique), of), tuple(refusals.values()))


def merge(g: Graph, a: Group, b: Group, of: dict[str, Group], apart: frozenset[str], limits: Limits) -> Group | str:
    """The union of two groups, or the reason why it is not one kernel."""
    members = tuple(c.name for c in g.program.body if c.name in a.members or c.name in b.members)
    if apart & set(members):
        return "a library call computes it"
    if _path_outside(g, a, b, of):
        return "another kernel stands between them"
    return legal(g, members, limits, (a, b))


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


def _merge_siblings(g: Graph, of: dict[str, Group], apart: frozenset[str], limits: Limits) -> bool:
    """Join groups that read the same, so that it is read once: reductions over the same dims; on a GPU, where a kernel
    waits for memory, also maps of the same elements."""
    groups = list(dict.fromkeys(of.values()))
    read = [_reads(g, x, maps=limits.in_registers) for x in groups]
    for i, a in enumerate(groups):
        for j, b in enumerate(groups[i + 1 :], i + 1):
            if set(a.parallel) != set(b.parallel) or not read[i] & read[j]:
                continue
            if _path_outside(g, a, b, of) or _path_outside(g, b, a, of):
                continue
            merged = merge(g, a, b, of, apart, limits)
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


def ordered(g: Graph, groups: list[Group], of: dict[str, Group]) -> tuple[Group, ...]:
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
