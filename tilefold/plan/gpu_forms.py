"""What a GPU makes of a group: its loops, and the segments that folds are cut into where too few blocks are left.

A GPU needs a few hundred thread blocks. A fold over a long axis with few parallel blocks (decoding:
one query, many keys) is cut into segments with a derived combine kernel (`block.split`); how many
follows from the number of multiprocessors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load, dims_used, loads, substitute
from tilefold.block.build import Loops, choose_loops
from tilefold.block.collapse import collapsed
from tilefold.block.crossing import crossing
from tilefold.block.fuse import FusedKernel, build_kernels, with_unit
from tilefold.block.group import Group
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, exprs_of
from tilefold.block.ir import walk as walk_block
from tilefold.block.parallel import ends_a_chain
from tilefold.block.split import early_maps
from tilefold.block.stages import StagePlan, inner_producers, plan_stages
from tilefold.plan.few_rows import of_few_rows
from tilefold.plan.gpu_folds import columns_fit, equal, segments_of_reads, streamed_axis, whole_columns
from tilefold.plan.hardware import Gpu
from tilefold.plan.windowed import window
from tilefold.tensor.analysis import Graph, is_static, out_dims
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import divided, library_product, product, product_of
from tilefold.tile.pieces import MATRIX_UNIT, power_of_two


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


#: How many times as long as kernels of enough thread blocks one of few may take.
FEW_BLOCKS = 8
#: Values of a row of which fewer are never too many.
LEAST_CROSSING = 8
#: Why a kernel cannot be made, None where it can.
Refuse = Callable[[FusedKernel], str | None]


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of a kernel, and those that its memory or its products take at least. text: characters of its source,
    which say how long it takes to find that out, and to compile."""

    seconds: float
    floor: float
    text: int = 0


#: What a kernel is forecast to take; None where nobody can say.
Predict = Callable[[FusedKernel], Predicted | None]


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


def _once(nodes: Sequence[Node]) -> Iterator[Let]:
    """Reductions that a thread block computes in one step, whole, for what follows: outside of streamed loops."""
    for n in nodes:
        match n:
            case Loop(kind="forall"):
                yield from _once(n.body)
            case Let(rdims=(_, *_)):
                yield n


def read_at_once(b: Block) -> int:
    """Elements of the largest value in a loop of a kernel without matrix products, for one index of parallel dims and
    two of streamed ones, or of a reduction outside of loops, which is of one step and whole; dynamic dims count as
    one."""
    loops = [n for n in walk_block(b.body) if isinstance(n, Loop)]
    streamed, parallel = ({n.dim for n in loops if n.kind == kind} for kind in ("for", "forall"))
    extents = {d: power_of_two(int(e.value)) for d, e in b.sizes.items() if isinstance(e, Const) and e.value}
    once = () if _has_products(b) else _once(b.body)
    whole = [{*n.dims, *n.rdims, *dims_used(n.expr)} - parallel for n in once]
    most = max((math.prod(extents.get(d, 1) for d in dims) for dims in whole), default=1)
    extents |= dict.fromkeys(streamed, 2)
    for n in (x for loop in loops if loop.kind == "for" for x in loop.body if not isinstance(x, Loop)):
        if isinstance(n, Let | Accumulate) and _multiplied(n):
            return 1
        dims = {d for e in exprs_of(n) for d in dims_used(e)} - parallel
        most = max(most, math.prod(extents.get(d, 1) for d in dims))
    return most


def _multiplied(n: Let | Accumulate) -> bool:
    """Whether it is a product of two matrices, each with dims of its own that are kept: sums that a row weights (means
    of positions) are no matrix unit's."""
    kept = tuple(sorted(dims_used(n.expr) - {*n.rdims}))
    found = product(n.reducer, n.expr, kept, n.rdims)
    return found is not None and found.is_matrix()


def _has_products(b: Block) -> bool:
    return any(isinstance(n, Let | Accumulate) and _multiplied(n) for n in walk_block(b.body))


def too_few(b: Block, machine: Gpu) -> str | None:
    """Why a kernel of loops (or reductions outside of them) one after the other, which is not cut into segments, should
    not be one: so few blocks read what it reads that kernels apart, with blocks for the machine, take a fraction of the
    time. Two means over all there is, of what the kernel writes meanwhile, are one thread block's work: 592 us for 8 MB
    on an H100."""
    passes = sum(isinstance(n, Loop) and n.kind == "for" for n in walk_block(b.body))
    passes += 0 if _has_products(b) else sum(1 for _ in _once(b.body))
    if passes < 2:
        return None
    parallel = {n.dim for n in walk_block(b.body) if isinstance(n, Loop) and n.kind == "forall"}
    kinds = {i.name: i.dtype.nbytes for i in b.inputs}
    read = [ld for n in walk_block(b.body) for e in exprs_of(n) for ld in loads(e) if ld.tensor in kinds]
    most_of = {t: max((dims_used(ld) for ld in read if ld.tensor == t), key=len, default=()) for t in kinds}
    shapes = [(kinds[t], tuple(b.sizes[d] for d in used)) for t, used in most_of.items()]  # of a pick, its rows alone
    shapes += [(r.dtype.nbytes, tuple(b.sizes[d] for d in r.dims)) for r in b.results]

    def points(shape: Iterable[Expr]) -> int | None:
        known = [int(e.value) if isinstance(e, Const) else None for e in shape]
        return None if None in known else math.prod(n for n in known if n is not None)

    most, parts = points(b.sizes[d] for d in parallel), [(n, points(shape)) for n, shape in shapes]
    if not most or any(count is None for _, count in parts):  # of no elements, there are no blocks
        return None
    moved = sum(n * count for n, count in parts if count is not None)
    apart = moved / (machine.reached * machine.bandwidth) + machine.second_kernel
    if moved / (min(most, machine.cores) * machine.unit_rate) <= FEW_BLOCKS * apart:
        return None
    return f"{most} thread blocks would read and write {moved} bytes"


def packed(b: Block) -> Block:
    """The block as it is launched on tensors without gaps: axes that lie side by side are one, of which a step has a
    tile (sums over channels, rows and columns of an image: 32,768 elements of 96 x 224, 256 of 96 channels).

    As it is where a step reduces something of each place: of short tiles the reductions take longer than what is read
    (losses of 8 x 21 x 256 x 256 pixels, 16 places a step: 192 us on an H100, 53 in two passes).
    """
    steps = [n for loop in walk_block(b.body) if isinstance(loop, Loop) and loop.kind == "for" for n in loop.body]
    if any(isinstance(n, Let) and n.rdims for n in steps):
        return b
    rank = {**{i.name: len(i.shape) for i in b.inputs}, **{r.name: len(r.dims) for r in b.results}}
    near = {t: frozenset((a, a + 1) for a in range(n - 1)) for t, n in rank.items()}
    return collapsed(b, near)[0]


def multiplied_apart(b: Block) -> int:
    """Elements of the largest product of matrices that no matrix unit takes, with its least rows of parallel dims: of
    matrices for each index of a dim that a thread block holds (heads, where what follows sums over them) each element
    is multiplied by itself. Dynamic dims count as one."""
    loops = [n for n in walk_block(b.body) if isinstance(n, Loop)]
    parallel = {n.dim for n in loops if n.kind == "forall"}
    extents = {d: power_of_two(int(e.value)) for d, e in b.sizes.items() if isinstance(e, Const) and e.value}
    most = 0
    for n in (x for x in walk_block(b.body) if isinstance(x, Let)):
        p = product(n.reducer, n.expr, n.dims, n.rdims)
        if p is None or not p.is_matrix(lambda d: extents.get(d, 1) > 1):
            continue
        each = [d for d in p.batch if d not in parallel and extents.get(d, 1) > 1]
        inside = math.prod(extents.get(d, 1) for d in {*p.dims, *p.rdims} - parallel)
        if each:
            most = max(most, inside * (MATRIX_UNIT if p.of_one_side & parallel else 1))
    return most


def gpu_loops(g: Graph, plan: StagePlan, machine: Gpu, given: Given | None = None) -> Loops:
    """The automatic loops; folds over products of matrices also stream axes that a CPU holds in one block.

    Rows of dynamic length are streamed: a tile that covers such a row makes no loop, and longer ones are no error.
    """
    loops = choose_loops(g, plan)
    if not plan.inner:
        sizes = g.program.sizes
        whole = (s.axes for d, s in zip(loops.stages, plan.stages, strict=True) if d is None)
        dynamic = not all(is_static(sizes[d]) for axes in whole for d in axes)
        asked = given is not None and given.stream is not None
        if dynamic or asked or not columns_fit(g, plan, machine) or not _rows_fit(g, plan, loops, machine):
            loops = _streamed(g, plan)
        else:
            axes = tuple(None if d is None else streamed_axis(g, plan, k, machine) for k, d in enumerate(loops.stages))
            rows = {m: d and next((x for x in axes if x in out_dims(g.by_name[m])), d) for m, d in loops.rows.items()}
            loops = Loops(axes, rows)
        return replace(loops, whole=whole_columns(g, plan, loops))
    stages = tuple(
        d if d is not None or g.points(s.axes) <= machine.one_tile else max(s.axes, key=g.extent)
        for d, s in zip(loops.stages, plan.stages, strict=True)
    )
    return replace(loops, stages=stages)


def _rows_fit(g: Graph, plan: StagePlan, loops: Loops, machine: Gpu) -> bool:
    """Whether a thread block has registers for rows that it keeps: for all that crosses a reduction of them."""
    kept = {d for loop, s in zip(loops.stages, plan.stages, strict=True) if loop is None for d in s.axes}
    longest = max(filter(kept.__contains__, g.program.sizes), key=g.extent, default=None)
    if longest is None or g.points(kept) * LEAST_CROSSING <= machine.held_columns:
        return True
    (made,) = build_kernels(g, plan, loops, None)
    local = {d: power_of_two(int(g.extent(d))) for d in g.program.sizes if d not in plan.group.parallel}
    return crossing(made.block, longest, local) <= machine.held_columns


def _streamed(g: Graph, plan: StagePlan) -> Loops:
    """Every stage and every result in tiles of its longest axis, also where all of it would fit."""
    rows: dict[str, str | None] = {}
    for m in plan.group.members:
        if g.escapes(m, plan.group.members):
            local = [d for d in out_dims(g.by_name[m]) if d not in plan.group.parallel]
            rows[m] = max(local, key=g.extent) if local else None
    return Loops(tuple(max(s.axes, key=g.extent) for s in plan.stages), rows)


def segments(g: Graph, plan: StagePlan, machine: Gpu, given: Given | None = None) -> int | None:
    """Segments that the axis of a fold is worth being cut into, or is to be; None for one kernel.

    As many as fill the machine. A fold without matrix products inside (the mean of a loss that is itself a fold over
    classes) is cut only if that saves time (`gpu_folds`); folds over products (decoding) spend it on more than reading.
    """
    if not plan.stages:
        return None
    axis = streamed_axis(g, plan, 0, machine)
    if any(axis in s.axes for s in plan.stages[1:]):
        return None
    members = plan.group.members
    if axis is None:
        return None
    early = early_maps(g, plan, axis)
    if any(g.escapes(m, members) and m not in early and axis in out_dims(g.by_name[m]) for m in members):
        return None
    if early and gpu_loops(g, plan, machine, given).stages[0] is None:  # rows that a block keeps are not cut
        return None
    if given is not None and given.segments is not None:
        return given.segments if given.segments > 1 else None
    if not any(_multiplies(g, m) for m in plan.inner):
        n = _segments_of_contraction(g, plan, axis, machine)
        return segments_of_reads(g, plan, axis, machine) if n is None else n if n > 1 else None
    n = _segments_of_products(g, plan, axis, machine)
    if n > 1 and (seen := window(build_kernels(g, plan, gpu_loops(g, plan, machine), None), axis, machine.rows)):
        n = _segments_of_window(n, seen, g.extent(axis), machine)
    return n if n > 1 else None


def _multiplies(g: Graph, m: str) -> bool:
    """Whether a member is a product that has tiles of its own: squares have not, nor sums of a few numbers."""
    p = product_of(g.by_name[m])
    return p is not None and p.left != p.right and not p.is_small(g.extent)


def _segments_of_products(g: Graph, plan: StagePlan, axis: str, machine: Gpu) -> int:
    """Segments that fill the machine, of a fold over products: of the places of all its axes (rows of an image)."""
    units, have = machine.cores, max(1, blocks(g, plan.group, machine))
    extent, axes = g.extent(axis), plan.stages[0].axes
    places = g.points(axes)
    wide = any(
        g.extent(d) >= machine.wide for m in plan.group.members for d in kept_local(g, plan.group, plan.inner, m)
    )
    most = min(extent, places // machine.least_segment)
    if wide:
        most = max(
            most,
            min(
                min(extent, places // machine.least_wide_segment),
                units // max(1, blocks(g, plan.group, machine, MATRIX_UNIT)),
            ),
        )
    cap = max(machine.most_segments, extent // machine.long_segment)
    n = int(min(units * (1 if wide else machine.blocks_a_unit) // have, most, cap))
    return equal(n, lambda k: extent % (k * machine.one_tile) == 0 or (len(axes) > 1 and extent % k == 0))


def _segments_of_window(n: int, seen: int, extent: int, machine: Gpu) -> int:
    """Of an axis, so that what a block looks at is cut into as many as its rows would want of all of it."""
    n = min(n, seen // machine.least_segment)
    most = extent // machine.least_segment
    return equal(max(1, min(n * extent // seen, most)), lambda k: extent % (k * machine.one_tile) == 0) if n > 1 else 1


def _segments_of_contraction(g: Graph, plan: StagePlan, axis: str, machine: Gpu) -> int | None:
    """Segments of what one product of matrices contracts, of tiles too few to fill the machine; None if there is no
    such product. (The library's are cut by the library: this is one whose operand is computed, 8-bit weights.)"""
    found = [m for m in plan.group.members if axis in g.by_name[m].rdims]
    p = product_of(g.by_name[found[0]]) if len(found) == 1 and len(plan.stages) == 1 else None
    few = p is not None and of_few_rows(g, g.by_name[found[0]], machine)
    if (
        p is None
        or (library_product(g.by_name[found[0]], g.program.sizes) is not None and not few)
        or p.left == p.right
        or not p.is_matrix(lambda d: g.extent(d) > 1)
        or not is_static(g.program.sizes[axis])
    ):
        return None
    tiles = math.prod(-(-g.extent(d) // machine.rows) for d in (*p.rows, *p.cols)) * g.points(p.batch)
    extent, whole = g.extent(axis), g.points(g.by_name[found[0]].rdims)
    n = int(min(machine.cores * machine.blocks_a_unit // max(1, tiles), extent, whole // machine.least_step))
    tile = machine.one_tile if whole == extent else 1
    n = equal(max(1, n), lambda k: extent % (k * tile) == 0)
    read = sum(g.program.dtype_of(t).nbytes for t in {ld.tensor for ld in loads(g.by_name[found[0]].body)})
    seconds = whole * machine.rows * read / machine.stream_rate
    return n if seconds * (1 - 1 / n) > machine.second_kernel else 1


def kept_local(g: Graph, group: Group, inner: frozenset[str], m: str) -> list[str]:
    """Dims over which a block keeps the state of member m. inner: reductions that are no stages (`block.stages`)."""
    c = g.by_name[m]
    if c.reducer is None or m in inner:
        return []
    return [d for d in out_dims(c) if d not in group.parallel]


def blocks(g: Graph, members: Group, machine: Gpu, tile: int | None = None) -> int:
    """Thread blocks that the parallel dims give: rows of products in tiles, those of several dims
    (heads that share keys, with their rows) together; heads that share operands packed.

    tile: rows of a product that share a block, if others than the machine's.
    """
    shared: dict[str, int] = {}
    sides: list[frozenset[str]] = []
    common: set[str] = set()
    for m in members.members:
        shared |= dict(divided(g.by_name[m].body))
        p = product_of(g.by_name[m])
        if p is not None and p.loads is not None and p.left != p.right:
            sides += [p.left - p.right, p.right - p.left]
            common |= (p.left & p.right) - set(p.rdims)
    n, rows = 1, set[str]().union(*sides) - common
    packed = all(g.extent(d) < machine.packed for d in members.parallel if d in rows and d not in shared)
    tiled = dict[int, int]()
    for d in members.parallel:
        if d in shared and packed:
            n *= max(1, g.extent(d) // shared[d])
        elif d in rows:
            side = next(k for k, side in enumerate(sides) if d in side)
            tiled[side] = tiled.get(side, 1) * g.extent(d)
        else:
            n *= g.extent(d)
    return n * math.prod(-(-m // (tile or machine.rows)) for m in tiled.values())


def split_contractions(p: Program, g: Graph, groups: Sequence[Group], machine: Gpu) -> tuple[Program, frozenset[str]]:
    """Products inside folds whose kernels would have too few blocks, in two steps; and the new first steps.

    Law: sum over k = sum over s of sum over k' with k = s K' + k'. The first step is a kernel of its own,
    parallel over s as well, whose float32 partial results the fold sums up (split-k).
    """
    body: list[Compute] = []
    sizes = dict(p.sizes)
    alone: set[str] = set()
    cut = {c: n for x in groups for c, n in _wanted(g, x, machine).items()}
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


def _wanted(g: Graph, group: Group, machine: Gpu) -> dict[str, int]:
    """Product -> steps of its reduced dim."""
    units, have = machine.cores, blocks(g, group, machine)
    if len(group.members) == 1 or 2 * have >= units:
        return {}
    found: dict[str, int] = {}
    for m in filter(inner_producers(g, with_unit(group)).__contains__, group.members):
        c = g.by_name[m]
        p = product_of(c)
        if p is None or p.loads is None or len(c.rdims) != 1:
            continue
        if ends_a_chain(g, m, group.members):
            continue  # apart, it would read from memory what another product streams into it
        (k,) = c.rdims
        n = 1
        while have * n < units and g.extent(k) // (2 * n) >= machine.least_step and g.extent(k) % (2 * n) == 0:
            n *= 2
        if n > 1 and is_static(g.program.sizes[k]):
            found[m] = n
    cut = found and segments(g, plan_stages(g, with_unit(group)), machine) is not None
    return {} if cut else found
