"""Maps of a GPU's groups that are computed again where they are read, rather than stored: where that moves fewer bytes.

    stored    the map, written once and read by each other kernel
    again     what it is made of, as far as a reader does not have it anyway, and its arithmetic in each reader

A norm's backward is two kernels, rows and columns, both of which read x: x normalised is twice x's bytes, in float32.
The reciprocal root of a variance that two kernels read is a kernel of its own, or none. Operands of matrix products
stay in memory, for copies bring those to the matrix unit, and so does what is read at other elements than it has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from tilefold.algebra.expr import Call, Const, Expr, Index, Load, call, children, dims_used, loads, tensors_read
from tilefold.block.group import Group, Limits
from tilefold.block.legal import one_kernel
from tilefold.block.stages import inline_maps
from tilefold.plan.cut import components
from tilefold.plan.dataflow import GPU_UNITS, MOVE, root_of
from tilefold.plan.hardware import Gpu
from tilefold.plan.parts import of_elements, of_parts, repeated
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import matrices
from tilefold.tensor.rewrite import drop_dead

#: Maps of a program that are looked at, the last first.
MOST_LOOKED_AT = 256
#: Members of a kernel of maps all of which are tried together.
MOST_TOGETHER = 16
#: Choices under which a kernel reads a map at most: computed for each, it takes longer than what is read.
MOST_WAYS = 64
#: Elements that a kernel reads for each of its own, beyond which none are read because a map is computed again: of ten
#: levels of a fast transform, each of which reads two elements for each of its own, a kernel of seven is 1.4 million
#: characters.
MOST_ELEMENTS = 64


def computed_again(
    p: Program,
    groups: Sequence[Group],
    machine: Gpu,
    limits: Limits,
    calls: Collection[tuple[str, ...]] = (),
    windows: Collection[str] = (),
) -> tuple[Program, list[Group]]:
    """The program, and its groups, with maps put in where they are read, wherever that is less to move. limits: what a
    group that reads something else now has to keep to; calls: of a library; windows: maps that are no part of a sum's
    kernel (`gpu_taps`), which stay as they are."""
    made, fixed = list(groups), {*p.outputs, *windows}
    g, stored = Graph.of(p), [c.name for c in reversed(p.body) if c.reducer is None and c.name not in fixed]
    of = {m: x for x in made for m in x.members}
    tried = 0
    for name in stored:
        if name not in of or not g.escapes(name, of[name].members) or tried == MOST_LOOKED_AT:
            continue
        tried += 1
        own = of[name]
        found = _again(g, made, of, (name,), machine, limits, calls)
        if found is None and own.members[-1] == name and len(own.members) <= MOST_TOGETHER:
            every = tuple(m for m in own.members if g.escapes(m, own.members))
            if len(every) > 1 and not fixed & {*every} and all(g.by_name[m].reducer is None for m in own.members):
                found = _again(g, made, of, every, machine, limits, calls)
        if found is not None:
            p, made = found
            g, of = Graph.of(p), {m: x for x in made for m in x.members}
    return p, made


def _again(
    g: Graph,
    groups: list[Group],
    of: Mapping[str, Group],
    names: Sequence[str],
    machine: Gpu,
    limits: Limits,
    calls: Collection[tuple[str, ...]],
) -> tuple[Program, list[Group]] | None:
    """With these maps of a kernel put in where others read them; several are all that it writes."""
    own = of[names[0]]
    readers = list(dict.fromkeys(u for name in names for u in g.consumers[name] if of[u] is not own))
    others = list(dict.fromkeys(of[u] for u in readers))
    if own.members in calls or any(x.members in calls or _multiplies(g, x) for x in others):
        return None
    if not all(_plainly_read(g, name, u) for u in readers for name in names):
        return None
    within = {m for m in own.members if g.by_name[m].reducer is None and not g.escapes(m, own.members)} | {*names}
    saved = _saved(g, names, within, others, own, machine)
    if saved <= 0:
        return None
    changed = {u: replace(g.by_name[u], body=inline_maps(g, g.by_name[u].body, within.__contains__)) for u in readers}
    for x in others:
        before, after = (_elements(g, x, bodies) for bodies in ({}, changed))
        if after > max(before, MOST_ELEMENTS):
            return None
    found = _settled(g.program, groups, changed, {own, *others}, limits)
    more = 0 if found is None else len(found[1]) - len(groups)  # kernels that nothing holds together any more
    return found if saved > more * machine.second_kernel * machine.bandwidth else None


def _elements(g: Graph, x: Group, changed: Mapping[str, Compute]) -> int:
    """Elements that a kernel reads for each of its own, of all tensors in memory."""
    found = {ld for m in x.members for ld in loads(changed.get(m, g.by_name[m]).body)}
    made = {r for m in x.members for r in g.by_name[m].results}
    return sum(ld.tensor not in made for ld in found)


def _plainly_read(g: Graph, name: str, reader: str) -> bool:
    """Whether a reader has each element of the map that it reads for one of its own: at its dims, or fixed steps along
    them (every second head), each at one place."""
    found = [ld.index for ld in loads(g.by_name[reader].body) if ld.tensor == name]
    return all(
        all(map(_stepped, index)) and sum(len(dims_used(ix)) for ix in index) == len(_at(index)) for index in found
    )


def _stepped(ix: Expr) -> bool:
    """Whether an index is a dim, a number, or a number of steps along a dim and a number."""
    match ix:
        case Index() | Const():
            return True
        case Call("add" | "sub" | "mul", (a, Const())):
            return _stepped(a)
    return False


def _at(index: Sequence[Expr]) -> frozenset[str]:
    return frozenset[str]().union(*map(dims_used, index))


def _multiplies(g: Graph, x: Group) -> bool:
    """Whether a kernel is of products of matrices, whose operands are copied from memory."""
    found = (matrices(g.by_name[m], g.extent) for m in x.members)
    return any(f is not None and f.left != f.right for f in found)


def _saved(
    g: Graph, names: Sequence[str], within: Collection[str], others: Sequence[Group], own: Group, machine: Gpu
) -> float:
    """Bytes that are not moved if maps are computed again; kernels that go count as bytes, arithmetic too."""
    saved, mine = 0.0, {r: m for m in own.members for r in g.by_name[m].results}
    needed, had = dict[str, dict[Load, None]](), dict[tuple[Group, str], frozenset[Load]]()
    for name in names:
        c, body = g.by_name[name], inline_maps(g, g.by_name[name].body, within.__contains__)
        read_by = [x for x in others if any(name in g.producers[m] for m in x.members)]
        saved += g.nbytes([name]) * (1 + len(read_by))
        ways = {x: _ways(g, name, x) for x in read_by}
        parts = of_parts(body)
        if parts is None or any(len(found) > MOST_WAYS for of in ways.values() for found in of):
            return -math.inf
        evaluations = {x: _evaluations(g, name, x, machine) for x in read_by}
        every = dict[str, list[Load]]()
        for ld in loads(body):
            every.setdefault(ld.tensor, []).append(ld)
        for t, found in every.items():
            if t not in needed and mine.get(t) is not None and not g.escapes(mine[t], own.members):
                saved -= g.nbytes([t])  # a state that is written now
            needed.setdefault(t, {})
            for x in read_by:
                has = had.get((x, t)) or frozenset(
                    read for m in x.members for read in loads(g.by_name[m].body) if read.tensor == t
                )
                chosen = any(map(any, ways[x]))  # under each choice by itself, in every thread block
                apart = [ld for ld in found if chosen and ld not in has]
                times = evaluations[x] / max(1, g.points(c.dims))
                saved -= of_elements(g, apart) * times
                saved -= max(0.0, of_elements(g, {*found, *has} - {*apart}) - of_elements(g, has))
                had[x, t] = has | {*found}
        repeats = repeated(g, parts, machine)
        saved -= sum(repeats * max(1, *map(len, ways[x])) for x in read_by)
        each, kept = _units(body, c.dims, g, parts), any(u in own.members for u in g.consumers[name])
        work = sum(evaluations[x] * max(_places(g, name, x), *map(len, ways[x])) for x in read_by) * each
        saved -= (work if kept else work - g.points(c.dims) * each) / machine.vector * machine.bandwidth
    if all(m in within for m in own.members):
        saved += machine.second_kernel * machine.bandwidth
    return saved


def _units(body: Expr, dims: Sequence[str], g: Graph, parts: Sequence[tuple[Expr, int]] = ()) -> float:
    """Arithmetic of an element of a map, each expression in it once, and a move. What fewer of its dims choose is
    computed once for several elements, but for each of several parts."""
    every = {d for d in dims if g.extent(d) > 1}
    found = {n: 1.0 for n in _arithmetic(body) if isinstance(n, Call) and dims_used(n) >= every}
    for n, times in parts:
        if isinstance(n, Call) and n not in found and times > 1:
            found[n] = times * g.points(dims_used(n)) / max(1, g.points(dims))
    return MOVE + sum(times * GPU_UNITS.get(root_of(n) or n.op, 1.0) for n, times in found.items())


def _arithmetic(e: Expr) -> Iterator[Expr]:
    """e and what is computed for it, but for where its loads read; what several read is one object, and here once: of
    a recurrence that is unrolled, each state stands in the next one several times."""
    todo, seen = [e], set[int]()
    while todo:
        n = todo.pop()
        if id(n) not in seen:
            seen.add(id(n))
            yield n
            todo += () if isinstance(n, Load) else children(n)


def _places(g: Graph, name: str, x: Group) -> int:
    """At how many places a kernel has elements of a map: two sums, of its rows and of its columns, at two."""
    return len({ld.index for m in x.members for ld in loads(g.by_name[m].body) if ld.tensor == name})


def _ways(g: Graph, name: str, x: Group) -> list[set[tuple[Expr, ...]]]:
    """The choices under which each member of a kernel reads a map: one more than `MOST_WAYS` where there are more."""
    return [set(islice(guards(g.by_name[m].body, name), MOST_WAYS + 1)) for m in x.members]


def _evaluations(g: Graph, name: str, x: Group, machine: Gpu) -> float:
    """How often a kernel computes a map at a place where it reads it, the one of most elements."""
    places = {_at(ld.index) for m in x.members for ld in loads(g.by_name[m].body) if ld.tensor == name}
    return max(_evaluated(g, dims, x, machine) for dims in places)


def _evaluated(g: Graph, dims: frozenset[str], x: Group, machine: Gpu) -> float:
    """How often a kernel computes what it reads at these dims: in each thread block, of which those that reduce along
    it have neighbouring columns, where what they reduce has these side by side."""
    others = set(x.parallel) - dims
    along = [g.by_name[m].body for m in x.members if dims & set(g.by_name[m].rdims)]
    columns = any(others & set(dims_used(ld.index[-1])) for e in along for ld in loads(e) if ld.index)
    apart = g.points(others)
    return g.points(dims) * (max(1.0, apart / machine.columns) if columns else apart)


def guards(e: Expr, name: str) -> Iterator[tuple[Expr, ...]]:
    """The choices under which a map is read, each once: what it is made of is loaded and computed for each by itself.
    Of states of a recurrence that are chosen from the one before (a maximum's exponent), there are twice as many each
    step: who asks takes as many as it has use for."""
    todo: list[tuple[Expr, tuple[Expr, ...]]] = [(e, ())]
    seen, found = set[tuple[int, tuple[Expr, ...]]](), set[tuple[Expr, ...]]()
    while todo:
        n, under = todo.pop()
        if name not in tensors_read(n) or (id(n), under) in seen:
            continue
        seen.add((id(n), under))
        match n:
            case Load(tensor) if tensor == name:
                if under not in found:
                    found.add(under)
                    yield under
            case Call("where", (asked, kept, other)):
                todo += [(asked, under), (kept, (*under, asked)), (other, (*under, call("not", asked)))]
            case _:
                todo += [(k, under) for k in children(n)]


def _settled(
    p: Program, groups: list[Group], changed: Mapping[str, Compute], touched: set[Group], limits: Limits
) -> tuple[Program, list[Group]] | None:
    """The program with changed readers, without what nobody needs any more; None where a group is no kernel then."""
    after = replace(p, body=tuple(changed.get(c.name, c) for c in p.body))
    after = replace(drop_dead(after), sizes=p.sizes)  # groups are parallel over dims that no statement has
    g = Graph.of(after)
    made: list[Group] = []
    for x in groups:
        left = tuple(m for m in x.members if m in g.by_name)
        if not left or (x not in touched and left == x.members):
            made += [x] if left else []
            continue
        found = [one_kernel(g, left, limits)]
        if isinstance(found[0], str):  # a map that is computed again held sums along its two axes together
            found = [one_kernel(g, part, limits) for part in components(g, left)]
        if not all(isinstance(part, Group) for part in found):
            return None
        made += [part for part in found if isinstance(part, Group)]
    return after, made
