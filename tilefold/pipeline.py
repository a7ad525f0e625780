"""The compiler from a tensor program to something that runs, as a list of named steps.

products   which products the library computes, as what calls   plan.targets, plan.library, plan.scaled
plan       which operators share a kernel, and how              plan.planner (CPU), plan.gpu (GPUs); plan.targets
fuse       tensor program -> block programs                     block.fuse
steps      block programs -> kernels, products -> calls         runtime.steps, runtime.library
load       kernels        -> code                               runtime.executor (CPU; GPUs when first called)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal

import torch

from tilefold.algebra.threads import one_thread
from tilefold.block.added import added_block
from tilefold.block.fuse import Fused, FusedKernel
from tilefold.block.group import ANY, Limits
from tilefold.errors import PlanError
from tilefold.log import at_step
from tilefold.plan.aligned import aligned, slowed
from tilefold.plan.aligned_kernels import aligned_kernels
from tilefold.plan.attention import AttentionCall, statements
from tilefold.plan.attention_orders import in_order
from tilefold.plan.converted import better_stored, converted_once
from tilefold.plan.few_rows import of_few_rows
from tilefold.plan.gpu import Decisions
from tilefold.plan.gpu_forms import Given
from tilefold.plan.greedy import fuse
from tilefold.plan.hardware import Gpu, gpu_here
from tilefold.plan.keyed import with_sums_added
from tilefold.plan.library import (
    ConvolutionCall,
    GradientCall,
    LibraryCall,
    bias_apart,
    library_calls,
    library_gradients,
)
from tilefold.plan.machine import this_machine
from tilefold.plan.memory_orders import library_copies
from tilefold.plan.one_contraction import contracted_together
from tilefold.plan.planner import plan_program
from tilefold.plan.scaled import ScaledProduct, scaled_products
from tilefold.plan.sequence import Run, of_least_memory
from tilefold.plan.short_products import of_few_channels, of_few_sums
from tilefold.plan.targets.cpu import CpuTarget
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.plan.torn_streams import seconds, torn
from tilefold.runtime.calls import library_step
from tilefold.runtime.fused_programs import (
    Part,
    Settled,
    fused_for_gpu,
    products_for_gpu,
    settled_for_cpu,
    turned_for_gpu,
)
from tilefold.runtime.gpu_program import GpuProgram
from tilefold.runtime.library import ScaledStep
from tilefold.runtime.program import CompiledProgram
from tilefold.runtime.spans import titles
from tilefold.runtime.step import Step
from tilefold.runtime.steps import AddedStep, GpuStep, KernelStep, load_all, predictor, refuser
from tilefold.runtime.zeros import zeroed_together
from tilefold.tensor import streams
from tilefold.tensor.analysis import Graph
from tilefold.tensor.distribute import distributed
from tilefold.tensor.hulls import bounded
from tilefold.tensor.ir import Program
from tilefold.tensor.operands import multiplied_alike, plain_operands, stored_operands, wider_operand
from tilefold.tensor.picks import picked_with_rows
from tilefold.tensor.product import product_of
from tilefold.tensor.unrounded import unrounded

log = logging.getLogger("tilefold")

#: "fused": one kernel wherever it is legal. "fast": what the planner predicts to be fastest, products in the library
#: where they are faster there. "greedy": the same libraries, all else fused wherever it is legal (for comparison).
Goal = Literal["fused", "fast", "greedy"]
#: Parallel blocks that fusion preserves on machines with many cores.
MOST_WORKERS = 16


def compile_program(
    p: Program,
    *,
    goal: Goal = "fast",
    load: bool = True,
    device: str = "cpu",
    given: Given | None = None,
    search: bool = False,
) -> CompiledProgram:
    """Compile a tensor program (normalised: `tensor.passes`). TilefoldError where that is impossible.

    load: also compile the kernels' code now (else when they first run). device: type of the device that the
    tensors are on; on "cuda", kernels are always compiled when a shape first needs them. "interpreter": the GPU's
    kernels in Triton's interpreter, on CPU tensors (tests). given: what studies decide for the GPU's kernels. search:
    groups for a GPU by predicted time where that is less (see `GpuTarget`).
    """
    at_step("planning")
    if device != "cpu":
        with one_thread():
            return _for_gpu(p, goal, interpreted=device == "interpreter", given=given, search=search)
    compiled = _for_cpu(p, goal)
    if load:
        at_step("compiling kernels")
        load_all([s for s in compiled.steps if isinstance(s, KernelStep)])
    return compiled


def _for_cpu(p: Program, goal: Goal) -> CompiledProgram:
    p, target = unrounded(p), this_cpu()

    def settle(p: Program) -> Settled:
        return (_planned(p, target) if goal == "fast" else None) or _greedy(p, goal, target)

    settled = settled_for_cpu(p, (goal, repr(target)), settle)
    fused, steps = settled.fused, list[Step]()
    g = Graph.of(fused.program)
    for part in settled.parts:
        if part.kernel is None:
            steps += _library_step(g, part.members)
        else:
            tiles = None if part.tiles is None else dict(part.tiles)
            steps.append(KernelStep(fused.kernels[part.kernel], tiles, part.order))
    return CompiledProgram(fused.program, fused, tuple(_in_order(g, steps)), settled.planned)


def _planned(p: Program, target: CpuTarget) -> Settled | None:
    """As the planner has it; None where the program is too large for the search."""
    try:
        plan = plan_program(p, target)
    except PlanError as err:
        log.info("%s is grouped greedily: %s", p.name, err.message)
        return None
    fused = plan.fused()
    parts, number = list[Part](), 0
    for k in plan.kernels:
        if k.snapshot.form is None:
            parts.append(Part(k.members))
        else:
            shapes = enumerate(k.snapshot.shapes, number)
            parts += [Part(k.members, n, tuple(s.tiles), tuple(s.order)) for n, s in shapes]
        number += len(k.kernels)
    return Settled(fused, tuple(parts), planned=True)


def _greedy(p: Program, goal: Goal, target: CpuTarget) -> Settled:
    p, _ = streams.apart(p, target.room)
    p = bounded(p)
    p, calls = library_calls(p, () if goal == "fused" else target.products(p) - streams.belongs(p), copied=True)
    fused = fuse(p, frozenset(chain.from_iterable(calls)), target.limits, calls=calls)
    parts, g = [], Graph.of(fused.program)
    for number, k in enumerate(fused.kernels):
        in_library = bool(_alone_in_library(g, k, calls))
        parts.append(Part(k.plan.group.members, None if in_library else number))
    return Settled(fused, tuple(parts), planned=False)


#: What a library computes.
Called = LibraryCall | ConvolutionCall | GradientCall | AttentionCall


@dataclass(frozen=True, slots=True)
class GpuKernels:
    """What runs on a GPU: the fused program, which of its statements are calls of libraries, which are sums that
    kernels add to in any order, and which are copies of operands with zeros behind their rows."""

    fused: Fused
    calls: Mapping[tuple[str, ...], Called]
    scaled: Mapping[tuple[str, ...], ScaledProduct]
    added: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()

    @property
    def every_call(self) -> tuple[tuple[str, ...], ...]:
        """The statements of each call, or of what is a kernel like one."""
        return (*self.scaled, *self.calls, *((x,) for x in sorted(self.added | self.whole)))


def gpu_kernels(p: Program, target: GpuTarget, goal: Goal = "fast", *, scale: bool = True) -> GpuKernels:
    """Groups and library calls of a normalised program. scale: products of 8-bit floats take their scales along.

    A product that was expected in a kernel with a reduction, and ended up alone, is planned again as the library's
    where that would convert or copy an operand, or move it by elements: what it reads is then made so that it does
    not."""
    pays: streams.Pays = target.streams
    decisions = Decisions()
    made, stored = _gpu_kernels(p, target, goal, scale, pays, decisions)
    if stored:
        fewer: streams.Pays = lambda g, c: c.name not in stored and target.streams(g, c)  # noqa: E731
        other, _ = _gpu_kernels(p, target, goal, scale, fewer, decisions)
        ways = (made, pays), (other, fewer)
        made, pays = min(ways, key=lambda x: seconds(x[0].fused, target, x[0].every_call))
    alone = _left_alone(made, target) if goal == "fast" else frozenset()
    return _gpu_kernels(p, target, goal, scale, pays, decisions, alone)[0] if alone else made


def _left_alone(made: GpuKernels, target: GpuTarget) -> frozenset[str]:
    """Products that are the library's because nothing else is in their group, of which it converts or copies an
    operand, or takes long for ragged rows."""
    g, called = Graph.of(made.fused.program), {*made.every_call}
    groups = {k.plan.group.members for k in made.fused.kernels} - called
    alone = [g.by_name[members[0]] for members in groups if _is_alone(g, members, target.machine)]
    p, machine = g.program, target.machine
    found = [c.name for c in alone if wider_operand(p, c) or library_copies(p, c) or slowed(p, c, machine)]
    for c in alone if target.library else ():
        own = target.predicted([k for k in made.fused.kernels if k.plan.group.members == (c.name,)])
        if own is not None and better_stored(g, c, machine, own.seconds):
            found.append(c.name)
    return frozenset(found)


def _gpu_kernels(
    p: Program,
    target: GpuTarget,
    goal: Goal,
    scale: bool,
    pays: streams.Pays,
    decisions: Decisions,
    called: frozenset[str] = frozenset(),
) -> tuple[GpuKernels, frozenset[str]]:
    """And products that were to stream, and are in memory. pays: which do. decisions: of all plans of the program.
    called: products that the library computes whatever else."""
    p, added = with_sums_added(p, target.machine)
    p = contracted_together(p, target.machine) if goal == "fast" and target.library else p
    p = distributed(stored_operands(target.written_out(plain_operands(p))))
    p = converted_once(p, target.machine, called) if goal == "fast" and target.library else p
    p, tails = target.with_tails(p) if goal == "fast" else (p, frozenset[str]())
    scaled: dict[tuple[str, ...], ScaledProduct] = {
        (x.product, x.out): x for x in (scaled_products(p) if scale else ())
    }
    before = picked_with_rows(p) if goal == "fast" else p
    p, copies = streams.apart(before, pays=pays if goal == "fast" else None)
    p = bounded(p)
    attentions = target.attentions(p) if goal == "fast" else ()
    products = products_for_gpu(p, target) | tails if goal == "fast" else frozenset()
    products = (products - frozenset().union(*copies)) | (called & {c.name for c in p.body})
    gradients = products & library_gradients(p)
    rest = products - {*chain.from_iterable(scaled)} - statements(attentions) - gradients
    if goal == "fast":
        p, attentions, given = in_order(p, attentions, rest)
        apart = {*chain.from_iterable(scaled), *statements(attentions), *gradients, *tails}
        p, rest = turned_for_gpu(p, rest, target.machine, apart, given)
    p, products = aligned(multiplied_alike(p, rest), rest, target.machine)
    products |= gradients
    whole = frozenset[str]()
    if goal == "fast" and target.library:
        called = products | tails | {*chain.from_iterable(scaled)} | statements(attentions) | added
        sums = frozenset(c.name for c in p.body if c.reducer == "sum") - called - frozenset().union(*copies)
        p, whole = aligned_kernels(p, sums, called, target.machine)
    p, products_called = library_calls(
        p,
        products,
        bare=partial(bias_apart, cores=target.machine.cores),
        tails=tails,
    )
    p = unrounded(p, {members[0] for members in products_called if len(members) == 1})
    calls: dict[tuple[str, ...], Called] = {**products_called, **{x.members: x for x in attentions}}
    alone = (*scaled, *calls, *((x,) for x in sorted(added | whole)))
    fused = fused_for_gpu(p, target, calls=alone, decisions=decisions)
    stored = torn(before, copies, fused, pays) if goal == "fast" else frozenset[str]()
    return GpuKernels(fused, calls, scaled, added, whole), stored


def _for_gpu(p: Program, goal: Goal, *, interpreted: bool, given: Given | None, search: bool) -> CompiledProgram:
    refuse, rendered = refuser(given, interpreted=interpreted)
    machine = gpu_here()
    predict = predictor(machine) if goal == "fast" and given is None and not interpreted else None
    target = GpuTarget(machine, given, refuse, predict, search=search)
    made = gpu_kernels(p, target, goal, scale=not interpreted)
    fused, calls, scaled = made.fused, made.calls, made.scaled
    steps: list[Step] = []
    called: set[tuple[str, ...]] = set()  # as kernels of ours their statements might be several (a fold in segments)
    g = Graph.of(fused.program)
    for k in fused.kernels:
        members = k.plan.group.members
        if members in called:
            continue
        if members in scaled:
            found: list[Step] = [ScaledStep(scaled[members], fused.program)]
        elif members[0] in made.added:
            block = added_block(fused.program, g.by_name[members[0]])
            found = [AddedStep(FusedKernel(block, k.plan), given, interpreted=interpreted)]
        else:
            found = _alone_in_library(g, k, calls, gpu=target.machine)
        called |= {members} if found else set()
        steps += found or [GpuStep(k, given, interpreted=interpreted)]
    del rendered  # kernels that were looked at and not taken
    steps = zeroed_together(_in_order(g, steps), fused.program.outputs)
    return CompiledProgram(fused.program, fused, tuple(steps), whole=_whole(fused.program, steps))


def _alone_in_library(
    g: Graph, k: FusedKernel, calls: Mapping[tuple[str, ...], Called], *, gpu: Gpu | None = None
) -> list[Step]:
    """The step of a library call, or of a product that ended up alone, which then is one too; none of all else.

    Dot products of rows stay kernels: the library's is a matrix product with one row and one column, which sums 33
    million products with 100 times the error of a tree of sums. So do a GPU's batches of vectors times matrices, whose
    elements are used once: the library takes 18 us for 1024 x 8 times 8 x 1024 of 16 bits each on an H200, which are 19
    MB.
    """
    members = k.plan.group.members
    return _library_step(g, members) if members in calls or _is_alone(g, members, gpu) else []


def _is_alone(g: Graph, members: Sequence[str], gpu: Gpu | None) -> bool:
    """Whether statements are a product that ended up alone, and is the library's."""
    c = g.by_name[members[0]]
    alone = product_of(c) if len(members) == 1 else None
    if alone is None or alone.left == alone.right:
        return False
    vectors = alone.batch and not alone.shared and not alone.is_matrix(lambda d: g.extent(d) > 1)
    return gpu is None or not (vectors or of_few_rows(g, c, gpu) or of_few_channels(g, c) or of_few_sums(g, c))


def _library_step(g: Graph, members: Sequence[str]) -> list[Step]:
    found = library_step(g, members)
    return [] if found is None else [found]


def _in_order(g: Graph, steps: Sequence[Step]) -> list[Step]:
    """The steps as they run. What is none of the program's, as parts of a fold in segments, is small."""
    runs = [Run(s, s.reads, tuple(n for n, _, _ in s.results)) for s in steps]
    named = {n for r in runs for n in (*r.reads, *r.makes)} & g.program.names
    return [r.of for r in of_least_memory(runs, {n: int(g.nbytes([n])) for n in named}, g.program.outputs)]


def _whole(p: Program, steps: Sequence[Step]) -> GpuProgram | None:
    """The steps as one call, where all are kernels."""
    kernels = [s for s in steps if isinstance(s, GpuStep) and not isinstance(s, AddedStep)]
    if len(kernels) != len(steps) or not set(p.outputs) <= {name for s in kernels for name, _, _ in s.results}:
        return None
    return GpuProgram(p.outputs, [s.launch() for s in kernels], titles(p, kernels))


def this_cpu() -> CpuTarget:
    """The machine we are on: kernels are left blocks for its threads."""
    return CpuTarget(this_machine(), Limits(workers=max(ANY.workers, min(MOST_WORKERS, torch.get_num_threads()))))
