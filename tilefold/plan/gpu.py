"""Kernels for a GPU: the same groups and Folds as on a CPU, cut into segments where too few blocks are left.

A GPU needs a few hundred thread blocks. A fold over a long axis with few parallel blocks (decoding:
one query, many keys) is cut into segments with a derived combine kernel (`block.split`); how many
follows from the number of multiprocessors.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Index, walk
from tilefold.block.build import choose_loops, loop_dim
from tilefold.block.fuse import UNIT, Fused, FusedKernel, build_kernels, with_unit
from tilefold.block.group import Group, group
from tilefold.block.stages import StagePlan, plan_stages
from tilefold.plan.library import is_library_product
from tilefold.tensor.analysis import Graph, out_dims
from tilefold.tensor.ir import Program
from tilefold.tensor.reduction_laws import align_reductions

#: Thread blocks wanted for each multiprocessor before a fold is left whole.
BLOCKS_PER_UNIT = 2
#: Elements of the axis that a segment has at least.
LEAST_SEGMENT = 256
MOST_SEGMENTS = 64
#: Rows of a matrix product that share a thread block.
ROWS = 64


def fuse_for_gpu(p: Program, apart: frozenset[str] = frozenset(), *, units: int = 132) -> Fused:
    """Fuse `p` for a device of `units` multiprocessors; members of `apart` become kernels of their own."""
    p = align_reductions(replace(p, sizes={**p.sizes, UNIT: Const(1, DType.I64)}))
    g = Graph.of(p)
    grouping = group(p, apart, 1)
    kernels: list[FusedKernel] = []
    for members in grouping.groups:
        plan = plan_stages(g, with_unit(members))
        kernels += build_kernels(g, plan, choose_loops(g, plan), segments(g, plan, units))
    return Fused(p, tuple(kernels), grouping)


def segments(g: Graph, plan: StagePlan, units: int) -> int | None:
    """Segments that the axis of a fold is worth being cut into; None for one kernel."""
    if len(plan.stages) != 1 or plan.stages[0].fold is None:
        return None
    axis = loop_dim(g, plan.stages[0])
    members = plan.group.members
    if axis is None or any(g.escapes(m, members) and axis in out_dims(g.by_name[m]) for m in members):
        return None
    wanted = units * BLOCKS_PER_UNIT // max(1, blocks(g, plan.group))
    most = g.extent(axis) // LEAST_SEGMENT
    n = min(wanted, most, MOST_SEGMENTS)
    return n if n > 1 else None


def blocks(g: Graph, members: Group) -> int:
    """Thread blocks that the parallel dims give: rows in tiles, heads that share operands packed."""
    shared: dict[str, int] = {}
    for m in members.members:
        for x in walk(g.by_name[m].body):
            match x:
                case Call("floordiv", (Index(d), Const(c, DType.I64))):
                    shared[d] = int(c)
    product = any(g.by_name[m].reducer == "sum" and _is_product(g, m) for m in members.members)
    n = 1
    rows = [d for d in members.parallel if d not in shared and product and g.extent(d) >= ROWS]
    for d in members.parallel:
        if d in shared:
            n *= max(1, g.extent(d) // shared[d])
        elif rows and d == rows[-1]:
            n *= -(-g.extent(d) // ROWS)
        else:
            n *= g.extent(d)
    return n


def _is_product(g: Graph, m: str) -> bool:
    body = g.by_name[m].body
    return isinstance(body, Call) and body.op == "mul"


def gpu_library_products(p: Program) -> frozenset[str]:
    """Products that the library computes: those whose result no reduction of the program runs over.

    A product in front of a reduction over its result (scores, logits) is worth fusing: its result is
    what fusion keeps out of memory. Any other gains an epilogue at most, and the library's main loop is faster.
    """
    g = Graph.of(p)
    return frozenset(c.name for c in p.body if is_library_product(c) and not _inside_fold(g, c.name))


def _inside_fold(g: Graph, name: str) -> bool:
    """Whether a later reduction runs over the product's result, or the product reduces such a result."""
    c = g.by_name[name]
    after, seen = list(g.consumers[name]), set()
    while after:
        u = after.pop()
        if u in seen:
            continue
        seen.add(u)
        d = g.by_name[u]
        if d.reducer is not None and set(d.rdims) & set(out_dims(c)):
            return True
        if d.reducer is None:
            after += g.consumers[u]
    before, seen = list(g.producers[name]), set()
    while before:
        u = before.pop()
        if u in seen:
            continue
        seen.add(u)
        d = g.by_name[u]
        if d.reducer is None:
            before += g.producers[u]
        elif set(c.rdims) & set(d.rdims) or (is_library_product(d) and set(c.rdims) & set(out_dims(d))):
            return True
    return False
