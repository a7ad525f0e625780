"""Products over rows, of groups of warps that own rows (`row_groups`): what a tile computes for each row and streamed
index, times columns of the rows, is added to memory for each streamed index (`block.both_ways`).

Each group has 64 of the rows, so what it computed goes through shared memory, where both find it: each multiplies all
rows for half of the columns. Streamed indices are rows of that product, whose left operand is read turned. A merge of
the same values reads them there, too, and keeps no registers for them. `across_full` says that both groups have
written, `across_empty` that both have read. Addresses of shared memory are computed in each turn of the loop
(`tf_apart`): kept through it they took 20 registers more than there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Index, Load
from tilefold.backends.triton.context import Context
from tilefold.backends.triton.dependent import ALONE
from tilefold.backends.triton.gluon_text import matrix_layout
from tilefold.backends.triton.names import identifier
from tilefold.backends.triton.parts import ROWS
from tilefold.backends.triton.render import Renderer
from tilefold.backends.triton.row_roles import Across, RowRoles
from tilefold.backends.triton.row_walk import Shared
from tilefold.backends.triton.scalar import narrowed
from tilefold.backends.triton.scope import Dim
from tilefold.errors import BackendError

#: Barriers of the shared memory, and the variable that says which of their phases is at hand.
BARRIERS, PHASE = ("across_full", "across_empty"), "crossed"


def memories(r: RowRoles) -> dict[str, str]:
    """What goes through shared memory, and the names of that."""
    return {name: f"across_{n}" for n, name in enumerate(dict.fromkeys(a.made for a in r.across))}


def memory_lines(r: RowRoles, kind: str) -> list[str]:
    """Shared memory and its barriers."""
    layout = "gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    lines = [
        f"{name} = gl.allocate_shared_memory({kind}, {[r.groups, ROWS, r.loop.tile]}, {layout})"
        for name in memories(r).values()
    ]
    for b in BARRIERS if r.across else ():
        lines.append(f"{b} = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())")
        lines.append(f"mbarrier.init({b}.index(0), count={r.groups})")
    return lines


class Crossing:
    """The products over rows of one group: lines in the order of use."""

    def __init__(self, of: Shared):
        self.of, self.r = of, of.r
        self.memories = memories(of.r)
        self.half = [of.r.rows[a.rows].lanes // of.r.groups for a in of.r.across]

    def begin(self) -> list[str]:
        """Before all tiles: layouts and zeros of results."""
        lines = [f"{PHASE} = 0"] if self.r.across else []
        for n, half in enumerate(self.half):
            lines.append(f"mma_across_{n}: tl.constexpr = {matrix_layout(half)}")
            lines.append(f"zero_{n} = tl.full([{self.r.loop.tile}, {half}], 0.0, tl.float32, mma_across_{n})")
        return lines

    def put(self, c: Context) -> list[str]:
        """What this group has computed, into shared memory."""
        lines = [f"mbarrier.wait(across_empty.index(0), {PHASE} ^ 1)"]
        frame = (self.r.row, self.r.loop.dim)
        for name, memory in self.memories.items():
            buffer = self.of.buffer(name)
            v = c.raw_load(Load(name, tuple(Index(d) for d in buffer.dims)), frame)
            if v.axes != frame:
                raise BackendError(f"{c.kernel.name}: {name} does not vary over rows and the stream")
            masked = c.masks(frame, frame)
            code = v.code if masked is None else f"tl.where({masked}, {v.code}, 0.0)"
            code = code if v.kind is self.r.dtype else narrowed(code, v.kind, self.r.dtype)
            lines.append(f"{memory}.index(GROUP).store({code})")
        return [*lines, "fence_async_shared()", "mbarrier.arrive(across_full.index(0), count=1)"]

    def products(self) -> list[str]:
        """Start the products, all rows times this group's columns."""
        lines = [f"mbarrier.wait(across_full.index(0), {PHASE})"]
        for n, a in enumerate(self.r.across):
            lanes = self.r.rows[a.rows].lanes
            for g in range(self.r.groups):
                at = f"here + {g}" if g else "here"
                left = f"{self.memories[a.made]}.index({at}).permute((1, 0))"
                right = f"{self.of.rows[a.rows]}.index({at}).reshape([{ROWS}, {lanes}])"
                right += f".slice(GROUP * {self.half[n]}, {self.half[n]}, dim=1)"
                held = f"added_{n}" if g else f"zero_{n}, use_acc=False"
                lines.append(f"added_{n} = warpgroup_mma({left}, {right}, {held}, is_async=True)")
        return lines

    def names(self) -> list[str]:
        """Of the results."""
        return [f"added_{n}" for n in range(len(self.r.across))]

    def add(self, outer: Context) -> None:
        """Add complete results to memory."""
        for n, a in enumerate(self.r.across):
            _Adding(self.of, outer, n, a, self.half[n]).store(a.store)

    def end(self) -> list[str]:
        """Both groups may write again when both have come here."""
        return ["mbarrier.arrive(across_empty.index(0), count=1)", f"{PHASE} = {PHASE} ^ 1"]


class _Adding(Renderer):
    """Stores of one product, streamed indices and this group's columns."""

    def __init__(self, of: Shared, outer: Context, number: int, a: Across, half: int):
        stream = of.r.loop.dim
        c = of.context((stream, a.columns))
        super().__init__(c, tf32=False, interleave=1, place=ALONE)
        c.layout = f"mma_across_{number}"
        c.scopes.stack = [outer.scopes.stack[-1].nested()]
        c.scopes.used = outer.scopes.used
        c.dims = {d: replace(x, level=0) for d, x in outer.dims.items() if d != of.r.row}
        size = of.kernel.sizes[a.columns]
        extent = int(size.value) if isinstance(size, Const) else 0
        base = c.scopes.once(f"GROUP * {half}", f"{a.columns}_own", 0)
        c.dims[a.columns] = Dim(a.columns, base, half, half, 0, None if extent == half * of.r.groups else str(extent))
        b = of.buffer(a.gemm.buf)
        c.buffers[b.name], c.buffer_names[b.name] = replace(b, dtype=DType.F32), f"added_{number}"
        c.held[b.name] = tuple(c.hold(d).lanes for d in b.dims)
        c.layouts.born(identifier(b.name))


def in_memory(r: RowRoles, made: str) -> str | None:
    """The shared memory of a value that goes through it."""
    return memories(r).get(made)


def shared_merges(r: RowRoles, which: Sequence[int]) -> list[int]:
    """Merges of values that go through shared memory."""
    return [n for n in which if in_memory(r, r.merges[n].made) is not None]
