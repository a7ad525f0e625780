"""The roles of a kernel (`roles`) as Gluon source: Triton's language with explicit layouts, barriers and warp groups.

Three functions run side by side in a thread block. `copies` brings tiles into a ring of `stages` buffers, in the parts
that readers take (one of four warps' columns each, and what only scores need); a part is free again when all of its
readers have arrived. `scores` multiplies, reduces, and hands over probabilities and factors; `sums`, once a group,
rescales its columns and adds. Two barriers order each hand-over: given, taken. Expressions, masks, addresses and
stores are those of the usual renderer, in the layout of the matrix unit's results.

Where the probabilities lie is computed by each group for itself (`tf_apart`): computed once, before the groups branch
off, it was used wrongly by the assembler (`machine_code`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, Index, Load
from tilefold.backends.triton.context import Context
from tilefold.backends.triton.dependent import ALONE, Place
from tilefold.backends.triton.gluon_text import COPYING, HEADER, WARPS, in_gluon, matrix_layout, mentions
from tilefold.backends.triton.names import identifier
from tilefold.backends.triton.parts import ROWS, Part
from tilefold.backends.triton.prelude import functions
from tilefold.backends.triton.render import Rendered, Renderer
from tilefold.backends.triton.roles import Roles, readers
from tilefold.backends.triton.scalar import narrowed
from tilefold.backends.triton.scope import Dim
from tilefold.backends.triton.values import TRITON_TYPE
from tilefold.errors import BackendError
from tilefold.tile import ir
from tilefold.tile.uses import read_raw, rounded

#: Registers of a thread of a group with columns beside those of its columns.
BESIDE = 40

#: Barriers: of parts (a row of `stages` each), then one of each kind.
_OF_PARTS, _SINGLE = ("full", "empty"), ("given", "taken", "have_rows", "done")


def render_groups(kernel: ir.Kernel, roles: Roles, context: Context, place: Place = ALONE) -> Rendered:
    """The Gluon source of a kernel; `context` as for `render`, not yet used. BackendError: not expressible there.

    place: among the kernels of its call. All roles start after the entry's first statements, the waits among them.
    """
    return _Groups(kernel, roles, context, place).render()


class _Names:
    """Names of what is in shared memory."""

    def __init__(self, kernel: ir.Kernel, r: Roles, stages: int):
        self.parts = [f"tile_{n}" for n in range(len(r.parts))]
        self.rows = [f"rows_{n}" for n in range(len(r.rows))]
        self.factors = {f: f"factor_{n}" for n, f in enumerate(r.factors)}
        self.finals = {f: f"final_{n}" for n, f in enumerate(r.finals)}
        self.stages = stages

    def part(self, n: int, width: int, tile: int) -> str:
        """A part of the tile at hand as a matrix."""
        return f"{self.parts[n]}.index(s).reshape([{tile}, {width}])"

    def bar(self, kind: str, n: int) -> str:
        """The barrier of a part in the stage at hand."""
        return f"{kind}.index({n * self.stages} + s)" if n else f"{kind}.index(s)"


class _Groups:
    def __init__(self, kernel: ir.Kernel, roles: Roles, context: Context, place: Place):
        self.kernel, self.r, self.c, self.place = kernel, roles, context, place
        self.names = _Names(kernel, roles, context.config.stages)
        self.name = identifier(kernel.name)
        self.maps: dict[str, tuple[str, tuple[int, ...]]] = {}

    def render(self) -> Rendered:
        # all roles must see the loop: the order of thread blocks follows from its bounds
        copies = _Copies(self, self._context((), (replace(self.r.loop, body=()),))).lines()
        scores = _Scores(self, self._context((self.r.row, self.r.loop.dim), self._scores_body())).lines()
        sums = _Sums(self, self._context((self.r.row, self.r.columns), self._sums_body())).lines()
        args = self._arguments()
        passed = {
            role: [a for a in (*args, *self._shared()) if mentions("\n".join(lines), a)]
            for role, lines in (("copies", copies), ("scores", scores), ("sums", sums))
        }
        of_a_share = ["tile", "PART: gl.constexpr", "GROUP: gl.constexpr"]
        parts = [
            self._function("copies", passed["copies"], copies),
            self._function("scores", passed["scores"], scores),
            self._function("sums", [*passed["sums"], *of_a_share], sums),
            self._entry(args, passed),
        ]
        code = "\n\n\n".join(parts) + "\n"
        source = HEADER + in_gluon(functions(code)) + "\n\n" + code
        grid = tuple(self.kernel.grid)
        return Rendered(source, self.name, tuple(args), grid, {}, self.maps, self.place, groups=self.r.groups)

    def _context(self, matrix: tuple[str, ...], body: tuple[ir.Stmt, ...]) -> Context:
        c = Context(
            replace(self.kernel, body=body), self.c.config, self.c.bins, wide=False, interpreted=False, nvidia=True
        )
        c.matrix = matrix
        c.gluon = True
        c.raw |= read_raw(self.kernel.body) | {self.r.probabilities, *self.r.factors, *self.r.finals}
        c.rounded = rounded(self.kernel.body)
        return c

    def _scores_body(self) -> tuple[ir.Stmt, ...]:
        return (*self.r.before, replace(self.r.loop, body=self.r.scores), *self.r.after)

    def _sums_body(self) -> tuple[ir.Stmt, ...]:
        return (*self.r.sums_before, replace(self.r.loop, body=self.r.sums), *self.r.sums_after)

    def buffer(self, name: str) -> ir.Buffer:
        """A buffer of the whole kernel."""
        every = (*self.kernel.body, *self.r.loop.body)
        return next(s.buffer for s in every if isinstance(s, ir.Alloc) and s.buffer.name == name)

    def map_of(self, p: Part, tile: int) -> str:
        """The tensor map of a part: one for each tensor and shape of box."""
        box = (*(tile if e == Index(self._along(p)) else 1 for e in p.index), p.width)
        for name, known in self.maps.items():
            if known == (p.tensor, box):
                return name
        name = f"d_{self.c.names[p.tensor][2:]}_{len(self.maps)}"
        self.maps[name] = (p.tensor, box)
        return name

    def _along(self, p: Part) -> str:
        return self.r.loop.dim if p.streamed else self.r.row

    def _arguments(self) -> list[str]:
        args = [self.c.names[t.name] for t in self.kernel.tensors]
        for t in self.kernel.tensors:
            args += [self.c.stride(t, a) for a in range(len(t.shape)) if a != t.unit_axis]
        return [*args, *(f"sym_{s}" for s in self.kernel.syms), *self.maps]

    def _shared(self) -> list[str]:
        n = self.names
        return [*n.parts, *n.rows, "made", *n.factors.values(), *n.finals.values(), *_OF_PARTS, *_SINGLE]

    def _function(self, role: str, args: Sequence[str], lines: Sequence[str]) -> str:
        head = [f"@gluon.jit\ndef {self.name}_{role}({', '.join(args)}):"]
        if role == "scores":
            head += [f"    # {line}" for line in self.kernel.listing.splitlines()]
        return "\n".join(head + ["    " + in_gluon(line) for line in lines])

    def _entry(self, args: Sequence[str], passed: Mapping[str, Sequence[str]]) -> str:
        """Memory and barriers, then all roles at once, each with what it uses (`passed`)."""

        def given(role: str, *more: object) -> str:
            return f"    ({self.name}_{role}, ({''.join(f'{a}, ' for a in (*passed[role], *more))})),"

        r, stages, kind = self.r, self.names.stages, in_gluon(TRITON_TYPE[self.r.dtype])
        tile = r.loop.tile
        lines = self.place.lines()
        for n, p in enumerate(r.parts):
            d = self.map_of(p, tile)
            box = [stages, *self.maps[d][1]]
            lines.append(f"{self.names.parts[n]} = gl.allocate_shared_memory({kind}, {box}, {d}.layout)")
        for n, p in enumerate(r.rows):
            d = self.map_of(p, ROWS)
            lines.append(
                f"{self.names.rows[n]} = gl.allocate_shared_memory({kind}, {list(self.maps[d][1])}, {d}.layout)"
            )
        swizzled = f"gl.NVMMASharedLayout.get_default_for([{ROWS}, {tile}], {kind})"
        lines += [
            f"turned: gl.constexpr = {swizzled}",
            f"made = gl.allocate_shared_memory({kind}, [1, {ROWS}, {tile}], turned)",
            "line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])",
        ]
        for name in (*self.names.factors.values(), *self.names.finals.values()):
            lines.append(f"{name} = gl.allocate_shared_memory(gl.float32, [{ROWS}], line)")
        for b in (*_OF_PARTS, *_SINGLE):
            count = stages * len(r.parts) if b in _OF_PARTS else 1
            lines.append(f"{b} = gl.allocate_shared_memory(gl.int64, [{count}, 1], mbarrier.MBarrierLayout())")
        for n in range(len(r.parts)):
            for s in range(stages):
                lines.append(f"mbarrier.init(full.index({n * stages + s}), count=1)")
                lines.append(f"mbarrier.init(empty.index({n * stages + s}), count={readers(r, n)})")
        lines += [
            "mbarrier.init(given.index(0), count=1)",
            f"mbarrier.init(taken.index(0), count={r.groups})",
            "mbarrier.init(have_rows.index(0), count=1)",
            "mbarrier.init(done.index(0), count=1)",
            "fence_async_shared()",
            "gl.warp_specialize([",
            given("scores"),
        ]
        lines += [given("sums", self.names.parts[n], n, g) for g, n in enumerate(r.shares)]
        registers = -(-(r.width * ROWS // (32 * WARPS) + BESIDE) // 8) * 8
        lines += [
            given("copies"),
            f"], {[WARPS] * r.groups + [1]}, {[registers] * r.groups + [COPYING]})",
        ]
        head = f"@gluon.jit\ndef {self.name}({', '.join(args)}):"
        return "\n".join([head, *("    " + line for line in lines)])


class _Role(Renderer):
    """What the functions have in common: the grid, the loop's bounds."""

    def __init__(self, of: _Groups, c: Context):
        super().__init__(c, tf32=False, interleave=1, place=ALONE)
        self.of, self.r, self.names = of, of.r, of.names
        self.tile = of.r.loop.tile

    def begin(self) -> None:
        """Positions of this thread block."""
        self.grid(tuple(self.c.kernel.grid))
        for d in self.c.kernel.sizes:
            self.c.whole(d)

    def bounds(self) -> tuple[str, str]:
        """First index of the loop, and the number of tiles."""
        lo, hi = self.loops.bounds(self.r.loop)
        count = f"tl.cdiv(tl.maximum({hi} - {lo}, 0), {self.tile})"
        return lo, self.c.scopes.once(count, "tiles", self.c.scopes.here)

    def emit(self, *lines: str) -> None:
        for line in lines:
            self.c.scopes.emit(line)

    def at(self, *, free: bool = False) -> None:
        """Stage of tile `it`, and the turn in which it is full, or free."""
        n = self.names.stages
        self.emit(f"s = it % {n}", f"turn = ((it // {n}) & 1) ^ 1" if free else f"turn = (it // {n}) & 1")

    def done(self) -> list[str]:
        """The function's lines."""
        return self.c.scopes.finished()

    def load_of(self, name: str) -> Load:
        """All of a buffer."""
        b = self.of.buffer(name)
        return Load(name, tuple(Index(d) for d in b.dims))

    def matrix(self, columns: int) -> None:
        """The layout of the matrix unit's results."""
        self.emit(f"mma: tl.constexpr = {matrix_layout(columns)}")


class _Copies(_Role):
    def lines(self) -> list[str]:
        self.begin()
        lo, tiles = self.bounds()
        row = self.c.hold(self.r.row).base
        total = sum(p.width for p in self.r.rows) * ROWS * self.r.dtype.nbytes
        self.emit(f"mbarrier.expect(have_rows.index(0), {total})")
        for n, p in enumerate(self.r.rows):
            self._copy(p, ROWS, row, "have_rows.index(0)", self.names.rows[n])
        self.c.scopes.open()
        self.at(free=True)
        start = f"it * {self.tile}" if lo == "0" else f"{lo} + it * {self.tile}"
        # what only scores read is free first
        for n in sorted(range(len(self.r.parts)), key=lambda n: (n in self.r.shares, n)):
            p = self.r.parts[n]
            self.emit(
                f"mbarrier.wait({self.names.bar('empty', n)}, turn)",
                f"mbarrier.expect({self.names.bar('full', n)}, {p.width * self.tile * self.r.dtype.nbytes})",
            )
            self._copy(p, self.tile, start, self.names.bar("full", n), f"{self.names.parts[n]}.index(s)")
        self.c.scopes.close(f"for it in range({tiles}):")
        return self.done()

    def _copy(self, p: Part, tile: int, start: str, bar: str, to: str) -> None:
        along = Index(self.r.loop.dim if p.streamed else self.r.row)
        at = [*(start if e == along else self._scalar(e) for e in p.index), str(p.start)]
        self.emit(f"tma.async_copy_global_to_shared({self.of.map_of(p, tile)}, [{', '.join(at)}], {bar}, {to})")

    def _scalar(self, e: Expr) -> str:
        v = self.c.expressions.value(self.c.settled(e), ())
        if v.axes:
            raise BackendError(f"{self.c.kernel.name}: a position that is no number")
        return v.code


class _Scores(_Role):
    def lines(self) -> list[str]:
        self.matrix(self.tile)
        self.begin()
        self.lo, _ = self.bounds()
        self.emit(f"zero = tl.full([{ROWS}, {self.tile}], 0.0, tl.float32, mma)")
        self.emit("mbarrier.wait(have_rows.index(0), 0)")
        self.body(self.c.kernel.body)
        if self.r.finals:
            for f, to in self.names.finals.items():
                self.emit(f"{to}.store({self._row(f)})")
            self.emit("mbarrier.arrive(done.index(0), count=1)")
        return self.done()

    def body(self, stmts: Sequence[ir.Stmt]) -> None:
        if tuple(stmts) != self.r.scores:
            super().body(stmts)
            return
        self.emit(f"it = ({self.c.hold(self.r.loop.dim).base} - {self.lo}) // {self.tile}")
        self.at()
        parts: list[int] = []
        for n, s in enumerate(stmts):
            if isinstance(s, ir.Gemm):
                parts += self._product(s)
                if not (n + 1 < len(stmts) and _continues(stmts[n + 1], s)):
                    self._finish(s, parts)
                    parts = []
            else:
                self.stmt(s)
        self._give()

    def _product(self, s: ir.Gemm) -> list[int]:
        pairs = next(pairs for g, pairs in self.r.products if g == s)
        name, first = self.c.buffer_names[s.buf], not s.accumulate
        for a, n in pairs:
            width = self.r.parts[n].width
            rows = f"{self.names.rows[a]}.reshape([{ROWS}, {width}])"
            tile = f"{self.names.part(n, width, self.tile)}.permute((1, 0))"
            held = "zero, use_acc=False" if first else name
            self.emit(
                f"mbarrier.wait({self.names.bar('full', n)}, turn)",
                f"{name} = warpgroup_mma({rows}, {tile}, {held}, is_async=True)",
            )
            first = False
        return [n for _, n in pairs]

    def _finish(self, s: ir.Gemm, parts: Sequence[int]) -> None:
        name = self.c.buffer_names[s.buf]
        self.c.layouts.wrote(s.buf, frozenset({False}))
        self.c.assign(s.buf, f"warpgroup_mma_wait(0, deps=[{name}])")
        for n in dict.fromkeys(parts):
            self.emit(f"mbarrier.arrive({self.names.bar('empty', n)}, count=1)")

    def _give(self) -> None:
        """Hand over what the state's columns need of this tile."""
        frame = (self.r.row, self.r.loop.dim)
        v = self.c.raw_load(self.load_of(self.r.probabilities), frame)
        masked = self.c.masks(frame[1:], frame)
        code = v.code if masked is None else f"tl.where({masked}, {v.code}, 0.0)"
        factors = [(to, self._row(f)) for f, to in self.names.factors.items()]
        self.emit("mbarrier.wait(taken.index(0), (it & 1) ^ 1)")
        self.emit(f"made.index(0).store({code if v.kind is self.r.dtype else narrowed(code, v.kind, self.r.dtype)})")
        for to, value in factors:
            self.emit(f"{to}.store({value})")
        self.emit("fence_async_shared()", "mbarrier.arrive(given.index(0), count=1)")

    def _row(self, name: str) -> str:
        v = self.c.expressions.value(self.c.settled(self.load_of(name)), (self.r.row,))
        if v.axes != (self.r.row,) or v.kind is not DType.F32:
            raise BackendError(f"{self.c.kernel.name}: {name} is not a float32 a row")
        return v.code


class _Sums(_Role):
    def lines(self) -> list[str]:
        r, width = self.r, self.r.width
        self.matrix(width)
        self.emit(f"c0 = GROUP * {width}")
        self.c.dims[r.columns] = Dim(r.columns, "c0", width, width, 0, None)
        self.begin()
        _, tiles = self.bounds()
        self.body(r.sums_before)
        self.emit("held = made.index(tf_apart())")
        self.c.scopes.open()
        self.at()
        full, empty = (f"{kind}.index(PART * {self.names.stages} + s)" for kind in ("full", "empty"))
        self.emit(f"mbarrier.wait({full}, turn)", "mbarrier.wait(given.index(0), it & 1)")
        for f, where in self.names.factors.items():
            self._take(f, where)
        for s in r.sums:
            if isinstance(s, ir.Gemm):
                name = self.c.buffer_names[s.buf]
                tile = f"tile.index(s).reshape([{self.tile}, {width}])"
                self.emit(f"{name} = warpgroup_mma(held, {tile}, {name}, is_async=True)")
                self.c.assign(s.buf, f"warpgroup_mma_wait(0, deps=[{name}])")
            else:
                self.stmt(s)
        self.emit(f"mbarrier.arrive({empty}, count=1)", "mbarrier.arrive(taken.index(0), count=1)")
        self.c.scopes.close(f"for it in range({tiles}):")
        self.c.scopes.forget(self.c.buffer_names[r.wide])
        if r.finals:
            self.emit("mbarrier.wait(done.index(0), 0)")
            for f, where in self.names.finals.items():
                self._take(f, where)
        self.body(r.sums_after)
        return self.done()

    def _take(self, name: str, where: str) -> None:
        """A value a row that the first group computed."""
        self.stmt(ir.Alloc(self.of.buffer(name)))
        self.c.assign(name, f"{where}.load(tl.SliceLayout(1, mma))")


def _continues(s: ir.Stmt, before: ir.Gemm) -> bool:
    return isinstance(s, ir.Gemm) and s.buf == before.buf and s.accumulate
