"""From groups of a tensor program to block programs: stage, build, tidy. Who groups is the planner's (`plan`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, tensors_read
from tilefold.block.bounds import bound_loops
from tilefold.block.build import Loops, build_nest, choose_loops
from tilefold.block.group import Group, Grouping
from tilefold.block.ir import Block, Result, exprs_of, walk
from tilefold.block.kept import settled
from tilefold.block.split import SEGMENTS, split, worth_splitting
from tilefold.block.stages import StagePlan, plan_stages
from tilefold.block.tidy import tidy
from tilefold.block.verify import verify
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Input, Program
from tilefold.tensor.reduction_laws import align_reductions

#: A dim of extent 1 that kernels without a parallel dim are "parallel" over.
UNIT = "unit"


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """One kernel: its block program (alone), and the stages with their Folds and rejections."""

    block: Block
    plan: StagePlan


@dataclass(frozen=True, slots=True)
class Fused:
    """The program as it was grouped (after `reduction_laws`), and its kernels in execution order."""

    program: Program
    kernels: tuple[FusedKernel, ...]
    grouping: Grouping


def prepare(p: Program, apart: frozenset[str]) -> Program:
    """The program as it is grouped: reductions aligned, and the dim `UNIT`."""
    return align_reductions(replace(p, sizes={**p.sizes, UNIT: Const(1, DType.I64)}), apart)


def fuse_group(g: Graph, members: Group) -> tuple[FusedKernel, ...]:
    """The block program of one group: one kernel, or a split fold and its combine kernel.

    Inputs of a kernel are program inputs and results of earlier kernels.
    """
    plan = plan_stages(g, with_unit(members))
    return build_kernels(g, plan, choose_loops(g, plan), SEGMENTS if worth_splitting(g, plan) else None)


def with_unit(members: Group) -> Group:
    """A group without parallel dims is parallel over `UNIT`."""
    return members if members.parallel else replace(members, parallel=(UNIT,))


def build_kernels(g: Graph, plan: StagePlan, loops: Loops, segments: int | None) -> tuple[FusedKernel, ...]:
    """The kernel of a plan or, with `segments`, the two kernels of its split fold."""
    p, members = g.program, plan.group
    sizes: dict[str, Expr] = dict(p.sizes)
    written = [g.by_name[m] for m in members.members if g.escapes(m, members.members)]
    results = tuple(Result(r, c.dims, c.dtype if r == c.name else DType.I64) for c in written for r in c.results)
    inputs = _inputs(g, members)
    name = members.members[-1]
    if segments is not None:
        nests = split(g, plan, loops, segments)
        sizes |= nests.sizes
        parts = tuple(Input(r.name, r.dtype, tuple(sizes[d] for d in r.dims)) for r in nests.parts)
        own = (*nests.parts, *(r for r in results if r.name in nests.early))
        rest = tuple(r for r in results if r.name not in nests.early)
        first = Block(f"{name}_partial", p.syms, sizes, inputs, own, _names(own), nests.partial)
        second = Block(name, p.syms, sizes, (*inputs, *parts), rest, _names(rest), nests.combine)
        return FusedKernel(polished(first), plan), FusedKernel(polished(second), plan)
    return (
        FusedKernel(
            polished(Block(name, p.syms, sizes, inputs, results, _names(results), build_nest(g, plan, loops))), plan
        ),
    )


def polished(b: Block) -> Block:
    """Tidy, settle what products keep, narrow the loops, and drop inputs that nothing reads."""
    done = bound_loops(settled(tidy(b)))
    read = {t for n in walk(done.body) for e in exprs_of(n) for t in tensors_read(e)}
    return verify(replace(done, inputs=tuple(i for i in done.inputs if i.name in read)))


def _names(results: tuple[Result, ...]) -> tuple[str, ...]:
    return tuple(r.name for r in results)


def _inputs(g: Graph, members: Group) -> tuple[Input, ...]:
    """Tensors the group reads: program inputs and results of other groups, in program order."""
    p = g.program
    mine = {r for m in members.members for r in g.by_name[m].results}
    read = {t for m in members.members for t in tensors_read(g.by_name[m].body)} - mine
    found = [i for i in p.inputs if i.name in read]
    found += [Input(r, p.dtype_of(r), p.shape_of(r)) for r in g.results if r in read]
    return tuple(found)
