"""Random numbers of 16 bits where groups of warps own rows (`row_groups`): each word of a counter is used.

A thread has two columns side by side of a product's result, in rows and columns 8 apart. Where rows of the result are
rows of numbers, it has all eight of each of its counters (`algebra.philox.random16`); where they are columns (keys own
rows of the backward) it has four, halves by the parity of a thread's column. Positions begin at multiples of 16.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, dims_used, ops_used, walk
from tilefold.algebra.ops import RANDOM
from tilefold.backends.triton.prelude import PHILOX_ROUND
from tilefold.tile import ir
from tilefold.tile.uses import expressions

#: Places that share counters.
TOGETHER = 16
#: The function of the usual prelude's name, for values in the layout of a product's result. [M, N] is cut as [M / 16,
#: 2, 8, N / 16, 2, 4, 2]: the axes of 2 are a thread's own.
DRAWS = f"""
@gluon.jit
def tf_counters(x, ROWS_FIRST: gl.constexpr):
    x = x.reshape([x.shape[0] // 16, 2, 8, x.shape[1] // 16, 2, 4, 2])
    if ROWS_FIRST:
        x, _ = gl.split(x.permute((0, 2, 3, 5, 1, 4, 6)))
    else:
        x = x.permute((0, 2, 3, 5, 6, 1, 4))
    x, _ = gl.split(x)
    x, _ = gl.split(x)
    return x


@gluon.jit
def tf_random16(seed, batch, row, column):
    ROWS_FIRST: gl.constexpr = row.shape[1] == 1
    at = row + column * 0
    left = tf_counters((column + row * 0).to(gl.int32), ROWS_FIRST)
    k, m = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a, b = (left & -10).to(tl.uint32), (tf_counters(at.to(gl.int32), ROWS_FIRST) & -9).to(tl.uint32)
    c, d = a * 0, a * 0 + batch.to(tl.uint32)
    for _ in gl.static_range(7):
{PHILOX_ROUND}
    if ROWS_FIRST:
        a, b = gl.join(a & 0xFFFF, a >> 16), gl.join(b & 0xFFFF, b >> 16)
        c, d = gl.join(c & 0xFFFF, c >> 16), gl.join(d & 0xFFFF, d >> 16)
        x = gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 6, 1, 2, 5, 3, 4))
    else:
        even = (left & 1) == 0
        a, b = tl.where(even, a & 0xFFFF, a >> 16), tl.where(even, b & 0xFFFF, b >> 16)
        c, d = tl.where(even, c & 0xFFFF, c >> 16), tl.where(even, d & 0xFFFF, d >> 16)
        x = gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 5, 1, 2, 6, 3, 4))
    return gl.convert_layout(x.reshape([at.shape[0], at.shape[1]]), at.type.layout).to(gl.int32)
"""


def draws_numbers(stmts: Sequence[ir.Stmt]) -> bool:
    """Whether statements draw numbers."""
    return any(not ops_used(e).isdisjoint(RANDOM) for e in expressions(stmts))


def drawn_by_threads(loop: ir.For, row: str) -> bool:
    """Whether all numbers that a loop draws have 16 bits, at rows and columns that are those of the kernel, or turned,
    and tiles begin where counters do."""
    drawn = [x for e in expressions(loop.body) for x in walk(e) if isinstance(x, Call) and x.op in RANDOM]
    begins = loop.start is None or _begins(loop.start, row)
    return not drawn or (begins and all(x.op == "random16" and _at(x, row, loop.dim) for x in drawn))


def _begins(e: Expr, row: str) -> bool:
    """Whether a bound is a multiple of `TOGETHER`, as the first row of a tile is."""
    match e:
        case Const(n, DType.I64):
            return int(n) % TOGETHER == 0
        case Call("tile_start", (Index(d),)):
            return d == row
        case Call("maximum" | "minimum" | "add" | "sub", (a, b)):
            return _begins(a, row) and _begins(b, row)
    return False


def _at(x: Call, row: str, stream: str) -> bool:
    seed, batch, *place = x.args
    apart: list[Expr] = [Index(row), Index(stream)]
    return place in (apart, apart[::-1]) and not {row, stream} & (dims_used(seed) | dims_used(batch))
