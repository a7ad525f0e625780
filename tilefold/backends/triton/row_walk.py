"""How the functions of a kernel of row groups go over the grid, and the one that copies (`row_groups`).

`Copies` brings each group's rows, and tiles of the stream through a ring: the last tile first, and of each what lifts
read, then, of the one before, what merges read, which is the order of use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tilefold.algebra.expr import Expr, Size, dims_used
from tilefold.backends.triton.context import Context
from tilefold.backends.triton.dependent import ALONE
from tilefold.backends.triton.gluon_text import in_gluon
from tilefold.backends.triton.names import identifier
from tilefold.backends.triton.parts import BESIDE, ROWS, Part
from tilefold.backends.triton.render import Renderer
from tilefold.backends.triton.row_planes import Plane
from tilefold.backends.triton.row_roles import Out, RowRoles
from tilefold.backends.triton.row_shares import CACHED, LAST
from tilefold.backends.triton.scope import Dim
from tilefold.backends.triton.values import TRITON_TYPE
from tilefold.errors import BackendError
from tilefold.tile import ir
from tilefold.tile.uses import grows, shrinks

#: What a tile that is drawn is handed over in.
DRAWN_BY = ("drawn", "drawn_full", "drawn_empty")
#: Variables of the functions themselves.
_TAKEN = frozenset(
    {"r", "s", "n", "at", "turn", "lap", "tile", "tiles", "block", "rest", "zero", "before", "before_turn", "ahead"}
    | {"ahead_turn", "mma", "following", "counter", *DRAWN_BY}
)


class Shared:
    """What the functions of a kernel have in common: roles, names of memory, tensor maps."""

    def __init__(self, kernel: ir.Kernel, roles: RowRoles, context: Context):
        self.kernel, self.r, self.c = kernel, roles, context
        self.name = identifier(kernel.name)
        self.stages, self.draws = context.config.stages, context.config.draws
        self.maps: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.parts = [f"tile_{n}" for n in range(len(roles.parts))]
        self.rows = [f"rows_{n}" for n in range(len(roles.rows))]
        self.outs = [f"out_{n}" for n in range(len(roles.stored))]
        self.planes = [f"plane_{n}" for n in range(len(roles.planes))]

    def context(self, matrix: tuple[str, ...]) -> Context:
        """A fresh context; matrix: rows and columns of its layout."""
        c = Context(self.kernel, self.c.config, self.c.bins, wide=False, interpreted=False, nvidia=True)
        c.matrix = matrix
        c.gluon = True
        c.raw |= {*self.r.taken, *(m.made for m in self.r.merges)}
        return c

    def buffer(self, name: str) -> ir.Buffer:
        """A buffer of the whole kernel."""
        every = (*self.kernel.body, *self.r.loop.body)
        return next(s.buffer for s in every if isinstance(s, ir.Alloc) and s.buffer.name == name)

    def buffers(self, part: int) -> int:
        """Of a streamed part."""
        return 1 if self.r.single and part in self.r.early else self.stages

    def map_of(self, p: Part, tile: int) -> str:
        """The tensor map of a part: one for each tensor and shape of box."""
        along = self.r.loop.dim if p.streamed else self.r.row
        rows, lanes = p.piece(tile), p.lanes
        lanes = min(lanes, BESIDE) if rows < tile else lanes
        return self._map(p.tensor, (*(rows if p.runs_along(e, along) else 1 for e in p.index), lanes))

    def map_out(self, o: Out) -> str:
        """The tensor map of a result."""
        return self._map(o.part.tensor, o.box)

    def _map(self, tensor: str, box: tuple[int, ...]) -> str:
        for name, known in self.maps.items():
            if known == (tensor, box):
                return name
        name = f"d_{self.c.names[tensor][2:]}_{len(self.maps)}"
        self.maps[name] = (tensor, box)
        return name


class Role(Renderer):
    """What both functions have in common: the walk over the grid, the loop's bounds, the ring."""

    def __init__(self, of: Shared, c: Context):
        super().__init__(c, tf32=False, interleave=1, place=ALONE)
        c.scopes.used |= _TAKEN
        self.of, self.r = of, of.r
        self.tile, self.stages = of.r.loop.tile, of.stages
        self.block = ROWS * of.r.groups

    def emit(self, *lines: str) -> None:
        for line in lines:
            self.c.scopes.emit(line)

    def buffer_of(self, which: str, s: str, turn: str) -> tuple[str, str]:
        """Buffer and phase of early or late parts in stage s. `lap`: tiles so far, where early ones have one buffer."""
        return ("0", "lap") if which == "early" and self.r.single else (s, turn)

    @contextmanager
    def under(self, header: str) -> Iterator[None]:
        """Lines in a block of their own."""
        self.c.scopes.open()
        yield
        self.c.scopes.close(header)

    @contextmanager
    def some(self) -> Iterator[None]:
        """Lines for blocks of rows that have a tile."""
        if self.r.never_empty:
            yield
        else:
            with self.under("if tiles > 0:"):
                yield

    def position(self) -> None:
        """Indices of the tile of the grid at hand, in the scope at hand; rows those of the whole block."""
        once, here = self.c.scopes.once, self.c.scopes.here
        others = [t for t in reversed(self.c.kernel.grid) if t.tile == 1]
        sizes = {t.dim: self.c.size(t.dim).code for t in self.c.kernel.grid}
        row = self.r.row
        blocks = _cdiv(sizes[row], self.block)
        fewer = shrinks(self.c.kernel.body, row)
        if fewer or grows(self.c.kernel.body, row):
            width, last = self._side_by_side(sizes), LAST if self.of.draws else 0
            count = " * ".join(sizes[t.dim] for t in others) or "1"
            self.emit(f"block, rest = tf_longest_first(tile, {blocks}, {count}, {width}, {last})")
            if fewer:
                self.emit(f"block = {blocks} - 1 - block")
        else:
            self.emit(f"block = tile % ({blocks})", f"rest = tile // ({blocks})")
        left = "rest"
        for n, t in enumerate(others):
            at = left if n == len(others) - 1 else once(f"{left} % {sizes[t.dim]}", f"b_{t.dim}", here)
            left = once(f"{left} // {sizes[t.dim]}", "rest", here) if n < len(others) - 1 else left
            self.c.enter(t.dim, at, 1, sizes[t.dim], here)
        self.c.dims[row] = Dim(row, once(f"block * {self.block}", f"{row}0", here), ROWS, self.block, here, sizes[row])
        if _divides(self.block, sizes[row]):
            self.c.dims[row].stop = None

    def _side_by_side(self, sizes: Mapping[str, str]) -> str:
        """Heads (or what else is parallel) whose streamed tensors a cache holds together."""
        stream = self.r.loop.dim
        bytes_ = sum(p.lanes for p in self.r.parts) * self.r.dtype.nbytes
        count = self.c.size(stream).code
        if count.isdigit():
            return str(max(1, CACHED // max(1, bytes_ * int(count))))
        return f"tl.maximum({CACHED // bytes_} // tl.maximum({count}, 1), 1)"

    def bounds(self) -> tuple[str, str]:
        """First index of the loop and one past the last; names the number of tiles."""
        lo, hi = self.loops.bounds(self.r.loop)
        self.emit(f"tiles = tl.cdiv(tl.maximum({hi} - {lo}, 0), {self.tile})")
        return lo, hi

    @contextmanager
    def each_tile(self, *, copying: bool) -> Iterator[None]:
        """Lines for each tile of the grid that this block goes through, `tile`, the r-th of the block."""
        sizes = [(t, self.c.size(t.dim).code) for t in self.c.kernel.grid]
        parts = [n if t.tile == 1 else f"({_cdiv(n, self.block)})" for t, n in sizes]
        total = math.prod(int(p) for p in parts) if all(p.isdigit() for p in parts) else " * ".join(parts)
        if not self.of.draws:
            with self.under(f"for r in range(tf_rounds({total})):"):
                self.emit("tile = tf_tile(r)")
                yield
            return
        of = ", ".join(DRAWN_BY)
        self.emit("r = 0")
        if copying:
            self.emit("tile = tl.program_id(0)", f"tf_give(tile, r, {of})")
        else:
            self.emit(f"tile = tf_take(r, {of})")
        with self.under(f"while tile < {total}:"):
            if copying:
                self.emit(
                    f"following = tf_draw(counter, {total}) + tl.num_programs(0)", f"tf_give(following, r + 1, {of})"
                )
            yield
            self.emit("r += 1", "tile = following" if copying else f"tile = tf_take(r, {of})")

    def done(self) -> list[str]:
        """The function's lines."""
        return self.c.scopes.finished()


class Copies(Role):
    def lines(self) -> list[str]:
        for d in self.c.kernel.sizes:
            if all(d != t.dim for t in self.c.kernel.grid):
                self.c.whole(d)
        self.emit("s = 0", "turn = 0", *["lap = 0"] * self.r.single)
        with self.each_tile(copying=True):
            self.position()
            lo, self.end = self.bounds()
            row = self.c.hold(self.r.row).base
            for g in range(self.r.groups):
                bytes_ = sum(p.lanes for p in self.r.rows) * ROWS * self.r.dtype.nbytes
                self.emit(
                    f"mbarrier.wait(rows_empty.index({g}), (r & 1) ^ 1)",
                    f"mbarrier.expect(rows_full.index({g}), {bytes_})",
                )
                for n, p in enumerate(self.r.rows):
                    at = f"{row} + {g * ROWS}" if g else row
                    places = self._places(p, ROWS, at)
                    self._copy(p, ROWS, places, f"rows_full.index({g})", f"{self.of.rows[n]}.index({g})")
            with self.some():
                self._ring("" if lo == "0" else f"{lo} + ")
        return self.done()

    def _ring(self, lo: str) -> None:
        """All tiles, the last first: of each what lifts read, of the one before what merges read."""
        self.emit(f"at = {lo}(tiles - 1) * {self.tile}")
        if self.r.shares:
            self._bring_all("at", "s", "turn")
        else:
            self._bring("early", "at", "s", "turn")
        with self.under("for n in range(1, tiles):"):
            self.emit("before, before_turn = s, turn", f"s, turn = tf_advance(s, turn, {self.stages})")
            if self.r.shares:
                self._bring_all(f"at - {self.tile}", "s", "turn")
            else:
                self._bring("early", f"at - {self.tile}", "s", "turn")
                self._bring("late", "at", "before", "before_turn")
            self.emit(f"at -= {self.tile}")
        if not self.r.shares:
            self._bring("late", "at", "s", "turn")
        self.emit(f"s, turn = tf_advance(s, turn, {self.stages})")

    def _bring_all(self, at: str, s: str, turn: str) -> None:
        """What a tile reads, in the order in which lifts do."""
        for which in ("late", "early") if self.r.lifts[0].part in self.r.late else ("early", "late"):
            self._bring(which, at, s, turn)

    def _bring(self, which: str, at: str, s: str, turn: str) -> None:
        numbers = self.r.early if which == "early" else self.r.late
        planes = self.r.planes if which == self.r.with_planes else ()
        bytes_ = sum(self.r.parts[n].lanes for n in numbers) * self.tile * self.r.dtype.nbytes
        bytes_ += sum(p.nbytes for p in planes) * self.r.groups
        if not numbers:
            return
        s, turn = self.buffer_of(which, s, turn)
        places = [self._places(self.r.parts[n], self.tile, at) for n in numbers]  # pages are looked up before a wait
        self.emit(
            f"mbarrier.wait({which}_empty.index({s}), {turn} ^ 1)",
            f"mbarrier.expect({which}_full.index({s}), {bytes_})",
        )
        for n, where in zip(numbers, places, strict=True):
            self._copy(self.r.parts[n], self.tile, where, f"{which}_full.index({s})", f"{self.of.parts[n]}.index({s})")
        for n, p in enumerate(planes):
            self._plane(p, self.of.planes[n], at, s, f"{which}_full.index({s})")
        if turn == "lap":
            self.emit("lap = lap ^ 1")

    def _plane(self, p: Plane, to: str, at: str, s: str, bar: str) -> None:
        """Copies of a plane's tile, one for each group's rows."""
        row, d = self.c.hold(self.r.row).base, self.of.map_of(p.part, ROWS)
        column = f"{at} + {p.part.start}" if p.part.start else at
        for g in range(self.r.groups):
            (place,) = self._places(p.part, ROWS, f"{row} + {g * ROWS}" if g else row)
            position = ", ".join((*place, column))
            self.emit(
                f"tma.async_copy_global_to_shared({d}, [{position}], {bar}, {to}.index({plane_at(self.r, s, g)}))"
            )

    def _copy(self, p: Part, tile: int, places: Sequence[Sequence[str]], bar: str, to: str) -> None:
        """Copies of a part, one from each of these places."""
        d = self.of.map_of(p, tile)
        box = self.of.maps[d][1]
        whole = len(places) == 1
        count, columns = len(places) * p.lanes // box[-1], range(0, p.lanes, box[-1])
        kind = in_gluon(TRITON_TYPE[self.r.dtype])
        for c, column in enumerate(columns):
            for n, at in enumerate(places):
                here = f"._reinterpret({kind}, {[count, *box]}, {d}.layout).index({c * len(places) + n})"
                position = ", ".join((*at, str(p.start + column)))
                self.emit(f"tma.async_copy_global_to_shared({d}, [{position}], {bar}, {to}{'' if whole else here})")

    def _places(self, p: Part, tile: int, start: str) -> list[list[str]]:
        """Code of the positions, without the column, from which a tile is copied: of each page that it has some of.
        What begins behind the end of the stream is another copy of its last piece: no page may be there."""
        along = self.r.loop.dim if p.streamed else self.r.row
        if not p.page:
            return [[start if p.runs_along(e, along) else scalar(self.c, e) for e in p.index]]
        sizes, step = self.c.tensors[p.tensor].shape, p.piece(tile)
        last = ""
        if step < tile and not self.loops.divisible(self.r.loop.stop or Size(along), tile):
            last = self.c.scopes.once(f"({self.end} - 1) // {step} * {step}", "last_piece", self.c.scopes.here)
        found = []
        for n in range(0, tile, step):
            base, at = self.c.scopes.fresh(f"{along}0"), f"{start} + {n}" if n else start
            self.emit(f"{base} = " + (f"tl.minimum({at}, {last})" if n and last else at))
            self.c.dims[along] = Dim(along, base, 1, 1, self.c.scopes.here)
            found.append([self._place(e, size, along) for e, size in zip(p.index, sizes, strict=False)])
        return [[self._held(code) for code in place] for place in found]  # all of the table's elements first

    def _held(self, code: str) -> str:
        """A variable of 32 bits for what the copies of several columns need."""
        if not code.startswith("tf_place("):
            return code
        name = self.c.scopes.fresh("place")
        self.emit(f"{name} = {code}")
        return name

    def _place(self, e: Expr, size: Expr, along: str) -> str:
        """Code of a position of a page that a table may give, of 32 bits; outside of the tensor where it does not
        exist."""
        code = scalar(self.c, e)
        return f"tf_place({code}, {scalar(self.c, size)})" if along in dims_used(e) else code


def plane_at(r: RowRoles, s: str, group: int | str) -> str:
    """Number of the buffer of a plane's tile in stage s of the ring."""
    return f"{s} * {r.groups} + {group}"


def scalar(c: Context, e: Expr) -> str:
    """Code of a position; BackendError: it is no number."""
    v = c.expressions.value(c.settled(e), ())
    if v.axes:
        raise BackendError(f"{c.kernel.name}: a position that is no number")
    return v.code


def _cdiv(n: str, by: int) -> str:
    return str(-(-int(n) // by)) if n.isdigit() else f"tl.cdiv({n}, {by})"


def _divides(by: int, n: str) -> bool:
    return n.isdigit() and int(n) % by == 0
