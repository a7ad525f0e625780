"""What groups of warps read of a tile kernel with one streamed loop: columns of tensors, at rows or at the stream.

Shared by the two ways to share a kernel out: a state's columns (`roles`) and its rows (`row_roles`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, dims_used, substitute, tensors_read
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.memory import MOST_AXES
from tilefold.tile import ir
from tilefold.tile.pieces import MATRIX_UNIT, power_of_two
from tilefold.tile.uses import expressions, written

#: Rows of a Hopper matrix instruction of four warps; streamed indices a tile may have.
ROWS, STREAMED = 64, (32, 64, 128)
#: Bytes of shared memory for barriers and gaps.
BARRIERS = 1024
#: Columns of 16 bits that lie side by side in shared memory (128 bytes): rows of a tile's first ones, then of the next.
BESIDE = 64
#: Streamed indices that one copy brings of a page, at least.
LEAST_PIECE = 16


@dataclass(frozen=True, slots=True)
class Part:
    """Columns [start, start + width) of a tensor at a tile of one other dim: what one copy brings.

    index: the tensor's index without its last axis. streamed: the tile is the loop's, else the rows'. page: extent of
    the axis that the tile is along where others say where that is, by the page; 0: the tile is along a whole axis.
    """

    tensor: str
    index: tuple[Expr, ...]
    start: int
    width: int
    streamed: bool
    page: int = 0

    def runs_along(self, e: Expr, d: str) -> bool:
        """Whether a tile of d is one along the axis with this index."""
        return e == (page_index(d, self.page) if self.page else Index(d))

    def piece(self, tile: int) -> int:
        """Indices of a tile that a copy brings: all, or those that are in one page."""
        return piece(self.page, tile) if self.page else tile

    @property
    def stop(self) -> int:
        """One past the last column."""
        return self.start + self.width

    @property
    def lanes(self) -> int:
        """Columns of the copy: a power of two that a matrix unit takes; those beyond the tensor's last read as 0."""
        return max(MATRIX_UNIT, power_of_two(self.width))


class Reading:
    """A kernel with one loop, and the statements before and after it."""

    def __init__(self, kernel: ir.Kernel, config: TritonConfig, loop: ir.For):
        self.kernel, self.config, self.loop = kernel, config, loop
        self.tensors = {t.name: t for t in kernel.tensors}
        at = kernel.body.index(loop)
        self.before, self.after = kernel.body[:at], kernel.body[at + 1 :]

    def settled(self, own: Sequence[ir.Stmt], scores: Sequence[ir.Stmt], wide: set[str]) -> bool:
        """Whether what the states' statements read has, at the end of a tile, the value that they would have read."""
        if any(wide & tensors_read(e) for e in expressions(scores)):
            return False
        for s in own:
            later = self.loop.body[self.loop.body.index(s) + 1 :]
            read = {t for e in expressions((s,)) for t in tensors_read(e)}
            if set(written(tuple(x for x in later if x in scores))) & read:
                return False
        return True

    def depending(self, wide: set[str]) -> tuple[ir.Stmt, ...]:
        """Statements after the loop that need the states."""
        names, found = set(wide), list[ir.Stmt]()
        for s in self.after:
            read = {t for e in expressions((s,)) for t in tensors_read(e)}
            if read & names or about(s) in names:
                found.append(s)
                names |= {about(s)} - {""}
        made = {about(s) for s in found} - {""}
        return tuple(s for s in self.after if s in found or about(s) in made)

    def read(self, stmts: Sequence[ir.Stmt], known: set[str]) -> tuple[str, ...]:
        """Buffers that statements read beside those known."""
        found = [t for e in expressions(stmts) for t in tensors_read(e)]
        return tuple(dict.fromkeys(t for t in found if t not in known and t not in self.tensors))

    def part(self, ld: Load, along: str, across: str, *, paged: bool = False) -> Part | None:
        """A load as columns of a tile of `along`; None: it has no such form. paged: it may be in pages."""
        t = self.tensors.get(ld.tensor)
        size = self.kernel.sizes[across]
        if t is None or t.role != "in" or not described(t) or not isinstance(size, Const):
            return None
        start = offset(ld.index[-1], across)
        plain = [e for e in ld.index[:-1] if dims_used(e) & {along, across}]
        fixed = [e for e in ld.index[:-1] if e not in plain]
        page = page_of(plain, along) if paged else 0
        others = fixed if not page else [e for e in ld.index[:-1] if e != page_index(along, page)]
        free = {d for e in others for d in dims_used(e)} - ({along} if page else set())
        if start is None or (plain != [Index(along)] and not page) or self.vectors(tuple(free)):
            return None
        if page and (piece(page, self.loop.tile) < LEAST_PIECE or self.loop.start is not None):
            return None  # a copy would be of several pages
        return Part(ld.tensor, ld.index[:-1], start, int(size.value), along == self.loop.dim, page)

    def buffer(self, name: str) -> ir.Buffer:
        """A buffer of the kernel or of its loop."""
        every = (*self.before, *self.loop.body, *self.after)
        return next(s.buffer for s in every if isinstance(s, ir.Alloc) and s.buffer.name == name)

    def vectors(self, dims: Sequence[str]) -> list[str]:
        """Dims of more than one index at a time."""
        sizes = self.kernel.sizes
        single = {t.dim for t in self.kernel.grid if t.tile == 1}
        single |= {d for d in dims if isinstance(e := sizes[d], Const) and int(e.value) == 1}
        return [d for d in dims if d not in single]

    def vectors_of(self, ld: Load) -> list[str]:
        """The same of the plain indices of a load."""
        return self.vectors([e.dim for e in ld.index if isinstance(e, Index)])


def piece(page: int, tile: int) -> int:
    """Of tiles side by side from 0 on, so many indices, from each multiple of it on, are in one page."""
    return math.gcd(page, tile)


def page_index(d: str, page: int) -> Expr:
    """The place in its page of an index."""
    return Call("mod", (Index(d), Const(page, DType.I64)))


def page_of(index: Sequence[Expr], d: str) -> int:
    """The extent P of pages: one of these indices is d % P, and the others have d in d // P alone; 0: there is none."""
    pages = [n for e in index if (n := _page(e, d))]
    if len(pages) != 1:
        return 0
    (page,) = pages
    number = Call("floordiv", (Index(d), Const(page, DType.I64)))
    rest = [e for e in index if e != page_index(d, page)]
    return page if not any(d in dims_used(substitute(e, {number: Const(0, DType.I64)})) for e in rest) else 0


def _page(e: Expr, d: str) -> int:
    match e:
        case Call("mod", (Index(x), Const(n, DType.I64))) if x == d:
            return int(n)
    return 0


def described(t: ir.TensorParam) -> bool:
    """Whether a tensor map may describe a tensor, by its axes: their strides are known at a call."""
    return t.unit_axis == len(t.shape) - 1 and 2 <= len(t.shape) <= MOST_AXES


def streams(kernel: ir.Kernel, groups: int) -> ir.For | None:
    """The kernel's only loop, if groups are asked for and no loop is inside of it."""
    loops = [s for s in kernel.body if isinstance(s, ir.For)]
    if groups < 1 or len(loops) != 1 or any(isinstance(s, ir.For) for s in loops[0].body):
        return None
    return loops[0]


def about(s: ir.Stmt) -> str:
    """The buffer that a statement brings to life or writes; empty: a store."""
    return s.buffer.name if isinstance(s, ir.Alloc) else writes(s)


def writes(s: ir.Stmt) -> str:
    """The buffer that a statement writes; empty: none."""
    return next(iter(written((s,))), "")


def is_product(e: Expr) -> bool:
    """Whether an expression multiplies two loads."""
    match e:
        case Call("mul", (Load(), Load())):
            return True
    return False


def offset(e: Expr, d: str) -> int | None:
    """c of the index d + c; None: it has another form."""
    match e:
        case Index(x) if x == d:
            return 0
        case Call("add", (Index(x), Const(n, DType.I64))) if x == d:
            return int(n)
    return None
