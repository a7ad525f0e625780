"""Loop nests of Map, Reduce, Fill and Store statements: which share loops, and which dim is vectorised.

Adjacent statements form a `Group` when they can share loops over dims that none of them reduces
(the *common* dims) without changing any value. Within a group, statements over the same dims form a
*phase*, computed element by element together. The *strip* dim is cut into vectors: it is a
common dim (each lane its own reduction) or, per phase, any other dim (lanes are summed at the end).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, Index, Load, dims_used, loads, ops_used, tensors_read
from tilefold.backends.cpp.across import across
from tilefold.backends.cpp.affine import split
from tilefold.backends.cpp.scope import Facts
from tilefold.backends.cpp.values import HEAVY
from tilefold.tile.ir import Fill, Map, Reduce, Stmt, Store

#: Cost of a vector that is laid down before it is read, as `_stride_cost`: a few instructions and the first cache.
_TURNED = 0.6


@dataclass(frozen=True, slots=True)
class Step:
    """`target[index] = expr` over `dims`, or its reduction over `rdims` by `op`."""

    target: str
    index: tuple[Expr, ...]
    dims: tuple[str, ...]
    expr: Expr
    rdims: tuple[str, ...] = ()
    op: str = ""
    accumulate: bool = False

    @property
    def all_dims(self) -> tuple[str, ...]:
        return self.dims + self.rdims


@dataclass(frozen=True, slots=True)
class Group:
    """Steps under shared loops over `common`; `strip`: the common dim that is vectorised, if any is."""

    steps: tuple[Step, ...]
    common: tuple[str, ...]
    strip: str | None


def step_of(s: Stmt, facts: Facts) -> Step | None:
    """The element-wise form of a statement; None for the others."""
    match s:
        case Fill(buf, value):
            dims = facts.tiles[buf].buffer.dims
            return Step(buf, tuple(map(Index, dims)), dims, value)
        case Map(buf, expr):
            dims = facts.tiles[buf].buffer.dims
            return Step(buf, tuple(map(Index, dims)), dims, expr)
        case Reduce(buf, op, rdims, expr, accumulate):
            dims = facts.tiles[buf].buffer.dims
            return Step(buf, tuple(map(Index, dims)), dims, expr, rdims, op, accumulate)
        case Store(tensor, index, dims, expr):
            return Step(tensor, index, dims, expr)
    return None


def accesses(step: Step) -> tuple[Load, ...]:
    """Every element touched, the target first."""
    return (Load(step.target, step.index), *loads(step.expr), *(x for e in step.index for x in loads(e)))


def best_strip(step: Step, facts: Facts) -> str | None:
    """The dim along which most accesses are contiguous; None for a single element."""
    costs: list[tuple[float, str]] = []
    for dims, extra in ((step.dims, 0.0), (step.rdims, 0.5)):
        for n, dim in enumerate(reversed(dims)):
            strides = sum(_cost(a, dim, step, facts) for a in accesses(step))
            costs.append((strides + extra + 0.01 * n + _short(dim, facts), dim))
    return min(costs)[1] if costs else None


def _cost(access: Load, dim: str, step: Step, facts: Facts) -> float:
    """As `_stride_cost`, but what is read across another loop is laid down along `dim` first."""
    cost = _stride_cost(access, dim, facts)
    read = dim in step.dims and access.tensor != step.target
    turned = cost > _TURNED and read and any(across(access, d, dim, facts) is not None for d in step.dims)
    return _TURNED if turned else cost


def _short(dim: str, facts: Facts) -> float:
    """Penalty of a dim too short to fill a vector."""
    n = facts.static.get(dim)
    return 0.0 if n is None or n >= 8 else 2.0 * (8 - n)


def _stride_cost(access: Load, dim: str, facts: Facts) -> float:
    """0 where the element does not move with `dim`, else by how costly a vector of them is."""
    moving = [n for n, e in enumerate(access.index) if dim in dims_used(e)]
    if not moving:
        return 0.0
    parts = [split(access.index[n], dim, facts.kernel.sizes) for n in moving]
    if len(moving) == 1 and parts[0] is not None and parts[0][0] == 1:
        stride = facts.stride(access.tensor, moving[0])
        if stride == "1":
            return 0.1
        last = moving[0] == len(access.index) - 1
        return 1.0 if last and not stride.isdigit() else 4.0  # a run-time stride of 1 is likely there
    return 4.0 if all(p is not None for p in parts) else 8.0


def groups(steps: Iterable[Step], facts: Facts) -> list[Group]:
    """Cut a run of steps into groups, each as long as sharing stays legal and does not spoil the vectors."""
    run = tuple(steps)
    strips = [best_strip(s, facts) for s in run]
    out: list[Group] = []
    for n, s in enumerate(run):
        joined = _join(out[-1], s, strips[n - len(out[-1].steps) : n + 1]) if out else None
        if joined is None:
            out.append(Group((s,), s.dims, strips[n] if strips[n] in s.dims else None))
        else:
            out[-1] = joined
    return out


def _join(g: Group, s: Step, strips: list[str | None]) -> Group | None:
    """The group with one step more; `strips`: the best one of each step, the new one's last."""
    steps = (*g.steps, s)
    common = tuple(d for d in g.common if d in s.dims and _aligned(g.steps, s, d))
    if not common:
        return None
    if all(b in common for b in strips):
        return Group(steps, common, strips[0]) if len(set(strips)) == 1 else None
    # vectorised along a dim of their own; what has one element a common index rides along as a scalar
    if all(b not in common or set(t.all_dims) == set(common) for b, t in zip(strips, steps, strict=True)):
        return Group(steps, common, None)
    return None


def _aligned(steps: tuple[Step, ...], s: Step, dim: str) -> bool:
    """Whether running `s` too for one index of `dim` before the next index changes nothing (so it is among `steps`).

    True where everything that one step writes and another touches has `dim` as a plain index, at
    one and the same place.
    """
    mine = accesses(s)
    return all(
        all(_same_place(t.index, a.index, dim) for a in mine if a.tensor == t.target)
        and all(_same_place(s.index, a.index, dim) for a in accesses(t) if a.tensor == s.target)
        for t in steps
    )


def _same_place(written: tuple[Expr, ...], touched: tuple[Expr, ...], dim: str) -> bool:
    at = [n for n, e in enumerate(written) if e == Index(dim)]
    return bool(at) and any(n < len(touched) and touched[n] == Index(dim) for n in at)


def phases(g: Group) -> list[tuple[Step, ...]]:
    """Runs of steps over the same dims that can be computed element by element together.

    A step joins the latest phase that takes it, or becomes one right after the last that it depends on.
    """
    out: list[list[Step]] = []
    for s in g.steps:
        last = max((n for n, p in enumerate(out) if any(_conflict(s, t) for t in p)), default=-1)
        joinable = [n for n in range(max(last, 0), len(out)) if _joins_phase(out[n], s)]
        if joinable:
            out[joinable[-1]].append(s)
        else:
            out.insert(last + 1, [s])
    return [tuple(p) for p in out]


def _conflict(s: Step, t: Step) -> bool:
    """Whether the order of two steps matters."""
    return s.target in {a.tensor for a in accesses(t)} or t.target in {a.tensor for a in accesses(s)}


def _joins_phase(phase: list[Step], s: Step) -> bool:
    first = phase[0]
    if set(first.all_dims) != set(s.all_dims):
        return False
    reduced = [p.rdims for p in (*phase, s) if p.rdims]
    if any(set(r) != set(reduced[0]) for r in reduced):
        return False
    for p in phase:
        mine = [a for a in accesses(s) if a.tensor == p.target]
        theirs = [a for a in accesses(p) if a.tensor == s.target]
        if (p.rdims and mine) or (s.rdims and theirs):
            return False  # a reduction is complete only after the loops
        if any(a.index != p.index for a in mine) or any(a.index != s.index for a in theirs):
            return False
        plain = all(isinstance(e, Index) for e in p.index) and set(p.dims) == set(p.all_dims)
        if mine and not plain:
            return False
    return True


def heavy(steps: Iterable[Step]) -> bool:
    """Whether a transcendental function is computed: two vectors a strip are then enough."""
    return any(not ops_used(s.expr).isdisjoint(HEAVY) for s in steps)


def has_wide(steps: Iterable[Step], facts: Facts) -> bool:
    """Whether 8-byte floats occur."""
    return any(facts.dtype(t) is DType.F64 for s in steps for t in (s.target, *tensors_read(s.expr)))
