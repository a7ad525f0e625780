"""From a tensor program to its fused block program: group, stage, build, tidy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, tensors_read
from tilefold.block.build import build_nest
from tilefold.block.group import Group, Grouping, group
from tilefold.block.ir import Block, Result
from tilefold.block.stages import StagePlan, plan_stages
from tilefold.block.tidy import tidy
from tilefold.block.verify import verify
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Input, Program

#: A dim of extent 1 that kernels without a parallel dim are "parallel" over.
UNIT = "unit"


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """One kernel: its block program (alone), and the stages with their Folds and rejections."""

    block: Block
    plan: StagePlan


@dataclass(frozen=True, slots=True)
class Fused:
    """Kernels in execution order; `apart` members are left to a library (a group of one each)."""

    kernels: tuple[FusedKernel, ...]
    grouping: Grouping


def fuse(p: Program, apart: frozenset[str] = frozenset()) -> Fused:
    """Fuse `p`. Members of `apart` become kernels of their own that the caller may replace."""
    g = Graph.of(p)
    grouping = group(p, apart)
    kernels = tuple(fuse_group(g, x) for x in grouping.groups)
    return Fused(kernels, grouping)


def fuse_group(g: Graph, members: Group) -> FusedKernel:
    """The block program of one group. Its inputs are program inputs and results of other groups."""
    p = g.program
    sizes: dict[str, Expr] = dict(p.sizes)
    if not members.parallel:
        sizes[UNIT] = Const(1, DType.I64)
        members = replace(members, parallel=(UNIT,))
    plan = plan_stages(g, members)
    nest = build_nest(g, plan)
    written = [g.by_name[m] for m in members.members if g.escapes(m, members.members)]
    results = tuple(Result(r, c.dims, c.dtype if r == c.name else DType.I64) for c in written for r in c.results)
    names = tuple(r.name for r in results)
    block = Block(members.members[-1], p.syms, sizes, _inputs(g, members), results, names, nest)
    return FusedKernel(verify(tidy(verify(block))), plan)


def _inputs(g: Graph, members: Group) -> tuple[Input, ...]:
    """Tensors the group reads: program inputs and results of other groups, in program order."""
    p = g.program
    mine = {r for m in members.members for r in g.by_name[m].results}
    read = {t for m in members.members for t in tensors_read(g.by_name[m].body)} - mine
    found = [i for i in p.inputs if i.name in read]
    for c in p.body:
        found += [Input(r, p.dtype_of(r), p.shape_of(r)) for r in c.results if r in read]
    return tuple(found)
