"""A named block program: what schedules transform, and what the laws of this package are about.

It holds the definitions (a tensor program: every value has a name) and their arrangement into
nests. A nest is one kernel: `forall` loops over its parallel dims around passes, each a Fold of one or
more reductions over common axes, in a serial loop or in one block. `block` gives the block program
that it stands for, which is what a law has to leave unchanged.

    unfused      one nest for each definition, nothing streamed
    check        the rules that make a nest mean what its definitions say; every law ends with it
    kernels      the nests as block programs, built by the code that the automatic road uses
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const
from tilefold.block.build import Loops
from tilefold.block.fuse import UNIT, FusedKernel, build_kernels, with_unit
from tilefold.block.group import Group
from tilefold.block.ir import Block
from tilefold.block.join import join
from tilefold.block.peel import peel_loop
from tilefold.block.stages import StagePlan, inner_producers, plan_stages
from tilefold.errors import NotFusibleError, ScheduleError
from tilefold.tensor.analysis import Graph, out_dims, plain_axes
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.reduction_laws import align_reductions
from tilefold.tensor.rewrite import drop_dead


@dataclass(frozen=True, slots=True)
class Pass:
    """Reductions over common axes that are computed together; `loop`: the axis streamed, None for one block."""

    reductions: tuple[str, ...]
    loop: str | None = None


@dataclass(frozen=True, slots=True)
class Nest:
    """One kernel. `rows`: (member, dim of the loop that writes it); `segments`: blocks the pass is split into;
    `peeled`: loops whose masked and unmasked blocks are apart.
    """

    members: tuple[str, ...]
    parallel: tuple[str, ...]
    passes: tuple[Pass, ...] = ()
    rows: tuple[tuple[str, str], ...] = ()
    segments: int | None = None
    peeled: tuple[str, ...] = ()

    def pass_of(self, name: str) -> Pass | None:
        """The pass that computes a reduction; None for maps and for what is computed tile by tile."""
        return next((p for p in self.passes if name in p.reductions), None)


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """Definitions and their nests, in an order in which producers come first."""

    graph: Graph
    nests: tuple[Nest, ...]

    @property
    def program(self) -> Program:
        return self.graph.program

    def definition(self, name: str) -> Compute:
        """The definition of a name; ScheduleError where there is none."""
        found = self.graph.by_name.get(name)
        if found is None:
            names = ", ".join(self.graph.by_name)
            raise ScheduleError(f"nothing is called {name}", hint=f"there is {names}")
        return found

    def nest_of(self, name: str) -> Nest:
        """The nest that computes a name."""
        self.definition(name)
        return next(n for n in self.nests if name in n.members)


def unfused(p: Program) -> NamedBlock:
    """One kernel for each definition, parallel over all dims of its result, with its reduction in one block.

    Definitions that no output needs are dropped, and reductions aligned (`tensor.reduction_laws`) as on the
    automatic road.
    """
    p = drop_dead(p)
    p = align_reductions(replace(p, sizes={**p.sizes, UNIT: Const(1, DType.I64)}))
    return NamedBlock(Graph.of(p), tuple(alone(c) for c in p.body))


def alone(c: Compute) -> Nest:
    """The nest of a definition by itself."""
    return Nest((c.name,), out_dims(c), () if c.reducer is None else (Pass((c.name,)),))


def changed(b: NamedBlock, old: tuple[Nest, ...], new: Nest) -> NamedBlock:
    """`b` with `new` in the place of `old`, checked, and its nests in order again."""
    recheck(b, new)
    nests = [n for n in b.nests if n not in old]
    at = min(b.nests.index(n) for n in old)
    return NamedBlock(b.graph, ordered(b.graph, (*nests[:at], new, *nests[at:]), new))


def recheck(b: NamedBlock, n: Nest) -> None:
    """ScheduleError where a nest does not mean what its definitions say, or cannot be peeled as it asks."""
    if n.peeled:
        nest_kernels(b, n)
    else:
        plan_of(b, n)


def ordered(g: Graph, nests: tuple[Nest, ...], new: Nest | None = None) -> tuple[Nest, ...]:
    """Producers first. ScheduleError where something outside of `new` both needs it and is needed by it."""
    owner = {m: n for n in nests for m in n.members}
    if new is not None:
        _check_convex(g, owner, new)
    done: dict[Nest, None] = {}

    def visit(n: Nest) -> None:
        if n not in done:
            for r in _reads_outside(g, n):
                visit(owner[r])
            done[n] = None

    for n in nests:
        visit(n)
    return tuple(done)


def _reads_outside(g: Graph, n: Nest) -> Iterator[str]:
    return (r for m in n.members for r in g.producers[m] if r not in n.members)


def _check_convex(g: Graph, owner: dict[str, Nest], new: Nest) -> None:
    """No path leaves the nest and returns to it."""
    came_from: dict[Nest, tuple[str, str]] = {}
    todo = [(m, u) for m in new.members for u in g.consumers[m] if u not in new.members]
    while todo:
        made, user = todo.pop()
        n = owner[user]
        if n is new:
            raise ScheduleError(
                f"{user} reads {made}, which another kernel computes from this one's results",
                dependency=f"{made} -> {user}",
                loc=g.by_name[user].loc,
                hint=f"fuse {made} too, or recompute what it reads",
            )
        if n not in came_from:
            came_from[n] = (made, user)
            todo += [(m, u) for m in n.members for u in g.consumers[m] if u not in n.members]


# -- legality -------------------------------------------------------------------------------


def plan_of(b: NamedBlock, n: Nest) -> StagePlan:
    """The nest's passes with their Folds. ScheduleError names the dependency that the nest would break."""
    g, group = b.graph, with_unit(Group(n.members, n.parallel))
    _check_edges(g, n)
    _check_repeats(g, n)
    try:
        plan = plan_stages(g, group, tuple(p.reductions for p in n.passes))
    except NotFusibleError as why:
        raise ScheduleError(why.message, dependency=_cause(g, n, why.reduction), loc=why.loc, hint=why.hint) from why
    if n.segments is not None:
        _check_split(g, n)
    return plan


def _check_edges(g: Graph, n: Nest) -> None:
    """A value is used in the block of the parallel dims that computes it."""
    for m in n.members:
        c = g.by_name[m]
        for r in g.producers[m]:
            if r not in n.members:
                continue
            producer = g.by_name[r]
            across = [d for d in producer.dims if d in n.parallel and d not in plain_axes(c, producer)]
            if across:
                raise ScheduleError(
                    f"{m} reads {r} across blocks of {', '.join(across)}, which are computed in parallel",
                    dependency=f"{r} -> {m}",
                    loc=c.loc,
                )


def _check_repeats(g: Graph, n: Nest) -> None:
    """What lacks a parallel dim runs again in every block of it, and must not be written there."""
    for m in n.members:
        c = g.by_name[m]
        for d in n.parallel:
            if d in c.rdims:
                raise ScheduleError(
                    f"{m} reduces over {d}: no single block of a parallel loop over it has all of {m}",
                    dependency=f"{d} -> {m}",
                    loc=c.loc,
                )
            if d not in c.dims and g.escapes(m, n.members):
                raise ScheduleError(
                    f"{m} has no {d}: every block of {d} would write it",
                    dependency=f"{m} -> {next((u for u in g.consumers[m] if u not in n.members), 'the caller')}",
                    loc=c.loc,
                )


def _check_split(g: Graph, n: Nest) -> None:
    """A split kernel has one pass, and writes nothing along the axis that is cut."""
    if len(n.passes) != 1 or n.passes[0].loop is None:
        later = n.passes[1].reductions[0] if len(n.passes) > 1 else n.members[-1]
        raise ScheduleError(
            f"only a kernel with a single pass can be split; {later} has a pass of its own",
            dependency=f"{n.passes[0].reductions[0]} -> {later}" if len(n.passes) > 1 else None,
            hint=f"rolling_update({later!r}, ...) first",
        )
    axes = set(g.by_name[n.passes[0].reductions[0]].rdims)
    for m in n.members:
        if g.escapes(m, n.members) and axes & set(out_dims(g.by_name[m])):
            reader = next((u for u in g.consumers[m] if u not in n.members), "the caller")
            raise ScheduleError(
                f"{m} is written along the axis that is split",
                dependency=f"{m} -> {reader}",
                loc=g.by_name[m].loc,
                hint=f"fuse {reader} into this kernel" if reader in g.by_name else None,
            )


def _cause(g: Graph, n: Nest, reduction: str | None) -> str | None:
    """The dependency on another reduction of the nest that a refused reduction has."""
    if reduction is None or reduction not in g.by_name:
        return None
    found = feeding(g, reduction, frozenset(m for m in n.members if g.by_name[m].reducer is not None))
    return f"{found[-1]} -> {reduction}" if found else None


def feeding(g: Graph, name: str, wanted: frozenset[str]) -> tuple[str, ...]:
    """Those of `wanted` that `name` depends on, directly or through others; in program order."""
    todo, seen = list(g.producers[name]), set(g.producers[name])
    while todo:
        fresh = [r for r in g.producers[todo.pop()] if r not in seen]
        seen.update(fresh)
        todo += fresh
    return tuple(c.name for c in g.program.body if c.name in seen & wanted)


# -- the block program ----------------------------------------------------------------------


def kernels(b: NamedBlock) -> tuple[tuple[FusedKernel, ...], ...]:
    """For each nest its kernels: one, or the two of a split fold."""
    return tuple(nest_kernels(b, n) for n in b.nests)


def nest_kernels(b: NamedBlock, n: Nest) -> tuple[FusedKernel, ...]:
    """The kernels of one nest."""
    rows = dict(n.rows)
    loops = Loops(tuple(p.loop for p in n.passes), {m: rows.get(m) for m in n.members})
    first, *rest = build_kernels(b.graph, plan_of(b, n), loops, n.segments)
    for dim in n.peeled:
        first = replace(first, block=peel_loop(first.block, dim))
    return first, *rest


def block(b: NamedBlock) -> Block:
    """The whole program as one block program, kernel after kernel."""
    p = b.program
    return join(p.name, p.inputs, p.outputs, tuple(k.block for ks in kernels(b) for k in ks))


def merge_members(g: Graph, nests: tuple[Nest, ...], parallel: tuple[str, ...]) -> Nest:
    """All members of some nests in one, their passes one after the other; what is reduced again
    along a local dim is computed tile by tile and has no pass.
    """
    inside = {m for n in nests for m in n.members}
    members = tuple(c.name for c in g.program.body if c.name in inside)
    inner = inner_producers(g, Group(members, parallel))
    position = {m: k for k, m in enumerate(members)}
    kept = (replace(p, reductions=tuple(r for r in p.reductions if r not in inner)) for n in nests for p in n.passes)
    passes = sorted((p for p in kept if p.reductions), key=lambda p: position[p.reductions[0]])
    rows = tuple(r for n in nests for r in n.rows if r[1] not in parallel)
    return Nest(members, parallel, tuple(passes), rows)
