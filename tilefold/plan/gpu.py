"""Kernels for a GPU: the same groups and Folds as on a CPU, cut into segments where too few blocks are left.

A GPU needs a few hundred thread blocks. A fold over a long axis with few parallel blocks (decoding:
one query, many keys) is cut into segments with a derived combine kernel (`block.split`); how many
follows from the number of multiprocessors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Index, Load, substitute
from tilefold.block.build import Loops, choose_loops
from tilefold.block.fuse import UNIT, Fused, FusedKernel, build_kernels, with_unit
from tilefold.block.group import Group, Grouping, Refusal, group, one_kernel
from tilefold.block.ir import Block, Init, Let, Loop, Node
from tilefold.block.ir import walk as walk_block
from tilefold.block.stages import StagePlan, plan_stages
from tilefold.errors import TilefoldError
from tilefold.plan.cut import components, cuts
from tilefold.plan.gpu_folds import (
    BLOCKS_PER_UNIT,
    LEAST_SEGMENT,
    MOST_SEGMENTS,
    ONE_TILE,
    columns_fit,
    equal,
    segments_of_reads,
    separated,
    streamed_axis,
)
from tilefold.tensor.analysis import Graph, is_static, out_dims
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import divided, product_of
from tilefold.tensor.reduction_laws import align_reductions
from tilefold.tile.pieces import MATRIX_UNIT

#: Elements of the axis that a segment has at least where wide states would else leave multiprocessors without a block.
LEAST_WIDE_SEGMENT = 64
#: A state of this many columns fills a multiprocessor: one block each.
WIDE = 512
#: Elements of a contraction that one step of a split product has at least.
LEAST_STEP = 256
#: Heads that share operands are packed into one tile where each has fewer rows than this.
PACKED = 16
#: Most elements of values that a thread block keeps for all of its life: the registers of a multiprocessor.
MOST_HELD = 1 << 16
#: Thread blocks that a kernel of two which have more must be left with.
LEAST_BLOCKS = 8
#: Cuts of a group that does not fit whose parts are tried, the cheapest first.
MOST_CUTS = 24
#: Rows of a matrix product that share a thread block.
ROWS = 64


@dataclass(frozen=True, slots=True)
class Given:
    """What a study gives instead of having it chosen; None leaves the choice to the compiler.

    segments: of the axis of a fold that can be cut (1: none are). stream: indices of streamed axes that a tile
    holds. rows: indices of the last parallel dim a thread block. warps, stages: of every kernel.
    """

    segments: int | None = None
    stream: int | None = None
    rows: int | None = None
    warps: int | None = None
    stages: int | None = None


#: Why a kernel cannot be made, None where it can.
Refuse = Callable[[FusedKernel], str | None]


def fuse_for_gpu(
    p: Program,
    *,
    units: int = 132,
    given: Given | None = None,
    calls: Collection[tuple[str, ...]] = (),
    refuse: Refuse | None = None,
) -> Fused:
    """Fuse `p` for a device of `units` multiprocessors. The statements of one of `calls` become a kernel of their own,
    which the caller replaces by a library's.

    Groups whose kernel would hold too much, or that `refuse` gives a reason against, are cut where that adds the least
    traffic, until what is left fits; single operators are taken as they are.
    """
    apart = frozenset(m for call in calls for m in call)
    p = align_reductions(replace(p, sizes={**p.sizes, UNIT: Const(1, DType.I64)}), apart)
    g = Graph.of(p)
    grouping = group(p, apart, 1, LEAST_BLOCKS, in_registers=True, calls=calls)
    p, alone = split_contractions(p, g, grouping.groups, units)
    if alone:
        g = Graph.of(p)
        grouping = group(p, apart | alone, 1, LEAST_BLOCKS, in_registers=True, calls=calls)
    groups = list(grouping.groups)
    if given is None:
        p, groups = separated(p, g, groups, units, frozenset(calls))
        g = Graph.of(p)
    fitting = _Fitting(g, units, given, refuse, frozenset(calls))
    refusals = list(grouping.refusals)
    fitted = [x for members in groups for x in fitting.parts(members, refusals)]
    kernels = tuple(k for x in fitted for k in fitting.kernels(x))
    return Fused(p, kernels, Grouping(tuple(fitted), tuple(refusals)))


class _Fitting:
    """Groups made to fit kernels. What was built is remembered: several cuts have the same part."""

    def __init__(
        self, g: Graph, units: int, given: Given | None, refuse: Refuse | None, calls: frozenset[tuple[str, ...]]
    ):
        self.g, self.units, self.given, self.refuse, self.calls = g, units, given, refuse, calls
        self._made: dict[Group, tuple[FusedKernel, ...] | str] = {}

    def kernels(self, x: Group) -> tuple[FusedKernel, ...]:
        """Of a group that fits."""
        made = self.made(x)
        assert not isinstance(made, str), made
        return made

    def parts(self, x: Group, refusals: list[Refusal]) -> list[Group]:
        """The group, or what it is cut into: the cheapest two parts that both fit; if there are none, the parts of the
        cheapest cut."""
        made = self.made(x)
        if not isinstance(made, str):
            return [x]
        ways = cuts(self.g, x.members)
        fit = next(((way, found) for way in ways[:MOST_CUTS] if (found := self._fit(*way))), None)
        (first, second), found = fit or (ways[0], [])
        refusals += [
            Refusal(a, b, made, self.g.by_name[b].loc) for a in first for b in second if a in self.g.producers[b]
        ]
        return found or [y for part in (first, second) for z in self._legal(part) for y in self.parts(z, refusals)]

    def _fit(self, *parts: tuple[str, ...]) -> list[Group]:
        """The groups of parts that all fit; else none."""
        found: list[Group] = []
        for part in (x for p in parts for x in components(self.g, p)):
            x = one_kernel(self.g, part, in_registers=True)
            if isinstance(x, str) or isinstance(self.made(x), str):
                return []
            found.append(x)
        return found

    def _legal(self, members: tuple[str, ...]) -> list[Group]:
        """The group of a part, or those of its parts where it is none: a dim that more members kept local may be
        parallel in a kernel of less."""
        apart = components(self.g, members)
        if len(apart) == 1:
            found = one_kernel(self.g, members, in_registers=True)
            if not isinstance(found, str):
                return [found]
            apart = list(cuts(self.g, members)[0])
        return [x for part in apart for x in self._legal(part)]

    def made(self, x: Group) -> tuple[FusedKernel, ...] | str:
        """The kernels of a group, or why they cannot be made of several operators. TilefoldError: of a single one."""
        if x not in self._made:
            self._made[x] = self._make(x)
        return self._made[x]

    def _make(self, x: Group) -> tuple[FusedKernel, ...] | str:
        g, whole = self.g, len(x.members) == 1 or x.members in self.calls
        try:
            plan = plan_stages(g, with_unit(x))
            made = build_kernels(g, plan, gpu_loops(g, plan, self.given), segments(g, plan, self.units, self.given))
        except TilefoldError as err:
            if whole:
                raise
            return err.message
        for k in () if whole else made:
            if held(k.block) > MOST_HELD:
                return f"a thread block would keep {held(k.block)} elements, of {MOST_HELD} that its registers hold"
            reason = None if self.refuse is None else self.refuse(k)
            if reason is not None:
                return reason
        return made


def held(b: Block) -> int:
    """Elements that a thread block keeps for all of its life beside its tiles: states, and reductions computed once for
    several loops. One index of each parallel dim; dynamic dims count as one."""
    parallel = {n.dim for n in walk_block(b.body) if isinstance(n, Loop) and n.kind == "forall"}
    extents = {d: int(e.value) for d, e in b.sizes.items() if isinstance(e, Const) and d not in parallel}

    def of(nodes: Sequence[Node]) -> int:
        total = 0
        for n in nodes:
            match n:
                case Loop(kind="forall"):
                    total += of(n.body)
                case Init() | Let(rdims=(_, *_)):
                    total += math.prod(extents.get(d, 1) for d in n.dims)
        return total

    return of(b.body)


def gpu_loops(g: Graph, plan: StagePlan, given: Given | None = None) -> Loops:
    """The automatic loops; folds over products of matrices also stream axes that a CPU holds in one block.

    Rows of dynamic length are streamed: a tile that covers such a row makes no loop, and longer ones are no error.
    """
    loops = choose_loops(g, plan)
    if not plan.inner:
        sizes = g.program.sizes
        whole = (s.axes for d, s in zip(loops.stages, plan.stages, strict=True) if d is None)
        dynamic = not all(is_static(sizes[d]) for axes in whole for d in axes)
        if dynamic or (given is not None and given.stream is not None) or not columns_fit(g, plan):
            return _streamed(g, plan)
        outer = tuple(None if d is None else streamed_axis(g, plan, k) for k, d in enumerate(loops.stages))
        rows = {m: d and next((x for x in outer if x in out_dims(g.by_name[m])), d) for m, d in loops.rows.items()}
        return Loops(outer, rows)
    stages = tuple(
        d if d is not None or g.points(s.axes) <= ONE_TILE else max(s.axes, key=g.extent)
        for d, s in zip(loops.stages, plan.stages, strict=True)
    )
    return replace(loops, stages=stages)


def _streamed(g: Graph, plan: StagePlan) -> Loops:
    """Every stage and every result in tiles of its longest axis, also where all of it would fit."""
    rows: dict[str, str | None] = {}
    for m in plan.group.members:
        if g.escapes(m, plan.group.members):
            local = [d for d in out_dims(g.by_name[m]) if d not in plan.group.parallel]
            rows[m] = max(local, key=g.extent) if local else None
    return Loops(tuple(max(s.axes, key=g.extent) for s in plan.stages), rows)


def segments(g: Graph, plan: StagePlan, units: int, given: Given | None = None) -> int | None:
    """Segments that the axis of a fold is worth being cut into, or is to be; None for one kernel.

    As many as fill the machine. A fold without products inside is cut only if that saves time (`gpu_folds`); folds over
    products (decoding) spend their time on more than reading.
    """
    if not plan.stages:
        return None
    axis = streamed_axis(g, plan, 0)
    if any(axis in s.axes for s in plan.stages[1:]):
        return None
    members = plan.group.members
    if axis is None or any(g.escapes(m, members) and axis in out_dims(g.by_name[m]) for m in members):
        return None
    if given is not None and given.segments is not None:
        return given.segments if given.segments > 1 else None
    if not plan.inner:
        return segments_of_reads(g, plan, axis, units)
    n = _segments_of_products(g, plan, axis, units)
    return n if n > 1 else None


def _segments_of_products(g: Graph, plan: StagePlan, axis: str, units: int) -> int:
    """Segments that fill the machine, of a fold over products."""
    have = max(1, blocks(g, plan.group))
    wide = any(g.extent(d) >= WIDE for m in plan.group.members for d in kept_local(g, plan, m))
    most = g.extent(axis) // LEAST_SEGMENT
    if wide:
        most = max(most, min(g.extent(axis) // LEAST_WIDE_SEGMENT, units // max(1, blocks(g, plan.group, MATRIX_UNIT))))
    n = int(min(units * (1 if wide else BLOCKS_PER_UNIT) // have, most, MOST_SEGMENTS))
    return equal(n, lambda k: g.extent(axis) % (k * ONE_TILE) == 0)


def kept_local(g: Graph, plan: StagePlan, m: str) -> list[str]:
    """Dims over which a block keeps the state of member m."""
    c = g.by_name[m]
    if c.reducer is None or m in plan.inner:
        return []
    return [d for d in out_dims(c) if d not in plan.group.parallel]


def blocks(g: Graph, members: Group, tile: int = ROWS) -> int:
    """Thread blocks that the parallel dims give: rows of products in tiles, heads that share operands packed."""
    shared: dict[str, int] = {}
    rows: set[str] = set()
    common: set[str] = set()
    for m in members.members:
        shared |= dict(divided(g.by_name[m].body))
        p = product_of(g.by_name[m])
        if p is not None and p.loads is not None and p.left != p.right:
            rows |= p.left ^ p.right
            common |= (p.left & p.right) - set(p.rdims)
    n = 1
    packed = all(g.extent(d) < PACKED for d in members.parallel if d in rows - common and d not in shared)
    for d in members.parallel:
        if d in shared and packed:
            n *= max(1, g.extent(d) // shared[d])
        elif d in rows - common:
            n *= -(-g.extent(d) // tile)
        else:
            n *= g.extent(d)
    return n


def split_contractions(p: Program, g: Graph, groups: Sequence[Group], units: int) -> tuple[Program, frozenset[str]]:
    """Products inside folds whose kernels would have too few blocks, in two steps; and the new first steps.

    Law: sum over k = sum over s of sum over k' with k = s K' + k'. The first step is a kernel of its own,
    parallel over s as well, whose float32 partial results the fold sums up (split-k).
    """
    body: list[Compute] = []
    sizes = dict(p.sizes)
    alone: set[str] = set()
    cut = {c: n for x in groups for c, n in _wanted(g, x, units).items()}
    for c in p.body:
        if c.name not in cut:
            body.append(c)
            continue
        (k,) = c.rdims
        outer, inner, part = f"{k}_{c.name}_s", f"{k}_{c.name}_r", f"{c.name}_parts"
        length = int(g.extent(k)) // cut[c.name]
        sizes |= {outer: Const(cut[c.name], DType.I64), inner: Const(length, DType.I64)}
        at = Index(outer) * length + Index(inner)
        body.append(
            Compute(part, (outer, *c.dims), DType.F32, substitute(c.body, {Index(k): at}), "sum", (inner,), loc=c.loc)
        )
        whole = Load(part, tuple(Index(d) for d in (outer, *c.dims)))
        body.append(replace(c, body=whole, rdims=(outer,)))
        alone.add(part)
    return replace(p, body=tuple(body), sizes=sizes), frozenset(alone)


def _wanted(g: Graph, group: Group, units: int) -> dict[str, int]:
    """Product -> steps of its reduced dim."""
    have = blocks(g, group)
    plan = plan_stages(g, with_unit(group))
    if segments(g, plan, units) is not None:
        return {}
    found: dict[str, int] = {}
    for m in plan.inner:
        c = g.by_name[m]
        p = product_of(c)
        if p is None or p.loads is None or len(c.rdims) != 1 or 2 * have >= units or len(group.members) == 1:
            continue
        (k,) = c.rdims
        n = 1
        while have * n < units and g.extent(k) // (2 * n) >= LEAST_STEP and g.extent(k) % (2 * n) == 0:
            n *= 2
        if n > 1 and is_static(g.program.sizes[k]):
            found[m] = n
    return found
