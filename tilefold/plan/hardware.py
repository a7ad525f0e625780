"""What the planner knows of a machine: tiers in bytes and bytes/s, rates in FLOP/s, times in seconds.

A *tier* is a level of the memory hierarchy, fastest first. Its bandwidth is what all cores together move between it
and the level above (closer to the arithmetic). Descriptions are frozen; `plan.machine` measures that of the CPU we are
on, the GPUs are described from measurements and data sheets, cited at each number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import torch

from tilefold.algebra.dtypes import DType
from tilefold.plan.library_rates import Kind, LibraryRates, Sizes, file_of, table_of
from tilefold.plan.pace import Pace
from tilefold.tile.pieces import MATRIX_UNIT

TierName = Literal["register", "L1", "shared", "cluster", "L2", "L3", "global"]


@dataclass(frozen=True, slots=True)
class Tier:
    """`capacity`: bytes of one instance, which `sharing` cores share. `bandwidth`: bytes/s out of all instances
    together. `latency`: seconds of one access. `source`: where the numbers are from."""

    name: TierName
    capacity: float
    bandwidth: float
    latency: float
    sharing: int
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """A device.

    `tiers`: fastest first, the last is memory. `cores`: units that run blocks (cores, streaming multiprocessors).
    `own`, `library`: matrix product rates by operand dtype, of generated code and of the library. `vector`:
    element-wise rate of all cores in units of `dataflow.element_units` a second. `launch`: of a kernel; `step`:
    of one tile statement. `source`: of the rates. `folded`: share of the library's rate that a generated product
    reaches whose result, or operand, a reduction makes in the same kernel; `folded_exact`: the same of float32 that no
    matrix unit takes. `measured`: times of library calls on the device, where somebody took them; `library` is then for
    what is far from them.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    tiers: tuple[Tier, ...]
    cores: int
    launch: float
    step: float
    vector: float
    own: Mapping[DType, float]
    library: Mapping[DType, float]
    source: str
    folded: float = 1.0
    folded_exact: float = 1.0
    measured: LibraryRates | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes/s of memory."""
        return self.tiers[-1].bandwidth

    @property
    def last_cache(self) -> Tier:
        """The largest tier above memory."""
        return self.tiers[-2]

    def gemm_rate(self, dtype: DType, *, library: bool) -> float:
        """FLOP/s of a matrix product with operands of this type (unlisted types: the slowest listed)."""
        table = self.library if library else self.own
        return table.get(dtype, min(table.values()))

    def fused_rate(self, dtype: DType) -> float:
        """FLOP/s of a generated product whose result, or operand, a reduction makes in the same kernel."""
        share = self.folded_exact if dtype is DType.F32 else self.folded
        return share * self.gemm_rate(dtype, library=True)

    def call_rate(self, kind: Kind, dtype: DType, sizes: Sizes) -> float:
        """FLOP/s of a library call: measured near it, or the library's of this type."""
        found = None if self.measured is None else self.measured.rate(kind, dtype, sizes)
        return self.gemm_rate(dtype, library=True) if found is None else found

    def home(self, nbytes: float) -> Tier:
        """Where a whole tensor stays between kernels: the fastest tier shared by all cores with room for it and as
        much again."""
        for t in self.tiers:
            if t.sharing >= self.cores and 2 * nbytes <= t.capacity:
                return t
        return self.tiers[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(Machine):
    """A device whose blocks of threads run on multiprocessors (`cores`).

    What thread blocks reach; bytes a second and seconds:
    block_rate: of a row that one block holds. stream_rate: of a row that it streams, with reductions between the tiles.
    unit_rate: of a multiprocessor, when all of them read. near_rate: the same out of the second-level cache.
    reached: share of the memory's bandwidth that kernels reach; cache_reached: of the second-level cache's.
    exact_rate: FLOP/s of float32, which no matrix unit takes, in kernels of ours, times the root of the elements of a
    result that a thread has: each reads a row and a column of them from shared memory for every element contracted.
    branching_rate: elements a second of a sine in kernels with products, whose few warps wait for each: it branches.
    narrow, narrow_sector: seconds of a multiprocessor for an access of a warp that reads 16-bit elements of a product's
    operand one by one, in a kernel of ours, and for each sector of it.
    few_tile: columns of the library's tiles of float32 where rows are few.
    ragged: share of the library's rate in products of 16-bit types with odd rows; ragged_pairs: with rows at multiples
    of 4 bytes, not of 16.
    second_kernel: what one more kernel costs in a CUDA graph: its start, and partial states through memory. call: from
    one library call in a sequence to the next, beside its work. empty: an empty kernel. dispatch: from the start of one
    thread block to that of the next. turn: of a loop whose loads are not ahead of their use.
    wide_rate, wide_start: FLOP/s of all multiprocessors in folds with a wide state, and seconds of a thread block
    beside its products; shared_rate, shared_start: where warps share the state out; full_tiles: thread blocks a
    multiprocessor from which tiles have all of the rows that this takes.

    What thread blocks hold; elements, columns or blocks:
    passed: share of the memory that what one product makes may take on its way to another, where it could stay in a
    kernel.
    held: elements that a block keeps for all of its life. read_at_once: of one value at a step of a loop that only
    reads, beside which there are others. wide: columns of a state that fills a multiprocessor.
    owned: columns of states of which four warps hold 64 rows, beside the scores.
    contraction: elements that a product in front of another may contract, while a tile of its operand is held.
    short_row: columns of a product that are held at once, for a reduction over them and what follows. rows: of a
    product, that share a block. packed: heads that share operands are packed into one tile where each has fewer rows.
    one_tile: keys (or what else a fold runs over) of a tile. beside: elements held whole beside a streamed axis.
    columns: neighbours of a block that reduces down columns. least_columns: the fewest, where columns are held whole,
    and held_columns the elements of these.

    Segments that folds are cut into; elements of an axis:
    blocks_a_unit: thread blocks wanted for each multiprocessor before a fold is left whole; column_blocks: the same
    down columns, whose tiles are small. least_segment, most_segments: elements a segment has at least, and how many
    there are at most, of fewer than long_segment elements. least_wide_segment: elements where wide states would else
    leave multiprocessors without a block.
    least_read, most_read_segments: the same of folds down columns or over several axes. least_step: elements of a
    contraction that one step of a split product has at least. least_blocks: thread blocks that a kernel of two which
    have more must be left with.

    A multiprocessor: threads, registers, blocks: the most at a time. own_registers, each_element: registers of a thread
    beside its share of the largest value, and for each element of that. sector: bytes that memory and cache deal in;
    first_cache: bytes of its own cache, beside what kernels of maps have as shared memory.
    request: what a run of neighbours costs beside its sectors, in bytes. lookup: what an element at a place that
    another gives costs, in adds. slot: seconds of all multiprocessors in which the greatest element of a tile's row is
    found, and taken out, of a few elements; slot_width: elements that take as long again.

    Windows: tap_rate: products a second of a sum over windows that is written out; summed_tap_rate: of one whose
    channels' statistics are summed in the same kernel. alone_rate: the same of the library's convolutions with one
    channel a group, channels last, whose windows have odd edges; even_rate: of even ones, for which it has no kernel of
    that memory; apart_rate: of others; line_rate: of others that are even or lines. window: elements of the largest
    window that is written out.

    Attention (`plan.pace`): library_pace: of the library's call; usual_pace: of a kernel of ours in its usual form;
    owning_paces: by most columns of a head, where groups of warps own rows. exact_scores: FLOP/s of the library's
    attention of float32.
    """

    block_rate: float
    stream_rate: float
    unit_rate: float
    near_rate: float
    reached: float
    cache_reached: float
    exact_rate: float
    branching_rate: float
    narrow: float
    narrow_sector: float
    few_tile: int
    ragged: float
    ragged_pairs: float
    second_kernel: float
    call: float
    empty: float
    dispatch: float
    turn: float
    wide_rate: float
    wide_start: float
    shared_rate: float
    shared_start: float
    full_tiles: float
    passed: float
    held: int
    read_at_once: int
    wide: int
    owned: int
    contraction: int
    short_row: int
    rows: int
    packed: int
    one_tile: int
    beside: int
    columns: int
    least_columns: int
    held_columns: int
    blocks_a_unit: int
    column_blocks: int
    least_segment: int
    most_segments: int
    long_segment: int
    least_wide_segment: int
    least_read: int
    most_read_segments: int
    least_step: int
    least_blocks: int
    threads: int
    registers: int
    blocks: int
    own_registers: int
    each_element: int
    sector: int
    first_cache: int
    request: int
    lookup: float
    slot: float
    slot_width: int
    tap_rate: float
    summed_tap_rate: float
    alone_rate: float
    even_rate: float
    apart_rate: float
    line_rate: float
    window: int
    library_pace: Pace
    usual_pace: Pace
    owning_paces: tuple[tuple[int, Pace], ...]
    exact_scores: float

    def copied(self, nbytes: float) -> float:
        """Seconds of a kernel more that reads so many bytes and writes as many."""
        return self.second_kernel + 2 * nbytes / (self.reached * self.bandwidth)

    def exact(self, elements: float) -> float:
        """FLOP/s of products of float32 in kernels of ours, each thread of which has so many elements of a result."""
        return min(self.own[DType.F32], self.exact_rate * max(1.0, elements) ** 0.5)

    def folded_rate(self, dtype: DType, rows: float, columns: float) -> float:
        """FLOP/s of a generated product of so many rows and columns whose result, or operand, a reduction makes in the
        same kernel. Of float32 tiles are small, and filled up to what a matrix unit has."""
        whole = self.fused_rate(dtype)
        if dtype is not DType.F32:
            return whole
        tile = [min(self.rows, max(MATRIX_UNIT, n)) for n in (rows, columns)]
        filled = min(1.0, rows / MATRIX_UNIT) * min(1.0, columns / MATRIX_UNIT)
        return min(whole, filled * self.exact(tile[0] * tile[1] / EXACT_THREADS))


#: Threads of a block that multiplies float32.
EXACT_THREADS = 256

_LOCAL = "measured on one H100 80GB: own micro-benchmark, every SM reading 64 KB by 16-byte loads"
_SHEET = "NVIDIA H100 / H200 data sheets"
_CLOCK = 1.755e9  # boost of the SXM part, for latencies given in cycles

H100 = Gpu(
    name="h100",
    kind="cuda",
    tiers=(
        Tier("register", 256 << 10, 120e12, 0.0, 1, "256 KB an SM; bandwidth nominal, never the bottleneck"),
        Tier("shared", 227 << 10, 31.5e12, 44 / _CLOCK, 1, _LOCAL),
        Tier("cluster", 8 * (227 << 10), 3.39e12, 221 / _CLOCK, 8, _LOCAL + ", a neighbour's in a cluster of 8"),
        Tier("L2", 50 << 20, 5.5e12, 270 / _CLOCK, 132, "capacity: " + _SHEET + "; bandwidth and latency nominal"),
        Tier("global", 80e9, 3.0e12, 600 / _CLOCK, 132, "measured on one H100 80GB: reads 3.0, copies 2.42 TB/s"),
    ),
    cores=132,
    launch=1.15e-6,
    step=0.2e-6,
    vector=16e12,
    own={DType.F64: 30e12, DType.F32: 30e12, DType.BF16: 560e12, DType.F16: 560e12, DType.E4M3: 900e12},
    library={DType.F64: 50e12, DType.F32: 45e12, DType.BF16: 780e12, DType.F16: 780e12, DType.E4M3: 1285e12},
    source="bf16 and fp8 library rates at 4096 to 8192 and an empty kernel in a CUDA graph: measured on one H100 80GB; "
    "own bf16: the best Triton attention measured there; the others nominal; folded: log-sum-exp of 4096 x 50257 "
    "logits of 2048 bf16 features in 2.64 ms on one H200, 2026-11",
    folded=0.42,
    # H100, 2026-11, TFLOP/s, where tiles in steps of 16 without a fold have 26 to 29: gradients of attention of 1,024
    # keys 7.6 (5.7 where a thread spills 500 bytes), of 512 7.5, of 4,096 9.6 and 10.5, of retention 11.2
    folded_exact=0.2,
    block_rate=40e9,  # some 32 KB in flight, over 0.8 us
    stream_rate=20e9,  # half of it; no measurement of its own
    unit_rate=25e9,  # 3.3 TB/s over 132
    near_rate=40e9,  # the second-level cache's nominal 5.5 TB/s over 132
    reached=0.85,  # by kernels and library calls on an H100 and an H200
    cache_reached=0.75,  # estimate
    # H100, 2026-11, by elements a thread: 4: 65,536 x 512 times 512 x 10, in 16 columns, 3.4 TFLOP/s; 8,192 x 416 times
    # 416 x 64 3.8; 16: 1536 windows of 49 x 49 x 32 5.6
    exact_rate=1.75e12,
    branching_rate=1.9e11,  # H100, 2026-11: three layers of 65,536 x 256 in one kernel, 323 us, of which products 50
    narrow=6e-9,  # this and narrow_sector: two kernels on an H100, 2026-11 (`backends.triton.narrow`)
    narrow_sector=0.8e-9,
    few_tile=64,  # 8 x 12544 times 12544 x 2048 on one H200: 73.6 us in 32 tiles; 8 x 2048 x 100: 53.5; 2026-11
    ragged_pairs=0.44,  # 32 times 512 x 756 by 756 x 512 of bf16: 65 us on an H100, 28.6 of 760; 2026-11
    ragged=0.2,  # 4096 x 2048 times 2048 x 50257 of bf16, results packed: 135 TFLOP/s on one H200, 2026-11
    second_kernel=2e-6,  # estimate: an empty kernel, and as much again
    call=4e-6,  # between library calls of a sequence, on an H100 and an H200
    empty=2e-6,  # estimate, with what keeps the device from starting at once
    dispatch=0.6e-9,  # empty kernels of 132 to 67,584 blocks of up to 16 warps on one H200, 2026-11 (32 warps: 1.3)
    turn=0.8e-6,  # the memory's latency (600 cycles), and what is done with what came
    # tiles of 64 x 64 x (576 + 512), H100 and H200: 4.0 us each and 11 us beside them; where warps share the state out
    # (`backends.triton.roles`), 1.9 us, the rate of the second-level cache, and 10.5 us
    wide_rate=290e12,
    wide_start=11e-6,
    shared_rate=610e12,
    shared_start=10.5e-6,
    full_tiles=0.75,
    passed=1 / 64,  # 1.25 GB: no measurement, a bound on what speed may cost
    held=(256 << 10) // 4,  # the registers of a multiprocessor, as float32
    read_at_once=1 << 15,  # half of them
    wide=512,  # 64 rows of 512 float32 are half of its registers
    owned=256,  # 128 of the 240 registers that a thread of two groups has
    contraction=640,  # 64 of 576 (latent attention) at 16 bits, two stages, in its 227 KB
    short_row=256,
    rows=64,  # of one instruction of the matrix unit (wgmma)
    packed=16,  # of its older one (mma)
    one_tile=64,
    beside=1 << 14,
    columns=64,
    least_columns=16,  # as many of 16 bits are a sector
    held_columns=1 << 15,  # float32: half of the registers
    blocks_a_unit=2,
    column_blocks=4,
    least_segment=256,
    most_segments=64,
    long_segment=1 << 12,
    least_wide_segment=64,
    least_read=1 << 13,
    most_read_segments=1 << 10,
    least_step=256,
    least_blocks=8,
    threads=2048,  # threads, registers, blocks: CUDA's tables, compute capability 9.0
    registers=1 << 16,
    blocks=32,
    own_registers=32,
    each_element=2,
    sector=32,
    first_cache=192 << 10,  # of 256 KB: whoever waits for a sector holds a place for it
    request=32,
    slot=0.3e-9,  # H100, 2026-11: 20 of 1,024 in 8,192 rows, 1.5 to 2.5 ms in tiles of 32, 0.18 in whole rows
    slot_width=512,
    lookup=32.0,  # estimate: eight lines a warp, at a turn of the first-level cache each, in which 128 adds pass
    # H200, bf16: 7 x 7 and 3 x 3 in kernels of ours; the library's out of what Inductor takes for the same, less its
    # passes over the images; the library's with rows of neighbours out of eager's
    tap_rate=2.4e12,
    summed_tap_rate=0.15e12,  # 3 x 3, batch norm in training: 136 us for 32 x 14 x 14 x 384, 295 for 28 x 28 x 144
    alone_rate=5e12,
    even_rate=0.19e12,  # H100, float32, 2026-11: 4 x 4 of 8 x 128 x 128 x 64 701 us, of which memory takes 25
    apart_rate=1.2e12,
    line_rate=0.4e12,  # H200, bf16, 2026-11: 4 taps, 4 x 2048 x 3328, 287 us, its image's gradient 252
    window=49,
    # H200, bf16, 2026-11: heads, keys, columns, microseconds measured (by the law). cuDNN 9.19: 384, 256, 64 26.7
    # (25.8); 384, 512, 64 72.0 (74.5); 64, 1024, 64 46.7 (45.4); 16, 4096, 64 152.5 (152.9); 512, 256, 80 43.0 (43.3);
    # causal 64, 2048, 64 102.9 (102.8); 64, 2048, 128 148.8 (146.0); 128, 1024, 128 87.3 (89.9)
    library_pace=Pace(128, 11e-9, 11.2e-9, 8.75e-9, 13.7e-9),
    # four warps, several thread blocks a multiprocessor: 64, 1024, 64 48.6 (47.9); 384, 256, 64 29.5 (28.4);
    # 16, 4096, 64 163.0 (158.5); causal 64, 1024, 64 34.1 (33.8); 64, 2048, 64 100.3 (100.6); 64, 2048, 128 162.1
    # (161.5); too long between 64 and 128 columns: 64, 1024, 80 62.3 (76.6)
    usual_pace=Pace(128, 13.8e-9, 4e-9, 9e-9, 16e-9),
    # three groups: 64, 1024, 64 50.7 (52.9); 64, 4096, 64 509 (504); causal 64, 1024, 64 49.6 (48.2); 64, 2048, 64
    # 108.5 (110.9); 64, 4096, 64 333 (321). Two: 64, 1024, 80 59.7 (59.7); 512, 256, 80 62.2 (62.3, on an H100; its
    # threads spill); causal 128, 1024, 128 83.3 (84.1); 64, 2048, 128 142.0 (135.3); 128, 4096, 128 941 (939)
    owning_paces=(
        (64, Pace(192, 50e-9, 19e-9, 9.2e-9, 9.2e-9)),
        (96, Pace(128, 41e-9, 0.0, 9e-9, 9e-9)),
        (128, Pace(128, 6e-9, 16e-9, 12.5e-9, 12.5e-9)),
    ),
    exact_scores=18.6e12,  # 48 causal heads of 64 columns, 512 keys: 97 us on one H200, of tiles of 64; 2026-11
)


H200 = replace(
    H100,
    name="h200",
    tiers=(*H100.tiers[:-1], Tier("global", 141e9, 4.3e12, 600 / _CLOCK, 132, "H100's share of the sheet's 4.8 TB/s")),
    source="same processor as the H100; " + _SHEET,
)


def gpu_here() -> Gpu:
    """The current CUDA device; an H100 where there is none (kernels that are only looked at, or interpreted). With
    products of float32 as torch allows them at the moment."""
    if not torch.cuda.is_available():
        found = H100
    else:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found = gpu_named(properties.name, properties.multi_processor_count)
    return rounding(found) if torch.backends.cuda.matmul.fp32_precision == "tf32" else found


def rounding(gpu: Gpu) -> Gpu:
    """The device with products of float32 on matrix units, which take tf32 at half of the rate of 16 bits (the data
    sheets'; no measurement). Times of calls that were measured are of products that round nothing."""
    own, library = ({**rates, DType.F32: rates[DType.BF16] / 2} for rates in (gpu.own, gpu.library))
    measured = None if gpu.measured is None else gpu.measured.without(DType.F32)
    return replace(gpu, own=own, library=library, folded_exact=gpu.folded, exact_rate=inf, measured=measured)


def gpu_named(name: str, cores: int) -> Gpu:
    """The description nearest to the GPU of this name (as the driver says it) with this many multiprocessors, and what
    was measured of its library (`tilefold tune library`)."""
    return replace(H200 if "H200" in name else H100, cores=cores, measured=table_of(file_of(name)) if name else None)
