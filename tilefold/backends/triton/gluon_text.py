"""Text of Gluon sources: imports, small functions, and Triton's names as Gluon's."""

from __future__ import annotations

import re

#: Warps of a group.
WARPS = 4
#: Registers of a thread of the copying warp.
COPYING = 24
#: Most columns of a matrix instruction here: longer ones take more registers than a thread has at the start.
INSTRUCTION = 128

#: What Gluon has of its own, with layouts or for them; the rest of Triton's language serves both.
_LAID = (
    *("NVMMADistributedLayout", "SliceLayout", "arange", "constexpr", "full", "reduce", "sum", "max", "min"),
    *("float32", "float16", "bfloat16", "int32"),
)

HEADER = """import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import libdevice
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
)


@gluon.jit
def tf_apart():
    return tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)
"""

#: How a persistent thread block walks through `total` tiles of the grid (there and back, so that nobody always has the
#: longer ones), tiles in an order in which the longest start first, among as many others as share a cache, and a ring.
#: The last of these are so many tiles a thread block or more, so that none runs on alone at the end (`row_shares`).
WALK = """
@gluon.jit
def tf_rounds(total):
    units = gl.num_programs(0)
    rounds = total // units
    at = gl.program_id(0) + (rounds & 1) * (units - 1 - 2 * gl.program_id(0))
    if at < total - rounds * units:
        rounds += 1
    return rounds


@gluon.jit
def tf_tile(r):
    units = gl.num_programs(0)
    return r * units + gl.program_id(0) + (r & 1) * (units - 1 - 2 * gl.program_id(0))


@gluon.jit
def tf_longest_first(tile, blocks, count, width, LAST: gl.constexpr):
    least = 1
    if LAST > 0:
        least = gl.minimum(gl.maximum(tl.cdiv(LAST * gl.num_programs(0), blocks), width), count)
    last = (count - least) // width
    first = gl.minimum(tile // (width * blocks), last) * width
    rest = tile - first * blocks
    side = width
    if first == last * width:
        side = count - first
    back = rest // side
    return blocks - 1 - back, first + rest - back * side


@gluon.jit
def tf_advance(s, turn, STAGES: gl.constexpr):
    s += 1
    if s == STAGES:
        s = 0
        turn = turn ^ 1
    return s, turn
"""

#: Tiles drawn from a counter in memory: the copying warp draws, and hands the tile to the groups through shared memory.
DRAWN = """
@gluon.jit
def tf_draw(counter, total):
    n = gl.atomic_add(counter, 1, sem="relaxed")
    if n == total - 1:
        gl.atomic_xchg(counter, 0, sem="relaxed")
    return n


@gluon.jit
def tf_put(slot, value):
    slot.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def tf_get(slot):
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def tf_give(tile, r, drawn, drawn_full, drawn_empty):
    mbarrier.wait(drawn_empty.index(r & 1), ((r >> 1) & 1) ^ 1)
    tf_put(drawn.index(r & 1), tile)
    mbarrier.arrive(drawn_full.index(r & 1), count=1)


@gluon.jit
def tf_take(r, drawn, drawn_full, drawn_empty):
    mbarrier.wait(drawn_full.index(r & 1), (r >> 1) & 1)
    tile = tf_get(drawn.index(r & 1))
    mbarrier.arrive(drawn_empty.index(r & 1), count=1)
    return tile
"""

#: Sums of a row that the four threads of a row keep for themselves: [rows, 4].
SUMS = """
@gluon.jit
def tf_row_sums(x):
    return gl.sum(gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def tf_no_sums(like):
    x = tf_row_sums(like)
    return gl.full([x.shape[0], 4], 0.0, gl.float32, x.type.layout)


@gluon.jit
def tf_by_row(row, like):
    return gl.convert_layout(row, gl.SliceLayout(1, like.type.layout))[:, None]
"""


#: Operands of products that wait for the next step, two of 16 bits in a register: one by one the compiler keeps them in
#: a register each, and joins them again.
PAIRS = """
@gluon.jit
def tf_in_pairs(x, KIND: gl.constexpr):
    a, b = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn." + KIND + "x2.f32 $0, $2, $1;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def tf_from_pairs(x, like, KIND: gl.constexpr):
    a, b = (x & 0xFFFF).to(gl.int16).to(KIND, bitcast=True), (x >> 16).to(gl.int16).to(KIND, bitcast=True)
    return gl.convert_layout(gl.join(a, b).reshape([x.shape[0], x.shape[1] * 2]), like)
"""


#: Positions of pages, and rows of a tile in shared memory that become 0 from the `live`-th on: pages have something
#: there, which may be NaN. Groups that all do this write the same.
PAGES = """
@gluon.jit
def tf_place(at, size):
    return tl.where((at >= 0) & (at < size), at, -1).to(gl.int32)


@gluon.jit
def tf_clear(tile, live):
    by_rows: tl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = tile.load(by_rows)
    at = gl.arange(0, x.shape[0], gl.SliceLayout(1, by_rows))
    tile.store(gl.where((at < live)[:, None], x, 0.0).to(x.dtype))
    fence_async_shared()
"""

#: An index that does not exist ends the kernel with an error. A device's assertion is a call, for which the assembler
#: has all products one after the other.
TRAP = """
@gluon.jit
def tf_trap(exists):
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p trap; mov.b32 $0, $1; }",
        "=r,r", [exists.to(gl.int32)], tl.int32, is_pure=False, pack=1,
    )
"""


def matrix_layout(columns: int) -> str:
    """The layout of results of the matrix unit, for four warps of 16 rows each."""
    shape = [16, min(columns, INSTRUCTION), 16]
    return f"tl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[{WARPS}, 1], instr_shape={shape})"


def in_gluon(text: str) -> str:
    """Triton's names as Gluon's."""
    text = text.replace("@triton.jit", "@gluon.jit")
    return re.sub(rf"\btl\.(?=(?:{'|'.join(_LAID)})\b)", "gl.", text)


def mentions(text: str, name: str) -> bool:
    """Whether the text uses a name."""
    return re.search(rf"\b{re.escape(name)}\b", text) is not None
