"""GPUs: how many blocks a group leaves decides between one kernel and a split fold; products may stay apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilefold.algebra.dtypes import DType
from tilefold.block.flat import flattened
from tilefold.block.fuse import FusedKernel, build_kernels, with_unit
from tilefold.block.group import Group, Limits, Operands
from tilefold.block.ir import Block, Let, Loop, walk
from tilefold.block.stages import plan_stages
from tilefold.plan.attention import AttentionCall, library_attentions
from tilefold.plan.attention_orders import copied_bytes
from tilefold.plan.columns import by_columns
from tilefold.plan.forms import Form, separate
from tilefold.plan.gpu_cost import gpu_shape
from tilefold.plan.gpu_folds import LEAST_STEP
from tilefold.plan.gpu_forms import (
    Given,
    Predict,
    Predicted,
    Refuse,
    gpu_loops,
    held,
    multiplied_apart,
    packed,
    read_at_once,
    segments,
    too_few,
)
from tilefold.plan.gpu_library import gpu_library_products, gpu_tail, kept_for_nothing
from tilefold.plan.gpu_streams import streams_pay
from tilefold.plan.gpu_taps import parts_pay
from tilefold.plan.gpu_windows import gpu_taps, gpu_windows
from tilefold.plan.hardware import H100, Gpu
from tilefold.plan.near_sums import near_sums_written_out
from tilefold.plan.search import Shape
from tilefold.tensor.analysis import Graph
from tilefold.tensor.channels_last import taps_in_front
from tilefold.tensor.convolution_tails import tails_in_calls
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.sliding import sliding_by_parts
from tilefold.tensor.stored_maps import read_as_stored
from tilefold.tensor.taps import taps_apart
from tilefold.tensor.windows import windows_written_out


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """See `plan.target.Target`.

    given: what a study decides. refuse: why the back end can make no kernel. predict: what one takes (`nearer`).
    search: groups are selected by price, the greedy ones are taken where that finds nothing cheaper; off until the
    prices are measured, so that groups are greedy.
    """

    machine: Gpu = H100
    given: Given | None = None
    refuse: Refuse | None = None
    predict: Predict | None = None
    library: bool = True
    search: bool = False

    @property
    def limits(self) -> Limits:
        """Registers hold what is computed; a kernel keeps some blocks where each of its parts has them."""
        m = self.machine
        return Limits(
            workers=1,
            both=m.least_blocks,
            in_registers=True,
            held=m.held,
            readers=int(m.bandwidth / m.unit_rate),
            segment=m.least_segment,
            operands=Operands(
                rows=m.rows,
                cached=m.bandwidth / m.last_cache.bandwidth,
                flop=m.bandwidth / m.gemm_rate(DType.BF16, library=False),
                kernel=m.second_kernel * m.bandwidth,
                vector=m.bandwidth / m.vector,
                neighbours=m.columns,
                kept=m.held_columns // (m.sector // DType.F32.nbytes),
            ),
        )

    @property
    def room(self) -> None:
        """Blocks of threads take streams in tiles."""

    def written_out(self, p: Program) -> Program:
        """The program with sums over windows written out where that is faster than the library's convolution, or than
        lanes along them."""
        p = sliding_by_parts(p, partial(parts_pay, machine=self.machine))
        p = taps_apart(p, gpu_taps(p, self.machine))
        names = gpu_windows(p, self.machine)
        p = read_as_stored(windows_written_out(taps_in_front(p, names), names), names)
        return near_sums_written_out(p, self.machine)

    def with_tails(self, p: Program) -> tuple[Program, frozenset[str]]:
        """The program with tails of convolutions as a library's call has them, where that takes less time; which."""
        if not self.library:
            return p, frozenset()
        return tails_in_calls(p, partial(gpu_tail, machine=self.machine))

    def products(self, p: Program) -> frozenset[str]:
        """Products that gain nothing, or too little, from a kernel of ours."""
        if not self.library:
            return frozenset()
        found = gpu_library_products(p, self.machine)
        return found | kept_for_nothing(p, found, self.limits, self.machine)

    def streams(self, g: Graph, c: Compute) -> bool:
        """Whether the result of a product that could stream stays in kernels."""
        return not self.library or streams_pay(g, c, self.machine)

    def attentions(self, p: Program) -> tuple[AttentionCall, ...]:
        """Attentions of plain form that the library computes in less time."""
        return library_attentions(p, self.machine, copied_bytes) if self.library else ()

    def forms(self, g: Graph, group: Group) -> Iterator[tuple[Form, tuple[FusedKernel, ...]]]:
        """One pass, split where too few blocks are left; then what is split in one kernel, and separate passes."""
        plan = plan_stages(g, with_unit(group))
        usual = Form(segments=segments(g, plan, self.machine, self.given) or 0)
        others = [Form()] if usual.segments else []
        others += [Form(joined=False)] if separate(g, plan) is not None else []
        for form in (usual, *others):
            kernels = self.build(g, group, form)
            if len(group.members) == 1 or not any(map(self._too_large, kernels)):
                yield form, kernels

    def build(self, g: Graph, group: Group, form: Form | None = None) -> tuple[FusedKernel, ...]:
        """See `Target`; without a form, in the first of `forms`."""
        plan = plan_stages(g, with_unit(group))
        if form is not None and not form.joined:
            plan = plan_stages(g, with_unit(group), separate(g, plan))
        n = segments(g, plan, self.machine, self.given) if form is None else form.segments or None
        made = build_kernels(g, plan, gpu_loops(g, plan, self.machine, self.given), n)
        return tuple(replace(k, block=by_columns(self._one_axis(k.block))) for k in made)

    def _one_axis(self, b: Block) -> Block:
        """A block program with folds over axes of unknown extents as folds over one; and over all axes where a step
        reads too much of the others, that no launch makes one axis of. Not where it reduces something of each place."""
        b = flattened(b)
        steps = (n for loop in walk(b.body) if isinstance(loop, Loop) and loop.kind == "for" for n in loop.body)
        most = self.machine.read_at_once * 2 // LEAST_STEP
        if any(isinstance(n, Let) and n.rdims for n in steps) or read_at_once(b) <= most:
            return b
        return b if read_at_once(packed(b)) <= most else flattened(b, known=True)

    def shapes(self, block: Block, sizes: Mapping[str, int]) -> tuple[Shape, ...]:
        """One tiling, for the price: the back end chooses its own."""
        return (gpu_shape(block, sizes, self.machine),)

    def against(self, k: FusedKernel) -> str | None:
        """Why a kernel cannot be made: a block would hold too much, few would read much, or the back end refuses it."""
        reason = self._too_large(k) or too_few(k.block, self.machine)
        return reason if reason is not None or self.refuse is None else self.refuse(k)

    def predicted(self, kernels: Sequence[FusedKernel]) -> Predicted | None:
        """What kernels one after the other are forecast to take; None where nobody can say."""
        found = [None if self.predict is None else self.predict(k) for k in kernels]
        known = [x for x in found if x is not None]
        if len(known) < len(found):
            return None
        later = self.machine.second_kernel * (len(known) - 1)
        seconds, floor, text = (sum(n) for n in zip(*((x.seconds, x.floor, x.text) for x in known), strict=True))
        return Predicted(seconds + later, floor + later, int(text))

    def _too_large(self, k: FusedKernel) -> str | None:
        """What a thread block would hold too much of: for all of its life, or at a step of a loop."""
        most, kept = self.limits.held, held(k.block)
        if most is not None and kept > most:
            return f"a thread block would keep {kept} elements, of {most} that its registers hold"
        most, read = self.machine.read_at_once, read_at_once(k.block)
        if read > most:  # seldom, so that blocks are not joined for nothing
            read = read_at_once(packed(k.block))
        if read > most:
            return f"a step of a loop would have {read} elements, of {most} that leave room for others"
        apart = multiplied_apart(k.block)
        if apart > most:
            return f"{apart} products of matrices in one thread block would be no matrix unit's"
        return None
