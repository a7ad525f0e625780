"""What a group of warps does that owns rows (`row_groups`): lifts, elementwise parts, merges, one tile apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, Size
from tilefold.backends.triton.extremes import numbers
from tilefold.backends.triton.facts import certain
from tilefold.backends.triton.gluon_text import in_gluon, matrix_layout
from tilefold.backends.triton.loops import nested
from tilefold.backends.triton.names import identifier
from tilefold.backends.triton.parts import ROWS, about
from tilefold.backends.triton.row_apart import apart
from tilefold.backends.triton.row_bounds import most_turns
from tilefold.backends.triton.row_brought import asked_ahead, brought
from tilefold.backends.triton.row_lines import Line, Streamed, by_thread, lines_of
from tilefold.backends.triton.row_phases import crossing, phases, results, running
from tilefold.backends.triton.row_roles import Lift
from tilefold.backends.triton.row_states import States, prepare, sum_beside
from tilefold.backends.triton.row_walk import Role, plane_at
from tilefold.backends.triton.scalar import narrowed
from tilefold.backends.triton.scope import Dim, Known
from tilefold.backends.triton.values import TRITON_TYPE
from tilefold.errors import BackendError
from tilefold.tile import ir
from tilefold.tile.uses import allocated, expressions

#: Names of types in the assembler's language.
_PTX = {DType.BF16: "bf16", DType.F16: "f16"}
#: Values of an element that a later phase reads may be so many, where the last merges are a tile behind: one takes the
#: registers of the lift's result.
CROSSING = 1
#: And so many values along the stream (a maximum, a sum and a difference were 12 to 20 % slower on an H200).
LINES = 2


class Folds(Role):
    def lines(self) -> list[str]:
        r = self.r
        if r.several:  # quotients are many, and take fewer registers than the products' results
            self.c.expressions.leaves = replace(self.c.expressions.leaves, inverses=True)
        elementwise = r.elementwise
        self.lines_of_a_tile: tuple[Line, ...] = ()
        if r.several:
            singles = {t.dim for t in self.c.kernel.grid if t.tile == 1}
            elementwise = apart(r.elementwise, r.row, r.loop.dim)
            elementwise, self.lines_of_a_tile = lines_of(elementwise, r.loop.dim, singles, self.c.kernel.tensors)
        if self.lines_of_a_tile:
            self.emit(f"by_thread: tl.constexpr = {by_thread()}")
        self.phases = phases(elementwise, results(r))
        self.later = [n for n in range(len(r.merges)) if r.behind or not self._ready(n, len(self.phases) - 2)]
        some = 0 < len(self.later) < len(r.merges) and not r.behind and r.shares and not r.repairs
        room = len(crossing(self.phases)) <= CROSSING and len(self.lines_of_a_tile) <= LINES
        self.trails = some and room
        self.emit(f"mma: tl.constexpr = {matrix_layout(self.tile)}")
        self.columns = {m.columns: (n, r.parts[m.part].lanes) for n, m in enumerate(r.merges)}
        for n, lanes in self.columns.values():
            self.emit(
                f"mma_{n}: tl.constexpr = {matrix_layout(lanes)}",
                f"held_{n}: tl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma_{n}, k_width=2)",
            )
        for d in self.c.kernel.sizes:
            if all(d != t.dim for t in self.c.kernel.grid):
                self.c.whole(d)
        self.emit(f"zero = tl.full([{ROWS}, {self.tile}], 0.0, tl.float32, mma)", "s = 0", "turn = 0")
        self.emit(*["lap = 0"] * r.single)
        with self.each_tile(copying=False):
            self._tile()
        if r.stored:
            self.emit("tma.store_wait(0)")
        return self.done()

    def _tile(self) -> None:
        """One block of rows: begin, all tiles of the stream, finish."""
        r, c = self.r, self.c
        self.position()
        lo, hi = self.bounds()
        bounds = (r.loop.start or Const(0, DType.I64), r.loop.stop or Size(r.loop.dim))
        exact = all(self.loops.divisible(e, self.tile) for e in bounds)
        whole = c.hold(r.row)
        base = c.scopes.once(f"{whole.base} + GROUP * {ROWS}", f"{r.row}_own", c.scopes.here)
        c.dims[r.row] = Dim(r.row, base, ROWS, ROWS, c.scopes.here, whole.stop)
        outer = frozenset(c.dims) - {r.loop.dim}
        body = expressions(r.loop.body)
        found = certain(body, r.loop.dim, outer, numbers(body, c.data, r.row, ROWS))
        ahead = "tiles" if exact and not r.behind and not self.trails else "tiles - 1"
        parts = self._stretches(found.starts, found.stops, lo, hi, ahead)
        settled, known = dict(found.conditions), c.known
        steps = [(count, last, settled if n == 1 else {}) for n, (count, last) in enumerate(parts)]
        led = ahead == "tiles - 1"
        turns = most_turns(c.kernel, r.loop, r.row, r.groups, found.starts, found.stops, led=led)
        if turns is not None:  # a stretch that no group has is not compiled
            steps = [s for s, most in zip(steps, turns, strict=False) if most > 0] or steps
        steps = steps if settled else [(ahead, f"{ahead} - 1", {})]
        if r.never_empty:
            self._met(lo, None if exact else hi, steps, led=led)
            return
        # branches to the end: where states leave a branch, the assembler has all products one after the other
        with self.under("if tiles > 0:"):
            self._met(lo, None if exact else hi, steps, led=led)
        c.known = known
        with self.under("else:"):
            self._begin()
            self.emit("mbarrier.arrive(rows_empty.index(GROUP), count=1)")
            self._finish()

    def _met(
        self, lo: str, stop: str | None, steps: Sequence[tuple[str, str, Mapping[Expr, bool]]], *, led: bool
    ) -> None:
        """A block of rows that meets a tile. stop: where the last tile is ragged. steps: of each stretch the number of
        tiles, the last, and what is known there. led: the last tile stands before the loops."""
        r = self.r
        self._begin()
        for n, made in r.prepared:
            prepare(self.of, self.c, n, made)
        if led:
            first = self._first if r.behind else self._led if self.trails else self._whole
            first(f"{lo} + (tiles - 1) * {self.tile}", stop, {})
        for count, last, facts in steps:
            self._loop(count, f"{lo} + ({last} - n) * {self.tile}", facts)
        self.emit("mbarrier.arrive(rows_empty.index(GROUP), count=1)")
        if r.behind or self.trails:
            self._last()
        self._finish()

    def _begin(self) -> None:
        """What stands before the loop; the group's rows are there."""
        self.body(self.r.before)
        self._on_states(self.r.begun)
        self.emit("mbarrier.wait(rows_full.index(GROUP), r & 1)")

    def _finish(self) -> None:
        """What stands after the loop."""
        for name in self.r.kept:
            sums = f"gl.sum({self.c.buffer_names[name]}, 1)"
            self.c.assign(name, f"gl.convert_layout({sums}, gl.SliceLayout(1, mma))")
        self.body(self.r.after)
        self._on_states(self.r.finish)

    def _stretches(
        self, starts: Sequence[Expr], stops: Sequence[Expr], lo: str, hi: str, most: str
    ) -> list[tuple[str, str]]:
        """Of the first `most` tiles, numbers of tiles, the last of each stretch: after, in, before what needs no mask.
        What is ragged, or leaves merges to the next tile, has a last tile of its own."""
        once, here = self.c.scopes.once, self.c.scopes.here
        ends = [self.loops.bound(e, "clear_to") for e in stops]
        begins = [self.loops.bound(e, "clear_from") for e in starts]
        first = "0"
        if begins:
            after = nested("tl.maximum", begins)
            first = once(f"tl.minimum(tl.cdiv(tl.maximum({after} - {lo}, 0), {self.tile}), {most})", "first", here)
        end = nested("tl.minimum", [hi, *ends])
        last = once(f"tl.minimum(tl.maximum({end} - {lo}, 0) // {self.tile}, {most})", "last", here)
        if begins:
            last = once(f"tl.maximum({last}, {first})", "last", here)
        found = [(f"{most} - {last}", f"{most} - 1"), (f"{last} - {first}", f"{last} - 1")]
        return [*found, (first, f"{first} - 1")] if begins else found

    def stmt(self, s: ir.Stmt) -> None:
        """As usual, but sums that are kept per thread until the end have a value for each thread of a row."""
        match s:
            case ir.Fill(buf) if buf in self.r.kept:
                self.c.assign(buf, "tf_no_sums(zero)")
            case ir.Map(buf, Call("mul", (a, b))) if buf in self.r.kept:
                own = isinstance(a, Load) and a.tensor == buf
                v = self.c.expressions.value(self.c.settled(b if own else a), (self.r.row,))
                name = self.c.buffer_names[buf]
                self.c.assign(buf, f"{name} * " + (f"tf_by_row({v.code}, {name})" if v.axes else v.code))
            case ir.Reduce(buf=buf) if buf in self.r.kept:
                v = self.reductions.masked(s).value
                if v.axes != (self.r.row, self.r.loop.dim):
                    raise BackendError(f"{self.c.kernel.name}: a sum of what does not vary over rows and the stream")
                self.c.assign(buf, f"{self.c.buffer_names[buf]} + tf_row_sums({v.code})")
            case ir.Reduce(buf=buf) if self.r.loop.dim not in s.rdims:
                code = sum_beside(self.of, self.c, s)
                self.c.assign(buf, f"{self.c.buffer_names[buf]} + {code}" if s.accumulate else code)
            case _:
                super().stmt(s)

    def _first(self, start: str, stop: str | None, facts: Mapping[Expr, bool]) -> None:
        """Lift of the first tile: nothing is merged yet."""
        with self._at(start, stop, facts):
            self._lifted("s", "turn")
            self._compute(0)
            self._on_states(self.r.repairs)
            self._hold(range(len(self.r.merges)))
            if stop is not None:
                self._clear(stop)

    def _clear(self, stop: str) -> None:
        """What the merges of this tile read of pages from the end of the stream on: 0, as beyond a tensor."""
        base, paged = self.c.hold(self.r.loop.dim).base, [n for n in self.r.late if self.r.parts[n].page]
        if not paged:
            return
        with self.under(f"if {stop} - {base} < {self.tile}:"):
            self._await("late", "s", "turn")
            for n in paged:
                tile = f"{self.of.parts[n]}.index(s).reshape([{self.tile}, {self.r.parts[n].lanes}])"
                self.emit(f"tf_clear({tile}, {stop} - {base})")

    def _whole(self, start: str, stop: str | None, facts: Mapping[Expr, bool]) -> None:
        """A tile from its lifts to its merges, each of which starts as soon as what it adds is there."""
        r = self.r
        with self._at(start, stop, facts):
            self._lifted("s", "turn")
            if not r.shares:
                self._await("late", "s", "turn")
            self._on_states(r.repairs) if self._early_repairs() else None
            begun: list[int] = []
            for n, name in enumerate(results(r)):
                self._waited([self.c.buffer_names[name]], running(r, name) + len(begun))
                last = n == len(self.phases) - 1
                self._freeing(n, "s")
                if last and not self._early_repairs():
                    self._on_states(r.repairs)
                ready = [k for k in range(len(r.merges)) if k not in begun and (last or self._ready(k, n))]
                if last or self._early_repairs():
                    self._hold(ready)
                    self._merge(ready)
                    begun += ready
            self._waited(self._states(), 0)
            self._release("late", "s")
        self.emit(f"s, turn = tf_advance(s, turn, {self.stages})")

    def _led(self, start: str, stop: str | None, facts: Mapping[Expr, bool]) -> None:
        """The first tile, where the last merges are a tile behind: they are left to the next step."""
        with self._at(start, stop, facts):
            self._lifted("s", "turn")
            self._through("s")

    def _trailed(self, start: str, facts: Mapping[Expr, bool]) -> None:
        """A tile, of which the last merges are left to the next step, and those of the tile before. They run beside
        what follows from the first result of the lifts."""
        self.emit(f"ahead, ahead_turn = tf_advance(s, turn, {self.stages})")
        with self._at(start, None, facts):
            self._lifted("ahead", "ahead_turn", self.later)
            self._through("ahead")
        self.emit("s = ahead", "turn = ahead_turn")

    def _through(self, s: str) -> None:
        """The elementwise part of the tile in stage s, and merges of what is complete before the last phase."""
        r, first = self.r, s == "s"
        begun: list[int] = []
        for n, name in enumerate(results(r)):
            older = 0 if first or n else len(self.later)
            self._waited([self.c.buffer_names[name]], running(r, name) + len(begun) + older)
            self._phase(n, s)
            if older:
                self._waited(self._states(self.later), running(r, name))
                self._release("late", "s")
            if n < len(self.phases) - 1:
                ready = [k for k in range(len(r.merges)) if k not in begun + self.later and self._ready(k, n)]
                self._hold(ready)
                self._merge(ready, s)
                begun += ready
        self._release("early", s)
        self._waited(self._states(begun), 0)
        self._hold(self.later)

    def _early_repairs(self) -> bool:
        """Whether states are not changed but by merges."""
        return not self.r.repairs

    def _ready(self, merge: int, phase: int) -> bool:
        """Whether what a merge multiplies is complete after a phase."""
        made = self.r.merges[merge].made
        return not any(about(s) == made for later in self.phases[phase + 1 :] for s in later)

    def _loop(self, count: str, start: str, facts: Mapping[Expr, bool]) -> None:
        """Steps: lifts of a tile and merges of the one before, side by side with the elementwise part."""
        r = self.r
        self.c.scopes.open()
        before = self.c.known
        if r.behind:
            self._step(start, facts)
        elif self.trails:
            self._trailed(start, facts)
        else:
            self._whole(start, None, facts)
        self.c.known = before
        self.c.scopes.close(f"for n in range({count}):")
        for n in {*allocated(r.loop.body), *(m.gemm.buf for m in r.merges), *self._narrow()}:
            self.c.scopes.forget(self.c.buffer_names[n])

    def _step(self, start: str, facts: Mapping[Expr, bool]) -> None:
        self.emit(f"ahead, ahead_turn = tf_advance(s, turn, {self.stages})")
        with self._at(start, None, facts):
            self._lifted("ahead", "ahead_turn")
            if not self.r.shares:
                self._await("late", "s", "turn")
            every = range(len(self.r.merges))
            self._merge(every)
            self._compute(len(every))
            self._waited(self._states(), 0)
            self._release("late", "s")
            self._on_states(self.r.repairs)
            self._hold(every)
        self.emit("s = ahead", "turn = ahead_turn")

    def _lifted(self, s: str, turn: str, behind: Sequence[int] = ()) -> None:
        """Start the lifts of the tile in stage s, and after the first result's those merges of the tile before."""
        first = [x for x in self.r.lifts if x.gemm.buf == results(self.r)[0]] if behind else []
        there = set[str]()
        self.streamed = Streamed(self.of, self.c, self.lines_of_a_tile)  # asked for before copies are waited for
        if self.r.planes and len(self.phases) == 1:  # without planes it spills more than it hides
            asked_ahead(self.c, self.r, self.phases[0])
        for lifts in (first, [x for x in self.r.lifts if x not in first]):
            for x in lifts:
                which = "late" if x.part in self.r.late else "early"
                if which not in there:
                    self._await(which, s, turn)
                there.add(which)
                self._lift(s, x)
            self._merge(behind if lifts is first else ())

    def _phase(self, n: int, s: str) -> None:
        """What can be computed when the n-th result of the lifts is there, of the tile in stage s."""
        self.streamed.needed(self.phases[n])
        at, frame = plane_at(self.r, s, "GROUP"), (self.r.row, self.r.loop.dim)
        for p, buffer in zip(self.r.planes, self.of.planes, strict=True):
            brought(self.c, p, f"{buffer}.index({at})", frame)
        self.body(self.phases[n])
        self.c.there.clear()

    def _freeing(self, n: int, s: str) -> None:
        """The n-th phase; the last frees what lifts alone read, before, or behind it where it reads planes."""
        last = n == len(self.phases) - 1
        if last and not self.r.planes:
            self._release("early", s)
        self._phase(n, s)
        if last and self.r.planes:
            self._release("early", s)

    def _compute(self, merges: int) -> None:
        """The elementwise part, each phase as soon as its lift is complete; `merges` started after the lifts."""
        for n, name in enumerate(results(self.r)):
            self._waited([self.c.buffer_names[name]], running(self.r, name) + merges)
            self._freeing(n, "ahead" if merges else "s")

    def _narrow(self) -> list[str]:
        own = allocated((*self.r.before, *self.r.begun))
        return [n for n in own if n in self.c.buffer_names]

    @contextmanager
    def _at(self, start: str, stop: str | None, facts: Mapping[Expr, bool]) -> Iterator[None]:
        """The stream at the tile that starts there, with what is known of it, and fresh names for what it computes."""
        c, stream = self.c, self.r.loop.dim
        known, held = c.known, c.dims.get(stream)
        c.known = Known(dict(known.scales), {**known.facts, **facts})
        base = c.scopes.fresh(f"{stream}0")
        self.emit(f"{base} = {start.removeprefix('0 + ')}")
        c.dims[stream] = Dim(stream, base, self.tile, self.tile, c.scopes.here, stop)
        for name in sorted(allocated(self.r.loop.body)):
            c.buffer_names[name] = c.scopes.fresh(identifier("v_" + name))
        yield
        c.known = known
        if held is not None:
            c.dims[stream] = held

    def _await(self, which: str, s: str, turn: str) -> None:
        if self.r.early if which == "early" else self.r.late:
            s, turn = self.buffer_of(which, s, turn)
            self.emit(f"mbarrier.wait({which}_full.index({s}), {turn})")

    def _release(self, which: str, s: str) -> None:
        if self.r.early if which == "early" else self.r.late:
            s, turn = self.buffer_of(which, s, "")
            self.emit(f"mbarrier.arrive({which}_empty.index({s}), count=1)", *["lap = lap ^ 1"] * (turn == "lap"))

    def _lift(self, s: str, x: Lift) -> None:
        """Start a product with the tile in stage s."""
        if x.gemm.buf not in self.c.buffers:
            self.stmt(ir.Alloc(self.of.buffer(x.gemm.buf)))
        name = self.c.buffer_names[x.gemm.buf]
        # where registers are few, descriptors of rows are computed in each turn, not kept through the loops
        own = "GROUP + tf_apart()" if self.trails or self.r.single else "GROUP"
        rows = f"{self.of.rows[x.rows]}.index({own}).reshape([{ROWS}, {self.r.rows[x.rows].lanes}])"
        at = "tf_apart()" if self.r.single and x.part in self.r.early else s
        tile = f"{self.of.parts[x.part]}.index({at}).reshape([{self.tile}, {self.r.parts[x.part].lanes}])"
        held = name if x.adds else "zero, use_acc=False"
        self.emit(f"{name} = warpgroup_mma({rows}, {tile}.permute((1, 0)), {held}, is_async=True)")
        self.c.layouts.wrote(x.gemm.buf, frozenset({False}))

    def _merge(self, which: Iterable[int], s: str = "s") -> None:
        """Start merges of the tile in stage s."""
        for n in which:
            m = self.r.merges[n]
            name, lanes = self.c.buffer_names[m.gemm.buf], self.r.parts[m.part].lanes
            tile = f"{self.of.parts[m.part]}.index({s}).reshape([{self.tile}, {lanes}])"
            held = f"held_p{n}"
            if n in self.later:
                held = (
                    f"tf_from_pairs({held}, held_{self.columns[m.columns][0]}, {in_gluon(TRITON_TYPE[self.r.dtype])})"
                )
            self.emit(f"{name} = warpgroup_mma({held}, {tile}, {name}, is_async=True)")

    def _states(self, which: Iterable[int] | None = None) -> list[str]:
        """States of these merges, of all where not said."""
        merges = self.r.merges if which is None else [self.r.merges[n] for n in which]
        return list(dict.fromkeys(self.c.buffer_names[m.gemm.buf] for m in merges))

    def _waited(self, names: Sequence[str], running: int) -> None:
        joined = ", ".join(names)
        self.emit(f"{joined} = warpgroup_mma_wait({running}, deps=[{joined}])")
        for name in names:
            self.c.scopes.forget(name)

    def _hold(self, which: Iterable[int]) -> None:
        """Operands of merges, in registers until they are done."""
        for n in which:
            m = self.r.merges[n]
            frame = (self.r.row, self.r.loop.dim)
            buffer = self.of.buffer(m.made)
            v = self.c.raw_load(Load(m.made, tuple(Index(d) for d in buffer.dims)), frame)
            if v.axes != frame:
                raise BackendError(f"{self.c.kernel.name}: {m.made} does not vary over rows and the stream")
            masked = self.c.masks(frame[1:], frame)
            code = v.code if masked is None else f"tl.where({masked}, {v.code}, 0.0)"
            if n in self.later:
                code = code if v.kind is DType.F32 else f"({code}).to(tl.float32)"
                self.emit(f"held_p{n} = {self._in_pairs(code)}")
                continue
            code = code if v.kind is self.r.dtype else narrowed(code, v.kind, self.r.dtype)
            self.emit(f"held_p{n} = gl.convert_layout({code}, held_{self.columns[m.columns][0]})")

    def _in_pairs(self, code: str) -> str:
        return f'tf_in_pairs({code}, "{_PTX[self.r.dtype]}")'

    def _last(self) -> None:
        """Merges of the last tile."""
        if not self.r.shares:
            self._await("late", "s", "turn")
        self._merge(self.later)
        self._waited(self._states(self.later), 0)
        self._release("late", "s")
        self.emit(f"s, turn = tf_advance(s, turn, {self.stages})")

    def _on_states(self, stmts: Sequence[ir.Stmt]) -> None:
        """Statements on states, each in the layout of its columns."""
        for columns, (n, _) in self.columns.items():
            mine = [s for s in stmts if columns in self._dims(s)]
            if mine:
                States(self.of, self.c, columns, n, mine).render_all()

    def _dims(self, s: ir.Stmt) -> tuple[str, ...]:
        if isinstance(s, ir.Store):
            return s.dims
        name = s.buffer.name if isinstance(s, ir.Alloc) else s.buf  # type: ignore[union-attr]
        return self.of.buffer(name).dims
