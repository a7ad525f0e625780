"""Build the fused block program of a group from its stages.

A stage becomes one serial loop over an axis. In it, in order: the tile-wise values that the
reductions read, then for each state variable of the Fold its repair and its accumulation
(fold fusion: RedFuser eq. 16, Neptune's rolling update). After the loop the cascade's results
are finished. Where the axis fits one block, there is no loop and nothing to repair.
Results that keep a streamed dim are written by the first loop over it in which they are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Expr, Index, Load, loads, transform, type_of
from tilefold.algebra.fold import NEW, OLD, Fold, StateVar
from tilefold.algebra.ops import INDEX_REDUCERS
from tilefold.block.ir import Accumulate, Init, Let, Loop, Node, Store, Update
from tilefold.block.kept import kept_of
from tilefold.block.stages import Stage, StagePlan, inline_reads, value_name
from tilefold.names import fresh
from tilefold.tensor.analysis import Graph, is_static, out_dims
from tilefold.tensor.as_stored import as_stored, rounded
from tilefold.tensor.ir import Compute

#: An axis of at most this static extent is reduced in one block.
ONE_BLOCK = 256
#: Longest row, in elements, that a block keeps because it is written again.
ROW_IN_CACHE = 1 << 15


@dataclass(frozen=True, slots=True)
class Loops:
    """The serial loops of a kernel. `stages[k]`: the axis stage k streams over, None for one block;
    `rows[m]`: the dim over which member m is written where no stage's loop writes it, None for one block.
    whole: parallel dims of which a block that reads has all indices.
    """

    stages: tuple[str | None, ...]
    rows: Mapping[str, str | None]
    whole: frozenset[str] = frozenset()


def build_nest(g: Graph, plan: StagePlan, loops: Loops) -> tuple[Node, ...]:
    """The kernel of a group: its stages inside `forall` loops over the parallel dims."""
    return in_parallel(Builder(g, plan, loops).build(), apart(plan, loops) or plan.group.parallel)


def apart(plan: StagePlan, loops: Loops) -> tuple[str, ...]:
    """Parallel dims whose indices have blocks of their own."""
    return tuple(d for d in plan.group.parallel if d not in loops.whole)


def choose_loops(g: Graph, plan: StagePlan) -> Loops:
    """The loops of the automatic road: long axes are streamed, except rows that are written again."""
    kept = [k for k in range(len(plan.stages)) if rewritten_rows(g, plan, k)]
    stages = tuple(None if k in kept else loop_dim(g, s) for k, s in enumerate(plan.stages))
    whole = {d for k in kept for d in plan.stages[k].axes}
    rows = {m: row_dim(g, plan, m, whole) for m in plan.group.members if g.escapes(m, plan.group.members)}
    return Loops(stages, rows)


def row_dim(g: Graph, plan: StagePlan, name: str, whole: set[str]) -> str | None:
    """The dim to stream over when a member is written: its longest local one, None where they fit one block."""
    sizes = g.program.sizes
    local = [d for d in out_dims(g.by_name[name]) if d not in plan.group.parallel]
    if not local or whole & set(local) or (all(is_static(sizes[d]) for d in local) and g.points(local) <= ONE_BLOCK):
        return None
    return max(local, key=g.extent)


def in_parallel(body: tuple[Node, ...], dims: tuple[str, ...]) -> tuple[Node, ...]:
    """`body` inside `forall` loops, outermost dim first."""
    for d in reversed(dims):
        body = (Loop("forall", d, body),)
    return body


def loop_dim(g: Graph, stage: Stage) -> str | None:
    """The axis a stage streams over: the longest; None where all of them are one block."""
    dim = max(stage.axes, key=g.extent)
    fits = is_static(g.program.sizes[dim]) and g.points(stage.axes) <= ONE_BLOCK
    return None if fits else dim


def rewritten_rows(g: Graph, plan: StagePlan, k: int) -> bool:
    """Whether stage k's rows are written again with its results, and a row fits in cache.

    Then a block keeps the row (a softmax computes each exponential once), and nothing is streamed.
    """
    axes = plan.stages[k].axes
    if plan.inner or (all(is_static(g.program.sizes[d]) for d in axes) and g.points(axes) > ROW_IN_CACHE):
        return False
    again = [
        m
        for m in plan.group.members
        if g.by_name[m].reducer is None and plan.ready[m] >= k and g.escapes(m, plan.group.members)
    ]
    return any(set(axes) & set(out_dims(g.by_name[m])) for m in again)


class Builder:
    """Emits into `outer` (once a block of the parallel dims) and, inside a stage, into its loop.

    `names` maps each result of a reduction to the block value that holds it, once that is defined;
    a scope's `values` do so for members that are computed where they are used. The same member may be
    computed both in a loop and, for a value that does not vary there, before it: two values, two names.
    """

    def __init__(self, g: Graph, plan: StagePlan, loops: Loops):
        self.g, self.plan, self.loops = g, plan, loops
        self.members = plan.group.members
        self.parallel = plan.group.parallel
        self.outer = Scope(None)
        self.names: dict[str, str] = {}
        self.given: set[str] = set()
        self.owner = {r: m for m in self.members for r in g.by_name[m].results}
        self.to_write = [m for m in self.members if g.escapes(m, self.members)]
        self.written = frozenset(r for m in self.to_write for r in g.by_name[m].results)
        self.panels = self._panels()
        self.taken = set(g.program.names)
        self.states: dict[tuple[str, ...], str] = {}

    def build(self) -> tuple[Node, ...]:
        for k, stage in enumerate(self.plan.stages):
            self.stage(k, stage)
            for m in [m for m in stage.reductions if m in self.to_write]:
                self.store(m, self.outer)
        self.write_rest()
        return tuple(self.outer.nodes)

    def _panels(self) -> frozenset[str]:
        """Inner reductions that several loops need: computed once, kept over their whole extent."""
        uses: dict[str, set[int]] = {n: set() for n in self.plan.inner}
        below: dict[str, frozenset[str]] = {}
        for name in self.members:
            if self._streams(name) and name not in self.to_write:
                continue
            at = self._stored_at(name) if self._streams(name) else self.plan.ready[name]
            for n in self._inner_below(name, below):
                uses[n].add(at)
        return frozenset(n for n, at in uses.items() if len(at) > 1)

    def _stored_at(self, name: str) -> int:
        """The stage whose loop writes a member that streams: the first over one of its dims in which it is known; else
        one behind all."""
        dims, known = out_dims(self.g.by_name[name]), self.plan.ready[name] + 1
        later = enumerate(self.loops.stages[known:], known)
        return next((k for k, d in later if d is not None and d in dims), len(self.plan.stages))

    def _inner_below(self, name: str, known: dict[str, frozenset[str]]) -> frozenset[str]:
        """Inner reductions that a member is computed from, by way of what streams. `known`: of members asked before;
        residual connections give a member exponentially many ways down."""
        if name not in known:
            above = [r for r in self.g.producers[name] if r in self.members and self._streams(r)]
            own = frozenset({name} & self.plan.inner)
            known[name] = own.union(*(self._inner_below(r, known) for r in above))
        return known[name]

    def _streams(self, name: str) -> bool:
        """Whether a member is computed tile by tile where it is used (a map or an inner reduction)."""
        return self.g.by_name[name].reducer is None or name in self.plan.inner

    # -- names ----------------------------------------------------------------------------

    def own_name(self, result: str, suffix: str) -> str:
        """A name for a block value that holds a member's result: its own, the first time and if it stays here."""
        if result in self.written or result in self.given:
            return fresh(result + suffix, self.taken)
        self.given.add(result)
        return result

    def close(self, scope: Scope, start: Expr | None = None, stop: Expr | None = None) -> None:
        """Append a scope's loop; what it named is seen no more, so that a later loop may use those names."""
        assert scope.dim is not None
        self.outer.nodes.append(Loop("for", scope.dim, tuple(scope.nodes), start, stop))
        self.given -= set(scope.values.values())

    def held(self, result: str, scope: Scope) -> str:
        """The block value that holds a member's result, as seen from a scope."""
        return scope.values.get(result) or self.outer.values.get(result) or self.names[result]

    def localise(self, e: Expr, scope: Scope) -> Expr:
        """Loads of members' results become loads of the block values that hold them."""

        def one(n: Expr) -> Expr | None:
            if isinstance(n, Load) and n.tensor in self.owner:
                return Load(self.held(n.tensor, scope), n.index)
            return None

        return transform(e, one)

    def in_fold(self, fold: Fold, e: Expr, scope: Scope) -> Expr:
        """An expression of a Fold over block values: `m@new` is the state, `m@old` its copy."""
        states = {v.name for v in fold.state} | {v.index_name for v in fold.state if v.index_name}

        def one(n: Expr) -> Expr | None:
            if not isinstance(n, Load):
                return None
            base = n.tensor.removesuffix(NEW).removesuffix(OLD)
            if base in states:
                at = self.old(fold, base) if n.tensor.endswith(OLD) else self.state(fold, base)
                return Load(at, n.index)
            return Load(self.held(base, scope), n.index) if base in self.owner else None

        return transform(e, one)

    # -- values ---------------------------------------------------------------------------

    def need(self, e: Expr, scope: Scope) -> None:
        """Define every member value that `e` loads: in the loop if it varies there, else before it."""
        for ld in loads(e):
            owner = self.owner.get(ld.tensor)
            if owner is not None and self._streams(owner):
                self.define(owner, scope)

    def here(self, e: Expr, scope: Scope) -> Expr:
        """`e` with maps that it reads at other positions of a streamed dim computed there: a block of the loop holds
        the elements at its own."""

        def elsewhere(ld: Load) -> bool:
            c = self.g.by_name[ld.tensor]
            own = zip(c.dims, ld.index, strict=True)
            return (
                ld.tensor in self.owner
                and c.reducer is None
                and any(d == scope.dim and ix != Index(d) for d, ix in own)
            )

        return inline_reads(self.g, e, elsewhere) if scope.dim is not None else e

    def define(self, name: str, scope: Scope) -> None:
        c = self.g.by_name[name]
        if name in self.outer.values or name in scope.values:
            return
        varies = scope.dim in c.dims and name not in self.panels
        target = scope if varies else self.outer
        body = self.here(rounded(self.g, c), target)
        self.need(body, target)
        body = self.localise(body, target)
        for r in c.results:
            target.values[r] = self.own_name(r, "_b")
        let = Let(target.values[name], c.dims, c.dtype.compute, body, c.reducer, c.rdims, loc=c.loc)
        if c.reducer in INDEX_REDUCERS:
            let = replace(let, **self._picked(c, target), payload=self._flat_index(c.rdims))
        target.nodes.append(replace(let, kept=kept_of(self.g, c)))
        if c.reducer is not None and as_stored(self.g, c):
            target.values[name] = self._stored(c, target.values[name], target)

    def _stored(self, c: Compute, held: str, scope: Scope) -> str:
        """A value of a reduction that is held with more digits, as it is stored."""
        name = fresh(f"{c.name}_r", self.taken)
        scope.nodes.append(Let(name, c.dims, c.dtype.compute, Cast(Load(held, plain(c.dims)), c.dtype), loc=c.loc))
        return name

    def _picked(self, c: Compute, scope: Scope) -> dict[str, Any]:
        """What a reduction to an index, inside of a stage, calls its value and its index, and the value's type."""
        if c.index_name is not None:
            return {"index_name": scope.values[c.index_name]}
        value = fresh(value_name(c), self.taken)
        held = type_of(c.body, self.g.program.dtype_of)
        return {"name": value, "index_name": scope.values[c.name], "dtype": held.compute}

    # -- stages ---------------------------------------------------------------------------

    def stage(self, k: int, stage: Stage) -> None:
        dim = self.loops.stages[k]
        if dim is None and all(self.g.extent(a) > 0 for a in stage.axes):
            stage = replace(stage, fold=stage.in_one_block())
        self.fold_pass(k, stage, dim)
        self.finish(stage)

    def fold_pass(
        self, k: int, stage: Stage, dim: str | None, start: Expr | None = None, stop: Expr | None = None
    ) -> None:
        """One pass over the stage's axes: a loop over `dim`, or (None) all of them as one block."""
        scope = self.outer if dim is None else Scope(dim)
        if dim is not None:
            for v in stage.fold.state:
                name, index = self.state_names(stage.fold, v)
                self.outer.nodes.append(Init(name, v.dims, v.dtype, v.identity, index))
        for v in stage.fold.state:
            v = replace(v, element=self.here(v.element, scope))
            self.need(v.element, scope)
            scope.nodes += self.step(stage, v, scope, looped=dim is not None)
        if dim is not None:
            for m in list(self.to_write):
                if self._streams(m) and dim in out_dims(self.g.by_name[m]) and self.plan.ready[m] < k:
                    self.store(m, scope)
            self.close(scope, start, stop)

    def state_names(self, fold: Fold, v: StateVar) -> tuple[str, str | None]:
        """Block values that hold a state variable and its index."""
        return self.state(fold, v.name), self.state(fold, v.index_name) if v.index_name else None

    def state(self, fold: Fold, name: str) -> str:
        """The block value of a state variable: its own name where the cascade has it and no result is called so."""
        key = (name, *(v.name for v in fold.state))
        if key not in self.states:
            wanted = f"{name}_s" if name in self.taken else name
            self.states[key] = self.own_name(name, "_s") if name in self.owner else fresh(wanted, self.taken)
        return self.states[key]

    def old(self, fold: Fold, name: str) -> str:
        """The block value of a state variable's copy from before a step."""
        key = (name, *(v.name for v in fold.state), OLD)
        if key not in self.states:
            self.states[key] = fresh(f"{self.state(fold, name)}_old", self.taken)
        return self.states[key]

    def step(self, stage: Stage, v: StateVar, scope: Scope, *, looped: bool) -> list[Node]:
        """Repair and accumulate one state variable; in one block there is nothing to repair."""
        fold, (name, index) = stage.fold, self.state_names(stage.fold, v)
        element = self.in_fold(fold, v.element, scope)
        payload = self._flat_index(stage.axes) if v.index_name else None
        if not looped:
            return [Let(name, v.dims, v.dtype, element, v.reducer, stage.axes, index, payload, self.kept(stage, v))]
        nodes: list[Node] = []
        if any(w.repair is not None and _loads(w.repair, v.name + OLD) for w in fold.state):
            nodes.append(Let(self.old(fold, v.name), v.dims, v.dtype, Load(name, plain(v.dims))))
        if v.repair is not None:
            nodes.append(Update(name, self.in_fold(fold, v.repair, scope)))
        nodes.append(Accumulate(name, v.reducer, stage.axes, element, payload, self.kept(stage, v)))
        return nodes

    def kept(self, stage: Stage, v: StateVar) -> DType | None:
        """What the sum of a state keeps of what it multiplies (`block.kept`); a state with no sum of its own in the
        program, that of the sums it is for."""
        ends = dict(stage.fold.finish)
        own = [r for r in stage.reductions if r == v.name] or list(stage.reductions)
        found = [
            kept_of(self.g, self.g.by_name[r], delayed=v.repair is not None or not isinstance(ends.get(r), Load))
            for r in own
            if v.reducer == "sum"
        ]
        return DType.F32 if DType.F32 in found else next((k for k in found if k is not None), None)

    def _flat_index(self, axes: tuple[str, ...]) -> Expr:
        """Position in the reduced dims, flattened in their order."""
        at: Expr = Index(axes[0])
        for d in axes[1:]:
            at = at * self.g.program.sizes[d] + Index(d)
        return at

    def finish(self, stage: Stage) -> None:
        """Name the results of the cascade: a state variable itself, or an expression over states."""
        for name, e in stage.fold.finish:
            if name not in self.owner:
                continue
            c = self.g.by_name[self.owner[name]]
            self.need(e, self.outer)  # what only a delayed factor uses
            value = self.in_fold(stage.fold, e, self.outer)
            if isinstance(value, Load) and value.index == plain(c.dims):
                self.names[name] = value.tensor
            else:
                held = DType.I64 if name != c.name or c.reducer in ("argmax", "argmin") else c.dtype.compute
                self.names[name] = fresh(f"{name}_f", self.taken)
                self.outer.nodes.append(Let(self.names[name], c.dims, held, value, loc=c.loc))
            if name == c.name and as_stored(self.g, c):
                self.names[name] = self._stored(c, self.names[name], self.outer)

    # -- results --------------------------------------------------------------------------

    def write_rest(self) -> None:
        """Store what is left: maps of final values, in loops over the dims that are not parallel."""
        while self.to_write:
            dim = self._stream_dim(self.g.by_name[self.to_write[0]])
            if dim is None:
                self.store(self.to_write[0], self.outer)
                continue
            scope = Scope(dim)
            for m in list(self.to_write):
                if self._stream_dim(self.g.by_name[m]) == dim:
                    self.store(m, scope)
            self.close(scope)

    def _stream_dim(self, c: Compute) -> str | None:
        return None if c.name in self.panels or not self._streams(c.name) else self.loops.rows[c.name]

    def store(self, name: str, scope: Scope) -> None:
        """Write the results of a member; a map that nothing else here uses is stored directly."""
        c = self.g.by_name[name]
        self.to_write.remove(name)
        if c.reducer is None and not any(u in self.members for u in self.g.consumers[name]):
            body = self.here(c.body, scope)
            self.need(body, scope)
            scope.nodes.append(Store(name, plain(c.dims), c.dims, self.localise(body, scope)))
            return
        if self._streams(name):
            self.define(name, scope)
        for r in c.results:
            scope.nodes.append(Store(r, plain(c.dims), c.dims, Load(self.held(r, scope), plain(c.dims))))


class Scope:
    """Where definitions go: a loop over `dim`, or (None) the block outside of loops."""

    def __init__(self, dim: str | None):
        self.dim = dim
        self.nodes: list[Node] = []
        self.values: dict[str, str] = {}


def plain(dims: tuple[str, ...]) -> tuple[Expr, ...]:
    return tuple(Index(d) for d in dims)


def _loads(e: Expr, name: str) -> bool:
    return any(ld.tensor == name for ld in loads(e))
