"""What the warps of a rendered kernel touch, and the time that follows: a check of what was chosen, not a choice.

Tiles are chosen by prices that know runs of neighbours (`traffic`). Here addresses are computed, of one thread block in
the middle of the grid and one turn of each loop, as lanes have them: Triton 3.6 lays a warp along the axis of most
neighbours, the first of equal ones, up to 16 bytes a lane, and what is read one by one (`memory`) along the last. An
access of a warp costs the lines of the cache that it touches, a tile the sectors of 32 bytes, each once a turn; memory
each tensor once. Products cost their padded tiles,
elements their operations. Loops wait: a latency of the memory a turn. The floor is that of all tensors read or written
once at the memory's rate, or of the products on all multiprocessors. Rates are the machine's. What a kernel of products
reads element by element (`narrow`) no other stage hides.

An H200's microseconds, sums over the kernels of a name of networks in inference, 32 images of bf16 (predicted):
regnet_y_400mf's 24 relu_2 1378 (1204), 4 relu_3 175 (233), 24 relu 105 (135), 17 mean 56 (62), 10 mul_2 34 (58);
efficientnet_v2_s' 31 mean 3990 (2478), 78 silu 1707 (1884), 34 add_3 152 (200), 30 mul_2 103 (239), 6 add_2 47 (56).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import Env, Grid, evaluate
from tilefold.algebra.expr import (
    Call,
    Expr,
    Index,
    Load,
    call,
    dims_named,
    dims_used,
    loads,
    substitute,
    tensors_read,
    transform,
)
from tilefold.backends.triton.choices import branches, choices
from tilefold.backends.triton.memory import SECTOR
from tilefold.backends.triton.narrow import narrow
from tilefold.backends.triton.own_rows import RESIDENT
from tilefold.backends.triton.own_vectors import ELEMENTS, OwnVector, own_vectors
from tilefold.backends.triton.pairs import both_of
from tilefold.backends.triton.product import multiplied
from tilefold.backends.triton.residency import Body, Resident, exposed, meetings
from tilefold.backends.triton.touched import CYCLES, Access, Touch, anywhere, touched
from tilefold.backends.triton.traffic import WARP
from tilefold.backends.triton.views import Seen
from tilefold.backends.triton.work import MOST, OWN, held, index_units, kind_of, quotients, room, work
from tilefold.plan.hardware import Gpu
from tilefold.tensor.index_simplify import const
from tilefold.tile import ir
from tilefold.tile.pieces import MATRIX_UNIT, power_of_two, product_dims
from tilefold.tile.uses import allocated, every, expressions, written

if TYPE_CHECKING:
    from tilefold.backends.triton.launch import Variant

#: Operands a register that a thread block may have from which the assembler runs out of them, and bytes that it spills
#: for each beyond: of four warps 9 taps of 128 places 14.8 KB a thread, of 64 0.2; two products of 512 elements, summed
#: as they are, 30; of 32 warps a sum of squares of 64 mirrored places a thread, 0.6 (254 us on an H100).
UNDER_WAY, SPILLED = 640 / (MOST - OWN), 20
#: Units of an addition, of one element of an order (`dataflow.element_units`).
ADDITION, ORDERED = 1.0, 14.0
#: Units of an access of one element or vector, with its address of 64 bits and its mask. None are counted in kernels
#: of matrix products, where copies are under way while others are multiplied.
ACCESS = 2.0
#: Neighbours that a lane has of a value.
LANE = 4
#: Maps within each other that a place is seen through; what stands for the unit of numbers that are read as floats.
SEEN_THROUGH, FLOATS = 6, 1 << 20
#: Share of the rate of large products that tiles of fewer rows than a group's 64 reach.
GROUP, SMALL = 64, 0.4


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds: the whole, the floor, and the stages that the whole is made of."""

    seconds: float
    floor: float
    stages: Mapping[str, float]
    touches: tuple[Touch, ...]
    blocks: int

    @property
    def worst(self) -> str:
        """The longest stage."""
        return max(self.stages, key=lambda n: self.stages[n])


@dataclass(slots=True)
class _Walk:
    """Sums over a walk through the statements of one thread block."""

    sizes: Mapping[str, int]
    syms: Mapping[str, int]
    tensors: Mapping[str, tuple[ir.TensorParam, Seen]]
    lanes: Mapping[str, int]
    warps: int
    multiplies: bool
    exact: bool
    machine: Gpu
    ranges: dict[str, tuple[int, int]]
    tiles: dict[str, int]
    buffers: dict[str, ir.Buffer] = field(default_factory=dict)
    touches: dict[tuple[object, ...], Touch] = field(default_factory=dict)
    #: Sectors of a tensor that a tile of these loops has read: another reading finds them near.
    near: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)
    #: Positions that are computed, in which loops: loads at one of them share it.
    placed: set[tuple[Expr, object]] = field(default_factory=set)
    #: Dims of what is reduced across lanes: of a value of some of them each lane along the others has a copy.
    frames: tuple[tuple[str, ...], ...] = ()
    #: What buffers are made of by maps, with their dims: where that gives places, neighbours may be near one another.
    made: dict[str, tuple[tuple[str, ...], Expr]] = field(default_factory=dict)
    #: Quotients of positions that statements compute.
    quotients: set[Expr] = field(default_factory=set)
    #: Loads and stores that are parts of vectors.
    own: Mapping[tuple[str, tuple[Expr, ...]], OwnVector] = field(default_factory=dict)
    #: Loops around the statement: dim, turns.
    loops: tuple[tuple[str, float], ...] = ()
    units: float = 0.0
    flops: dict[DType, float] = field(default_factory=dict)
    #: Seconds that products take on all multiprocessors, whatever tiles of float32 cost.
    least: float = 0.0
    turns: float = 0.0
    #: Seconds that warps wait for one another.
    met: float = 0.0
    spilled: float = 0.0
    #: Of copies that are ahead, of what a loop's products read.
    stages: int = 1
    resident: Resident = field(default_factory=Resident)
    now: Body = field(default_factory=Body)

    def width(self, d: str) -> int:
        """Lanes of a dim here."""
        n = self.tiles.get(d, self.sizes[d])
        return self.lanes.get(d, 1 if n == 1 else power_of_two(n))

    def area(self, dims: Sequence[str] | frozenset[str]) -> int:
        return math.prod(self.width(d) for d in dims)

    @property
    def times(self) -> float:
        return math.prod(n for _, n in self.loops)

    def value(self, e: Expr, at: Mapping[str, tuple[int, int]] = MappingProxyType({})) -> int:
        ranges = {d: r for d, r in ({**self.ranges, **at}).items() if d in dims_used(e)}
        return int(evaluate(e, Grid(ranges), self._env()).flatten()[0])

    def _env(self) -> Env:
        return Env(anywhere, self.sizes, self.syms)

    def body(self, stmts: Sequence[ir.Stmt]) -> None:
        threads = WARP * self.warps
        beyond = held(stmts, self.area, self.part) - room(threads)
        self.spilled += self.times * 2 * SPILLED * max(0.0, beyond)
        around, self.now = self.now, Body()
        for s in stmts:
            match s:
                case ir.Alloc(buffer):
                    self.buffers[buffer.name] = buffer
                case ir.For():
                    self.loop(s)
                case ir.Fill():
                    pass
                case ir.Map(buf, e):
                    self.made[buf] = self.buffers[buf].dims, e
                    self.computed(self.buffers[buf].dims, e)
                case ir.Reduce(buf, "sum", rdims, Call("mul", (Load() as a, Load() as b))):
                    self.product(ir.Gemm(buf, a, b, rdims, s.accumulate, s.kept))
                case ir.Reduce(buf, _, rdims, e):
                    self.computed((*self.buffers[buf].dims, *rdims), e, ADDITION)
                    self.met += self.times * meetings(self.area(self.buffers[buf].dims), self.warps)
                case ir.Select():
                    self.selected(s)
                case ir.Gemm():
                    self.product(s)
                case ir.Store():
                    parts = choices(s.expr, self.width)
                    if not branches(s.expr, parts):
                        parts = choices(s.expr, lambda d: self.width(d) == 1)
                    self.computed(s.dims, s.expr, share=1 / (len(parts) + 1))
                    self.touch(s.tensor, s.index, s.dims, stored=True)
        self.spilled += self.times * 2 * SPILLED * self.resident.add(self.now, threads)
        self.now = around

    def selected(self, s: ir.Select) -> None:
        """Elements in their order: the greatest one, or some, one after the other, each of all that are left."""
        dims = self.buffers[s.buf].dims
        rows, slots = (dims[:-1], self.sizes[dims[-1]]) if s.op == "topk" else (dims, 1)
        frame = (*rows, *s.rdims)
        self.computed(frame, s.expr, ORDERED if s.op != "topk" else 0.0)
        self.read(frame, s.payload)
        if s.op == "topk":
            seconds = self.machine.slot * (1 + self.area(s.rdims) / self.machine.slot_width)
            each = seconds * self.machine.vector
            self.units += self.times * self.area(rows) * slots * each

    def loop(self, s: ir.For) -> None:
        start = 0 if s.start is None else self.value(s.start)
        stop = self.sizes[s.dim] if s.stop is None else self.value(s.stop)
        turns = max(0, -(-(stop - start) // s.tile))
        if not turns:
            return
        before = self.ranges.get(s.dim), self.tiles.get(s.dim), self.loops, self.turns
        tile = s.tile
        if self.kept(s):
            tile, turns = stop - start, 1
        at = start + turns // 2 * tile
        self.ranges[s.dim], self.tiles[s.dim] = (at, min(at + tile, stop)), tile
        self.loops, self.turns = (*self.loops, (s.dim, turns)), 0.0
        self.body(s.body)
        inside = max(1.0, self.turns)
        self.ranges[s.dim] = before[0] or (0, self.sizes[s.dim])
        if before[1] is None:
            del self.tiles[s.dim]
        else:
            self.tiles[s.dim] = before[1]
        self.loops, self.turns = before[2], before[3] + (turns * inside if turns > 1 else inside - 1)

    def part(self, tensor: str) -> float:
        """Of a register, that an element takes."""
        return min(1.0, self.tensors[tensor][0].dtype.nbytes / 4) if tensor in self.tensors else 1.0

    def kept(self, s: ir.For) -> bool:
        """Whether a loop goes over what the block holds whole, so that it is none (`loops`)."""
        touched = {t for e in expressions(s.body) for t in tensors_read(e)} | set(written(s.body))
        return s.start is None and any(
            s.dim in b.dims for n, b in self.buffers.items() if n in touched and n not in allocated(s.body)
        )

    def computed(self, frame: Sequence[str], e: Expr, more: float = 0.0, share: float = 1.0) -> None:
        """Element-wise work of a statement, and what it reads. What it does not vary with is computed once, or by each
        lane that has a copy."""
        used = frozenset(frame) & dims_used(e)
        area = self.area(used)
        self.units += self.times * share * (work(e, lambda dims: self.lanes_of(used & dims)) + more * area)
        self.quotients |= quotients(e)
        self.read(frame, e, share)
        asked = (x for x in dict.fromkeys(loads(e)) if x.tensor in self.tensors)
        self.now.read = max(self.now.read, sum(self.part(x.tensor) * self.area(dims_used(x)) for x in asked))
        if isinstance(e, Load):  # what is only reduced, or stored, is used as it comes
            return
        operands = 2 * area + sum(self.area(dims_used(x)) for x in dict.fromkeys(loads(e)))
        beyond = operands - UNDER_WAY * room(WARP * self.warps)
        self.spilled += self.times * share * 2 * SPILLED * max(0.0, beyond)

    def lanes_of(self, dims: frozenset[str]) -> float:
        """Elements of a value of these dims, with their copies beside a value that is reduced: Triton spreads lanes
        over the last axis of a frame first, a vector each."""
        area = self.area(dims)
        copies = 1.0
        for f in self.frames if dims and not self.multiplies else ():
            if dims < frozenset(f):
                beside = math.prod(self.width(d) for d in f if d not in dims)
                along = min(WARP * self.warps, max(1, self.width(f[-1]) // LANE)) if f[-1] not in dims else 1
                copies = max(copies, min(beside, along))
        return area * copies

    def read(self, frame: Sequence[str], e: Expr, share: float = 1.0) -> None:
        for x in loads(e):
            if x.tensor in self.tensors:
                self.touch(x.tensor, x.index, frame, share=share)

    def product(self, s: ir.Gemm) -> None:
        own = self.buffers[s.buf].dims
        for x in (s.a, s.b):
            dims = [*(d for d in own if d in dims_used(x)), *(d for d in s.rdims if d in dims_used(x))]
            self.read(dims, x)
        a, b = self.varying(s.a), self.varying(s.b)
        batch = [d for d in own if d in a and d in b]
        m, n, k = ([d for d in side if d not in batch] for side in (own, own, s.rdims))
        m, n = [d for d in m if d in a], [d for d in n if d in b]
        kinds = [self._dtype(x) for x in (s.a, s.b)]
        read = {self._dtype(x) for x in (s.a, s.b) if x.tensor in self.tensors}
        kind = kind_of(kinds, read, s.kept, narrow=self.narrow)
        rows, columns, depth = self.area(m), self.area(n), self.area(k)
        shared = any(self.width(d) > 1 for d in own if d not in (*m, *n))
        matrices = multiplied(kinds, self.buffers[s.buf].dtype)
        if shared or not matrices or min(rows, columns, depth) < MATRIX_UNIT:  # summed element by element (`product`)
            self.computed((*own, *s.rdims), Call("mul", (s.a, s.b)), ADDITION)
            return
        self.holds(s, kind)
        flops = 2.0 * self.area(batch) * rows * columns * depth * self.times
        if kind.nbytes <= 2 and max(rows, columns) < GROUP:
            flops /= SMALL
        self.least += flops / self.machine.gemm_rate(kind, library=False)
        if kind is DType.F32 and self.exact:
            threads = WARP * self.warps
            flops *= self.machine.gemm_rate(kind, library=False) / self.machine.exact(rows * columns / threads)
        self.flops[kind] = self.flops.get(kind, 0.0) + flops

    def holds(self, s: ir.Gemm, kind: DType) -> None:
        """Where a product of a matrix unit is made, and its operands are: read ones once for each copy ahead."""
        self.now.elements += self.area(self.buffers[s.buf].dims)
        for x in (s.a, s.b):
            area, within = self.area(dims_used(x)), self.loops[-1:]
            if x.tensor not in self.tensors:
                self.now.elements += area * kind.nbytes / 4
            elif within and within[0][1] > 1 and within[0][0] in dims_used(x):
                self.now.shared += area * kind.nbytes * self.stages
            else:
                self.now.shared += area * kind.nbytes

    def varying(self, x: Load) -> frozenset[str]:
        """Dims that choose among what an operand is in this tile: not the head of a group of queries (`j // 5`)."""
        apart = {d for e in x.index if not isinstance(e, Index) for d in dims_used(e)}
        return frozenset(d for d in dims_used(x) if d not in apart or self.chooses(d, x.index))

    def chooses(self, d: str, index: Sequence[Expr]) -> bool:
        """Whether an index differs along a dim of this tile."""
        start, stop = self.ranges.get(d, (0, self.sizes[d]))
        ends = (start, min(stop, self.sizes[d]) - 1)
        return any(
            len({self.value(e, {d: (n, n + 1)}) for n in ends}) > 1 or any(True for _ in loads(e))
            for e in index
            if d in dims_used(e)
        )

    @property
    def narrow(self) -> bool:
        """Whether something that is read has 16 bits, which computed operands are rounded to."""
        return any(p.role == "in" and p.dtype in (DType.F16, DType.BF16) for p, _ in self.tensors.values())

    def _dtype(self, x: Load) -> DType:
        return self.tensors[x.tensor][0].dtype if x.tensor in self.tensors else self.buffers[x.tensor].dtype

    def touch(
        self, tensor: str, index: tuple[Expr, ...], frame: Sequence[str], *, stored: bool = False, share: float = 1.0
    ) -> None:
        """An access of a tile, once in the innermost loop whose dims it depends on."""
        t, x = self.tensors[tensor]
        if t.unit_axis is not None and (part := self.own.get((tensor, index))) is not None:
            index = part.index(index, t.unit_axis)
        seen = self.seen(index)  # with turns of loops that the maps are in
        used = frozenset(d for e in (*index, *seen) for d in dims_used(e))
        outer = max((n + 1 for n, (d, _) in enumerate(self.loops) if d in used), default=0)
        times = math.prod(n for _, n in self.loops[:outer]) if not stored else self.times
        key = (tensor, index, stored, tuple(d for d, _ in self.loops[:outer]))
        if key in self.touches:
            return
        order = [d for d in dict.fromkeys((*frame, *sorted(used))) if d in used]
        tile = touched(replace(self._access(t, x, seen, order), joined=self.in_pairs(t, index, order)))
        places = [e for e in index if (e, key[-1]) not in self.placed]
        positions = sum(self.area(dims_used(e)) * index_units(e, self.quotients) for e in places)
        self.placed |= {(e, key[-1]) for e in places}
        accesses = 0.0 if self.multiplies else ACCESS * self.area(used) / tile.vector
        self.units += times * share * (positions + accesses)
        before = self.near.get(known := (tensor, stored, key[-1]))
        self.near[known] = both = tile.sectors if before is None else torch.unique(torch.cat((before, tile.sectors)))
        new = float(len(both) - (0 if before is None else len(before))) * SECTOR * tile.cut
        lanes, waits = tuple(map(self.width, order)), tile.narrow if self.multiplies and not stored else 0.0
        self.touches[key] = Touch(tensor, stored, tile.nbytes, new, tile.lines, tile.sent, times * share, lanes, waits)

    def seen(self, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Places with what maps of the kernel compute for them, and floats from 0 to 1: what a flow of an image
        displaces stays near, what such a number is a share of an axis for is anywhere."""
        return tuple(self.through(e, SEEN_THROUGH, {}) if loads(e) else e for e in index)

    def through(self, e: Expr, depth: int, known: dict[tuple[Expr, int], Expr]) -> Expr:
        def one(x: Expr) -> Expr | None:
            if not isinstance(x, Load):
                return None
            if (x, depth) not in known:
                known[x, depth] = self.element(x, depth, known)
            return known[x, depth]

        return transform(e, one)

    def element(self, x: Load, depth: int, known: dict[tuple[Expr, int], Expr]) -> Expr:
        """What stands for an element that gives a place."""
        if x.tensor in self.tensors:
            return call("div", x, float(FLOATS)) if self.tensors[x.tensor][0].dtype.is_float else x
        if x.tensor not in self.made or not depth:
            return x
        dims, e = self.made[x.tensor]
        at: dict[Expr, Expr] = {Index(d): i for d, i in zip(dims, x.index, strict=True) if i != Index(d)}
        return self.through(substitute(e, at) if at else e, depth - 1, known)

    def in_pairs(self, t: ir.TensorParam, index: tuple[Expr, ...], order: Sequence[str]) -> bool:
        """Whether an access runs through pairs of neighbours, as one axis of lanes."""
        if self.multiplies or t.unit_axis is None or any(self.width(d) == 1 for d in order[-2:]):
            return False
        sizes = {d: const(n) for d, n in self.sizes.items()}
        return both_of(index, t.unit_axis, [d for d in order if self.width(d) > 1], sizes) is not None

    def _access(self, t: ir.TensorParam, x: Seen, index: tuple[Expr, ...], order: Sequence[str]) -> Access:
        named = {*order}.union(*map(dims_named, index))
        return Access(
            index, t.unit_axis, t.dtype.nbytes, t.shape, tuple(x.shape), tuple(x.stride()),
            tuple([(d, *self.ranges.get(d, (0, self.sizes[d])), self.width(d)) for d in order]),
            tuple([(d, n) for d, n in self.sizes.items() if d in named]), tuple(self.syms.items()),
            WARP * self.warps, self.multiplies,
        )  # fmt: skip


def forecast(
    v: Variant, xs: Sequence[Seen], sizes: Mapping[str, int], syms: Mapping[str, int], machine: Gpu
) -> Forecast:
    """Of a kernel, launched for such tensors (in the order of its parameters). sizes: extents of its dims."""
    k = v.kernel
    tensors = {p.name: (p, x) for (p, _), x in zip(v.params, xs, strict=True)}
    whole = {d: n for d, n in zip(k.sizes, (_const(e, sizes, syms) for e in k.sizes.values()), strict=True)}
    grid = {t.dim: -(-whole[t.dim] // t.tile) for t in k.grid}
    blocks = math.prod(grid.values())
    ranges = {d: (0, n) for d, n in whole.items()}
    for t in k.grid:
        at = grid[t.dim] // 2 * t.tile
        ranges[t.dim] = at, min(at + t.tile, whole[t.dim])
    warps = v.config.groups * 4 + 4 if v.rendered.groups else v.config.warps
    exact = '="tf32"' not in v.rendered.source
    w = _Walk(
        {**whole, **ELEMENTS}, syms, tensors, v.config.lanes, warps, bool(product_dims(k)), exact, machine, ranges,
        {t.dim: t.tile for t in k.grid}, stages=v.config.stages, frames=_frames(k), own=own_vectors(k, v.config),
    )  # fmt: skip
    w.body(k.body)
    return _summed(w, blocks, warps, machine, apart=bool(v.rendered.groups))


def _frames(k: ir.Kernel) -> tuple[tuple[str, ...], ...]:
    """Dims of the elements of its reductions."""
    own = {s.buffer.name: s.buffer.dims for s in every(k.body) if isinstance(s, ir.Alloc)}
    found = ((*own[s.buf], *s.rdims) for s in every(k.body) if isinstance(s, ir.Reduce))
    return tuple(dict.fromkeys(f for f in found if len(f) > 1))


def _const(e: Expr, sizes: Mapping[str, int], syms: Mapping[str, int]) -> int:
    return int(evaluate(e, Grid({}), Env(anywhere, sizes, syms)).flatten()[0])


def _summed(w: _Walk, blocks: int, warps: int, machine: Gpu, *, apart: bool) -> Forecast:
    """apart: whether warps have parts of their own, so that one's copies and products hide another's arithmetic."""
    touches = tuple(w.touches.values())
    unique = {x.tensor: 0.0 for x in touches}
    sectors = dict(unique)
    for x in touches:
        unique[x.tensor] += x.nbytes * x.times * blocks
        sectors[x.tensor] += x.sectors * x.times * blocks
    for n in unique:
        p, given = w.tensors[n]
        nbytes = math.prod(k for k, s in zip(given.shape, given.stride(), strict=True) if s) * p.dtype.nbytes
        unique[n] = min(unique[n], nbytes)
        sectors[n] = min(sectors[n], max(nbytes, _span(given) * p.dtype.nbytes))
    units = min(machine.cores, blocks)
    share = units / machine.cores
    line = sum(x.lines * x.times for x in touches) * blocks / (CYCLES * units)
    served = sum((x.sent if x.stored else x.sectors) * x.times for x in touches) * blocks
    served += w.spilled * blocks
    whole = machine.reached * machine.bandwidth
    threads = WARP * warps
    resident = max(1, min(machine.blocks, machine.threads // threads))
    beside = 1 / 4
    if w.resident.elements and not apart:
        resident = w.resident.blocks(threads, machine)
        beside = exposed(warps * min(resident, blocks / units), w.turns)
    if not w.multiplies:
        served += _missed(w, touches, min(resident * RESIDENT, blocks / units), machine) * blocks
    at_once = w.spilled / 2 * min(blocks, resident * machine.cores)
    spilled = w.spilled * blocks if at_once > machine.last_cache.capacity else 0.0
    stages = {
        "memory": (sum(sectors.values()) + spilled) / min(whole, units * max(machine.unit_rate, whole / machine.cores)),
        "cache": served / min(machine.cache_reached * machine.last_cache.bandwidth, units * machine.near_rate),
        "lines": line,
        "elements": w.units * blocks / (machine.vector * share),
        "products": sum(f / machine.gemm_rate(t, library=False) for t, f in w.flops.items()) * blocks / share,
    }
    waves = max(1.0, blocks / (resident * machine.cores))
    stages["turns"] = waves * ((1 + w.turns) * machine.turn + (w.met if w.resident.elements else 0.0))
    stages["blocks"] = blocks * machine.dispatch
    longest = max(stages.values())
    seconds = machine.empty + longest + (sum(stages.values()) - longest) * beside
    if (waits := narrow(touches, machine) * blocks / units) > 0:
        stages["narrow"] = waits
        seconds += waits
    floor = machine.empty + max(sum(unique.values()) / whole, w.least * blocks)
    return Forecast(seconds, floor, stages, touches, blocks)


def _missed(w: _Walk, touches: Sequence[Touch], resident: float, machine: Gpu) -> float:
    """Bytes of a block that were read before, and that the first-level cache has not kept: it is shared by the blocks
    of a multiprocessor."""
    kept = SECTOR * sum(len(n) for (_, stored, _), n in w.near.items() if not stored)
    missing = 1 - machine.first_cache / max(kept * resident, machine.first_cache)
    return missing * sum(max(0.0, x.sent - x.sectors) * x.times for x in touches if not x.stored)


def _span(x: Seen) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
