"""The stages of a kernel: which of its reductions run in one pass over their shared axes.

A reduction joins the earliest stage over the same axes that it can: either it does not depend
on that stage's results, or a Fold of the whole cascade exists (`algebra.derive`). Otherwise it
gets a later stage of the same kernel, with the reason kept.

Reductions whose result still has a long axis that a later reduction runs over (the scores of an
attention, the logits of a router) are not stages: they are computed tile by tile inside the
loops of their consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.context import COUNTER, Options
from tilefold.algebra.derive import build_fold, derive_fold
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, Index, Load, loads, substitute, tensors_read, transform, type_of
from tilefold.algebra.fold import Fold
from tilefold.block.group import Group
from tilefold.errors import NotFusibleError, SourceLoc
from tilefold.tensor.analysis import Graph, is_static, out_dims
from tilefold.tensor.as_stored import rounded
from tilefold.tensor.extremes import is_exact
from tilefold.tensor.ir import Compute
from tilefold.tensor.product import matrices
from tilefold.tensor.reduction_laws import SHORT

#: Most reductions of a pass that follow from one another: each moves with all before it, and the proofs of all that
#: take a time of their fourth power.
FOLLOWING = 8
#: Most numbers that a sum which is no product keeps over a longer axis.
KEPT = 64


@dataclass(frozen=True, slots=True)
class Stage:
    """Reductions (Compute names) over the same axes that one pass computes, and their Fold."""

    axes: tuple[str, ...]
    reductions: tuple[str, ...]
    cascade: Cascade
    fold: Fold

    def in_one_block(self) -> Fold:
        """The Fold for a pass that sees the whole (not empty) axis at once.

        Its D is final from the start, so no guard is needed: the elements are the user's own expressions,
        and can be shared with what else computes them. Nothing moves, so that no residual grows either: what the
        rounding of D does is what it does in the user's own formula.
        """
        plain = build_fold(self.cascade, Options(guards=False, residuals=False))
        with_residuals, without = (build_fold(self.cascade, Options(residuals=r)) for r in (True, False))
        residuals = {v.name for v in with_residuals.state} - {v.name for v in without.state}
        kept = [(v.name, v.reducer) for v in self.fold.state if v.name not in residuals]
        return plain if [(v.name, v.reducer) for v in plain.state] == kept else self.fold


@dataclass(frozen=True, slots=True)
class Rejection:
    """A reduction that could not join the pass before it, why, and the user's line."""

    name: str
    reason: str
    loc: SourceLoc | None = None


@dataclass(frozen=True, slots=True)
class StagePlan:
    """`ready[c]`: index of the last stage that the value of member c depends on, -1 for none."""

    group: Group
    stages: tuple[Stage, ...]
    ready: dict[str, int]
    inner: frozenset[str]
    rejections: tuple[Rejection, ...]


def plan_stages(g: Graph, group: Group, passes: tuple[tuple[str, ...], ...] | None = None) -> StagePlan:
    """Assign every reduction of the group to a stage: the earliest it can join, or the one that `passes` has it in.

    With `passes` (reductions of each stage), NotFusibleError names what keeps a reduction out of its stage.
    """
    inner = inner_producers(g, group)
    planner = _Planner(g, group, inner) if passes is None else _Given(g, group, inner, passes)
    for name in group.members:
        planner.add(name)
    stages = tuple(planner.stage(axes, names) for axes, names in planner.open())
    return StagePlan(group, stages, planner.ready, inner, tuple(planner.rejections))


def inner_producers(g: Graph, group: Group) -> frozenset[str]:
    """Reductions that a later member, which depends on them, reduces again along a local dim."""
    found: set[str] = set()
    for name in group.members:
        c = g.by_name[name]
        local = set(out_dims(c)) - set(group.parallel)
        if _is_state(g, c, local):
            continue
        if c.reducer is None or not local:
            continue
        todo, seen = list(g.consumers[name]), set()
        while todo:
            u = todo.pop()
            if u in seen or u not in group.members:
                continue
            seen.add(u)
            if local & set(g.by_name[u].rdims):
                found.add(name)
                break
            todo += g.consumers[u]
    return frozenset(found)


def _is_state(g: Graph, c: Compute, local: set[str]) -> bool:
    """Whether a reduction's local result is kept over its long axis: a few numbers, or those of no product, which would
    be a tile of all of the axis with all of them."""
    kept, over = g.points(local), g.points(c.rdims)
    return kept <= SHORT < over or (kept <= KEPT < over and matrices(c, lambda d: g.points((d,))) is None)


class _Planner:
    def __init__(self, g: Graph, group: Group, inner: frozenset[str]):
        self.g, self.group, self.inner = g, group, inner
        self.ready: dict[str, int] = {}
        self.through: dict[str, int] = {}  # same, counting only what no Fold can look through
        self.axes: list[tuple[str, ...]] = []
        self.names: list[list[str]] = []
        self.rejections: list[Rejection] = []
        self.opened: set[str] = set()  # maps that a Fold sees through, for what is known of their values
        self.following: dict[str, int] = {}  # reductions of the last stage that lead to it, one after another
        self.dtypes = tuple((i.name, i.dtype) for i in g.program.inputs)

    def open(self) -> list[tuple[tuple[str, ...], list[str]]]:
        return list(zip(self.axes, self.names, strict=True))

    def add(self, name: str) -> None:
        c = self.g.by_name[name]
        inside = [r for r in self.g.producers[name] if r in self.ready]
        deps = max((self.ready[r] for r in inside), default=-1)
        hard = max((self._hard(c, r) for r in inside), default=-1)
        if c.reducer is None:
            self.ready[name], self.through[name] = deps, hard
        elif name in self.inner:
            self.ready[name] = self.through[name] = deps
        else:
            self.ready[name] = self._place(c, deps, hard)
            self.through[name] = -1
        own = c.reducer is not None and name not in self.inner
        self.following[name] = self._follows(inside, self.ready[name]) + own

    def _follows(self, inside: list[str], k: int) -> int:
        """How many reductions of a stage lead to these producers, one after another."""
        return max((self.following[r] for r in inside if self.ready[r] == k), default=0)

    def _hard(self, c: Compute, producer: str) -> int:
        """Stage whose *final* result `c` needs from this producer, -1 if a Fold may look through."""
        p = self.g.by_name[producer]
        if p.reducer is None:
            return self.through[producer]
        plain = all(
            ld.index == tuple(Index(d) for d in p.dims) and ld.tensor == p.name and p.reducer != "argmax"
            for ld in _loads_of(c.body, p)
        )
        direct = plain and p.reducer not in ("argmin", "topk") and producer not in self.inner
        return self.through[producer] if direct else self.ready[producer]

    def _place(self, c: Compute, deps: int, hard: int) -> int:
        first = max(deps, hard + 1, 0)
        for k in range(first, len(self.axes)):
            if set(self.axes[k]) != set(c.rdims):
                continue
            if self._follows([r for r in self.g.producers[c.name] if r in self.ready], k) >= FOLLOWING:
                why = f"{c.name} follows from {FOLLOWING} reductions of a pass, one after another: it starts the next"
                self.rejections.append(Rejection(c.name, why, c.loc))
                continue
            try:
                derive_fold(self.cascade(self.axes[k], [*self.names[k], c.name]))
            except NotFusibleError as err:
                if not self._opens(k, c):
                    self.rejections.append(Rejection(c.name, err.message, c.loc))
                    continue
            self.names[k].append(c.name)
            return k
        self.axes.append(c.rdims)
        self.names.append([c.name])
        return len(self.axes) - 1

    def _opens(self, k: int, c: Compute) -> bool:
        """Whether `c` joins a stage where maps that it shares with the stage's reductions are seen through.

        A map is a value of its own to a Fold, and may be anything: sums of it may be 0, by which it is divided. What
        it is made of says more (1 / (1 + x^2) is positive, and so are its sums).
        """
        names = [*self.names[k], c.name]
        read = [tensors_read(r.body) for r in self.cascade(self.axes[k], names).reductions]
        shared = read[-1] & frozenset[str]().union(*read[:-1])
        maps = {t for t in shared if t in self.ready and self.g.by_name[t].reducer is None} - self.opened
        if not maps:
            return False
        self.opened |= maps
        try:
            derive_fold(self.cascade(self.axes[k], names))
        except NotFusibleError:
            self.opened -= maps
            return False
        return True

    def stage(self, axes: tuple[str, ...], names: list[str]) -> Stage:
        cascade = self.cascade(axes, names)
        return Stage(axes, tuple(names), cascade, derive_fold(cascade))

    def cascade(self, axes: tuple[str, ...], names: list[str]) -> Cascade:
        reductions = tuple([self._reduction(self.g.by_name[n], names) for n in names])
        read = frozenset[str]().union(*(tensors_read(r.body) for r in reductions))
        own = (COUNTER, *names)  # what a Fold names its variables after: no input's names
        given = [(t, dtype) for t, dtype in self.dtypes if t in read or t.startswith(own)]
        others = read.difference(names, (r.index_name for r in reductions))
        few = all(is_static(self.g.program.sizes[d]) for d in axes) and self.g.points(axes) <= SHORT
        return Cascade(axes, reductions, (*given, *self._counted(others)), few)

    def _counted(self, read: frozenset[str]) -> Iterator[tuple[str, DType]]:
        """The types of computed integers: sums of them are checked with whole numbers, as those of inputs are."""
        p = self.g.program
        for t in sorted(read):
            if not p.is_input(t) and not p.dtype_of(t).is_float:
                yield t, p.dtype_of(t)

    def _reduction(self, c: Compute, names: list[str]) -> Reduction:
        body = inline_maps(
            self.g, c.body, lambda m: m in self.ready and (m in self.opened or self._depends(m, set(names)))
        )
        if c.reducer in ("argmax", "argmin"):
            held = type_of(body, self.g.program.dtype_of)
            return Reduction(value_name(c), c.reducer, c.dims, body, held, c.name, c.loc)
        exact = is_exact(self.g, c)
        return Reduction(c.name, str(c.reducer), c.dims, body, c.dtype, c.index_name, c.loc, exact)

    def _depends(self, m: str, names: set[str]) -> bool:
        """Whether a map uses, through maps only, one of the reductions."""
        todo, seen = [m], set()
        while todo:
            x = todo.pop()
            if x in seen or self.g.by_name[x].reducer is not None:
                continue
            seen.add(x)
            if not names.isdisjoint(self.g.producers[x]):
                return True
            todo += self.g.producers[x]
        return False


class _Given(_Planner):
    """A planner that is told the stages, and says what forbids them."""

    def __init__(self, g: Graph, group: Group, inner: frozenset[str], passes: tuple[tuple[str, ...], ...]):
        super().__init__(g, group, inner)
        self.given = {m: k for k, names in enumerate(passes) for m in names}
        self.axes = [g.by_name[names[0]].rdims for names in passes]
        self.names = [[] for _ in passes]

    def _place(self, c: Compute, deps: int, hard: int) -> int:
        k = self.given[c.name]
        if k <= hard or k < deps:
            late = next(r for r in self.g.producers[c.name] if r in self.ready and self._too_late(c, r, k))
            raise NotFusibleError(
                f"{c.name} needs the final {late}, which is known only after a later pass than its own",
                reduction=c.name,
                loc=c.loc,
            )
        if set(self.axes[k]) != set(c.rdims):
            raise NotFusibleError(
                f"{c.name} reduces over {', '.join(c.rdims)}, the pass over {', '.join(self.axes[k])}",
                reduction=c.name,
                loc=c.loc,
            )
        derive_fold(self.cascade(self.axes[k], [*self.names[k], c.name]))
        self.names[k].append(c.name)
        return k

    def _too_late(self, c: Compute, producer: str, k: int) -> bool:
        return self._hard(c, producer) >= k or self.ready[producer] > k


def value_name(c: Compute) -> str:
    """State variable that holds the best value beside an argmax / argmin."""
    return f"{c.name}_best"


def _loads_of(e: Expr, p: Compute) -> list[Load]:
    found: list[Load] = []

    def note(n: Expr) -> None:
        if isinstance(n, Load) and n.tensor in p.results:
            found.append(n)

    transform(e, note)
    return found


def inline_maps(g: Graph, e: Expr, wanted: Callable[[str], bool]) -> Expr:
    """Substitute the bodies of maps for which `wanted(name)` holds, recursively."""
    return inline_reads(g, e, lambda ld: wanted(ld.tensor))


def inline_reads(g: Graph, e: Expr, wanted: Callable[[Load], bool]) -> Expr:
    """Substitute the bodies of maps where `wanted(load)` holds, recursively.

    What is read at several places is put in as one object, once: of a recurrence that is unrolled, each state of which
    reads the one before it several times, there are as many expressions as states, and what nodes remember (what they
    read and cost) is found without going through all that they stand for.
    """
    if not any(ld.tensor in g.by_name and wanted(ld) for ld in loads(e)):
        return e
    known: dict[Load, Expr] = {}

    def one(n: Expr) -> Expr | None:
        if not isinstance(n, Load) or n.tensor not in g.by_name or not wanted(n):
            return None
        if n not in known:
            m = g.by_name[n.tensor]
            table: dict[Expr, Expr] = {Index(d): ix for d, ix in zip(m.dims, n.index, strict=True)}
            known[n] = transform(substitute(rounded(g, m), table), one)
        return known[n]

    return transform(e, one)
