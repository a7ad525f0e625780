"""Tile kernel to Triton source.

Every buffer is a tensor value whose axes are its dims of more than one index, every statement
one assignment. A dim is a scalar (tiles of one index), a vector (lanes: a power of two, masked
where fewer indices are valid) or looped over (`loops`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Expr, Index, dims_used, lit, loads, substitute
from tilefold.backends.triton.choices import branches, choices, ends
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.context import WARP, Context
from tilefold.backends.triton.dependent import ALONE, Place
from tilefold.backends.triton.loops import Loops
from tilefold.backends.triton.names import identifier
from tilefold.backends.triton.own_vectors import OwnVector
from tilefold.backends.triton.pairs import TWO, Pair, joined, wide
from tilefold.backends.triton.prelude import prelude
from tilefold.backends.triton.product import Products
from tilefold.backends.triton.reductions import Reductions
from tilefold.backends.triton.reuse import reuse_of
from tilefold.backends.triton.scope import Known
from tilefold.backends.triton.select import Selections
from tilefold.backends.triton.simplify import pull_scale
from tilefold.backends.triton.values import Value, fitted
from tilefold.backends.triton.waiting import Waiting
from tilefold.backends.triton.whole_vectors import ends_inside_vector, line_of
from tilefold.errors import BackendError
from tilefold.tile import ir
from tilefold.tile.pieces import product_dims
from tilefold.tile.uses import grows, written


@dataclass(frozen=True, slots=True)
class Rendered:
    """Source text; `arguments` in order: pointers, numbers, descriptors; the grid as tiles of dims.

    `covers`: dims without a loop and the most indices their vector holds: larger sizes need another rendering.
    `place`: among the kernels of its call. `groups`: of warps that share a state, in Gluon (`gluon`, `row_groups`); 0:
    Triton. `persistent`: however many thread blocks there are, they go through all tiles of the grid. `draws`: what
    they go through next says a counter, an argument after the numbers (`counters`).
    """

    source: str
    name: str
    arguments: tuple[str, ...]
    grid: tuple[ir.Tiled, ...]
    covers: Mapping[str, int]
    descriptors: Mapping[str, tuple[str, tuple[int, ...]]]
    place: Place = ALONE
    groups: int = 0
    persistent: bool = False
    draws: bool = False


def render(
    kernel: ir.Kernel,
    config: TritonConfig,
    *,
    bins: Mapping[str, int] | None = None,
    wide: bool = False,
    interpreted: bool = False,
    nvidia: bool = True,
    tf32: bool = False,
    interleave: int = 1,
    place: Place = ALONE,
    passing: frozenset[str] = frozenset(),
) -> Rendered:
    """The Triton source of `kernel`. BackendError where it has no such form (a value too large to hold).

    bins: dynamic dim -> most indices a call may have (for dims held whole). wide: 64-bit offsets. interleave: heads
    (or what else is parallel) that start side by side at the end where later rows have longer loops (`order`).
    place: among the kernels of its call; only for NVIDIA devices that have the instructions (`dependent`). passing:
    inputs that stream by (`reuse.passing`).
    """
    if place != ALONE and (interpreted or not nvidia):
        raise BackendError(f"{kernel.name} cannot wait for another kernel here")
    c = Context(kernel, config, bins or {}, wide=wide, interpreted=interpreted, nvidia=nvidia)
    c.passing = passing
    return Renderer(c, tf32, interleave, place).render()


class Renderer:
    def __init__(self, c: Context, tf32: bool, interleave: int, place: Place):
        self.c = c
        self.place = place
        self.interleave = interleave
        self.products = Products(c, tf32)
        self.reductions = Reductions(c, self.products)
        self.selections = Selections(c)
        self.loops = Loops(c, self.body)
        self.grid_dims = frozenset(t.dim for t in c.kernel.grid)
        self.multiplies = bool(product_dims(c.kernel))
        self.waiting = Waiting(c.scopes.emit, c.scopes.fresh, WARP * c.config.warps)

    def render(self) -> Rendered:
        name = identifier(self.c.kernel.name)
        grid = tuple(self.c.kernel.grid)
        self.grid(grid)
        for d in self.c.kernel.sizes:
            self.c.whole(d)
        self.tiles()
        args: list[str] = []
        for t in self.c.kernel.tensors:
            args.append(self.c.names[t.name])
        for t in self.c.kernel.tensors:
            args += [self.c.stride(t, a) for a in range(len(t.shape)) if a != t.unit_axis]
        args += [f"sym_{s}" for s in self.c.kernel.syms]
        args += list(self.c.memory.descriptors)
        lines = ["", "", "@triton.jit", f"def {name}({', '.join(args)}):"]
        lines += [f"    # {line}" for line in self.c.kernel.listing.splitlines()]
        lines += ["    " + line for line in [*self.place.lines(), *self.c.scopes.finished()] or ["pass"]]
        code = "\n".join(lines) + "\n"
        source = prelude(code, interpreted=self.c.interpreted) + code
        held, maps = dict(self.c.covers), dict(self.c.memory.descriptors)
        return Rendered(source, name, tuple(args), grid, held, maps, self.place)

    def grid(self, grid: Sequence[ir.Tiled]) -> None:
        """Program ids: the last tiled dim varies fastest, so that neighbours share operands."""
        if not grid:
            return
        once = self.c.scopes.once
        pid = once("tl.program_id(0)" + (".to(tl.int64)" if self.c.wide else ""), "pid", 0)
        order = self.grid_order(grid)
        sizes = [self.c.size(t.dim).code for t in order]
        blocks = [
            str(-(-int(n) // t.tile)) if n.isdigit() else f"tl.cdiv({n}, {t.tile})"
            for n, t in zip(sizes, order, strict=True)
        ]
        for n, (t, size) in enumerate(zip(order, sizes, strict=True)):
            last, longer = n == len(order) - 1, grows(self.c.kernel.body, t.dim)
            if n == 0 and longer and t.tile > 1 and not last and self.interleave > 1:
                at, pid = self._interleaved(t.dim, pid, blocks)
            else:
                at = pid if last else once(f"{pid} % {blocks[n]}", f"b_{t.dim}", 0)
                pid = pid if last else once(f"{pid} // {blocks[n]}", "pid", 0)
            if longer:
                at = once(f"{blocks[n]} - 1 - {at}", f"b_{t.dim}", 0)
            base = at if t.tile == 1 else once(f"{at} * {t.tile}", f"{t.dim}0", 0)
            self.c.enter(t.dim, base, t.tile, size, 0)

    def _interleaved(self, d: str, pid: str, blocks: Sequence[str]) -> tuple[str, str]:
        """The block of d and the number of the others: the last `interleave` of those change faster than d does."""
        once = self.c.scopes.once
        if all(n.isdigit() for n in blocks[1:]):
            others = math.prod(int(n) for n in blocks[1:])
            side, alone = str(min(self.interleave, others)), str(max(0, others - self.interleave))
            if alone == "0":
                return once(f"{pid} // {others}", f"b_{d}", 0), once(f"{pid} % {others}", "pid", 0)
        else:
            side = once(f"tl.minimum({self.interleave}, {' * '.join(blocks[1:])})", "side", 0)
            alone = once(f"{' * '.join(blocks[1:])} - {side}", "alone", 0)
        late = once(f"{pid} - {alone} * {blocks[0]}", "late", 0)
        at = once(f"tl.where({late} < 0, {pid} % {blocks[0]}, {late} // {side})", f"b_{d}", 0)
        return at, once(f"tl.where({late} < 0, {pid} // {blocks[0]}, {alone} + {late} % {side})", "pid", 0)

    def grid_order(self, grid: Sequence[ir.Tiled]) -> list[ir.Tiled]:
        """Fastest first: dims in tiles, last one first, then the others, last one first."""
        tiled = [t for t in reversed(grid) if t.tile > 1]
        return tiled + [t for t in reversed(grid) if t.tile == 1]

    def tiles(self) -> None:
        """The kernel's body; of one that maps a line of elements which ends inside a vector, once without masks for the
        tiles that the line fills, and once with, for the last (`whole_vectors`)."""
        line = line_of(self.c.kernel)
        dim = None if line is None or self.c.matrix else self.c.dims[line]
        if dim is None or dim.stop is None or not ends_inside_vector(self.c.kernel, dim.stop):
            self.waiting.begin(self.c.kernel)
            self.body(self.c.kernel.body)
            self.waiting.end()
            return
        for stop, header in ((None, f"if {dim.base} + {dim.tile} <= {dim.stop}:"), (dim.stop, "else:")):
            self.c.dims[dim.name] = replace(dim, stop=stop)
            self.c.scopes.open(branch=True)
            self.body(self.c.kernel.body)
            self.c.scopes.close(header)

    def body(self, stmts: Sequence[ir.Stmt]) -> None:
        self.c.bounds.forget(written(stmts))
        for n, s in enumerate(stmts):
            own = self.c.memory.own_vectors.get((s.tensor, s.index)) if isinstance(s, ir.Store) else None
            if own is not None:
                if own.place == 0:
                    self._store_own(own, [x for x in stmts[n : n + own.width] if isinstance(x, ir.Store)])
            elif isinstance(s, ir.For) and not self.multiplies:
                self.loops.loop(s, reuse_of(stmts, n, self.grid_dims))
            else:
                self.stmt(s)

    def stmt(self, s: ir.Stmt) -> None:
        match s:
            case ir.Alloc(buffer):
                self.c.buffers[buffer.name] = buffer
                self.c.known.scales.pop(buffer.name, None)
                self.c.held[buffer.name] = tuple(self.c.hold(d).lanes for d in buffer.dims)
                self.c.buffer_names[buffer.name] = self.c.buffer_names.get(buffer.name) or identifier(
                    "v_" + buffer.name
                )
                self.c.layouts.born(buffer.name)
                self.c.born[buffer.name] = self.c.scopes.here
                self.c.check_size(buffer)
            case ir.For():
                self.loops.loop(s)
            case ir.Fill(buf, value):
                b = self.c.buffers[buf]
                self.c.bounds.forget((buf,))
                v = self.c.expressions.value(value, ())
                self.c.assign(buf, self.c.full(self.c.axes(b), v.code, b.dtype))
            case ir.Map(buf, expr):
                self.map(buf, expr)
            case ir.Reduce():
                self.reductions.reduce(s)
            case ir.Gemm():
                if not self.products.gemm(s):
                    e = Call("mul", (s.a, s.b))
                    self.reductions.reduce(ir.Reduce(s.buf, "sum", s.rdims, e, s.accumulate, s.kept))
            case ir.Select():
                self.selections.select(s)
            case ir.Store():
                self.store(s)

    def map(self, buf: str, expr: Expr) -> None:
        b = self.c.buffers[buf]
        e = self.c.settled(expr)
        if self.c.writes[buf] == 1:
            self.c.ranges[buf] = self.c.range_of(e)
        self.c.bounds.mapped(buf, e)
        if self._may_lack_scale(b):
            k, e = pull_scale(e, loose=self.c.narrow)
            if k != 1.0:
                self.c.known.scales[buf] = k
        self._set(b, e)

    def _may_lack_scale(self, b: ir.Buffer) -> bool:
        """Whether every reader of a buffer can apply a constant factor that the buffer is held without."""
        once = self.c.writes[b.name] == 1 and self.c.born[b.name] == self.c.scopes.here
        return once and b.name not in self.c.raw and b.dtype in (DType.F32, DType.F64) and len(self.c.axes(b)) > 1

    def _set(self, b: ir.Buffer, e: Expr) -> None:
        axes = self.c.axes(b)
        self.c.layouts.wrote(b.name, self.c.layouts.made((e,), axes))
        v = self.c.expressions.value(e, axes)
        self.c.assign(b.name, self.c.spread(self.c.stored(v, b.dtype), v.axes, axes, b))

    def store(self, s: ir.Store) -> None:
        found = self._choices(s)
        if found and branches(self.c.settled(s.expr), found) and not self.c.matrix:
            self._by_parts(s)
        else:
            self._store(s)

    def _choices(self, s: ir.Store) -> tuple[Expr, ...]:
        """What is not known here and chooses between parts, the same one for all lanes."""
        return choices(self.c.settled(s.expr), self._indices)

    def _indices(self, d: str) -> int:
        held = self.c.hold(d)
        return 1 if not held.vector else held.tile if d in self.grid_dims else 0

    def _by_parts(self, s: ir.Store) -> None:
        """A branch for each part, which reads its own tensors alone."""
        open_choices = self._choices(s)
        if not open_choices:
            self._store(s)
            return
        condition, before = open_choices[0], self.c.known
        end = ends(condition)
        if end is not None and self.c.hold(end[0]).vector:
            code = f"{self.c.hold(end[0]).base} < {end[1]}"
        else:
            code = self.c.expressions.value(condition, ()).code
        for holds, header in ((True, f"if {code}:"), (False, "else:")):
            self.c.known = Known(dict(before.scales), {**before.facts, condition: holds})
            self.c.scopes.open(branch=True)
            self._by_parts(s)
            self.c.scopes.close(header)
        self.c.known = before

    def _store(self, s: ir.Store) -> None:
        t = self.c.tensors[s.tensor]
        frame = tuple(d for d in s.dims if self.c.hold(d).vector)
        pair = None if s.added else self.c.memory.joined(t, s.index, frame)
        if pair is not None:
            self._store_pairs(s, pair, frame)
            return
        v = self._value(s, frame)
        if len(v.axes) == len(frame):  # as it is held: threads would exchange it to have its axes in another order
            frame = v.axes
        code = self._over(v, frame, t.dtype)
        pointer, axes = self.c.memory.address(t, s.index, frame)
        if set(axes) != set(frame):
            raise BackendError(f"{self.c.kernel.name}: a store to {t.name} does not depend on all of {frame}")
        masked = self.c.masks(frame, frame)
        exist = self.c.memory.inside(t, s.index, frame)[0] if s.added else None
        if exist is not None:
            masked = exist if masked is None else f"({masked}) & {exist}"
        if masked is not None and len(frame) > 1:
            shape = ", ".join(str(self.c.hold(d).lanes) for d in frame)
            masked = f"tl.broadcast_to({masked}, [{shape}])"
        last = ', eviction_policy="evict_first"' if self.c.reuse.writes else ""
        if s.added:
            if s.added == "max":
                self.c.scopes.emit(f"tf_raise({pointer}, {code}, {masked})")
                return
            also = "" if masked is None else f", mask={masked}"
            self.c.scopes.emit(f'tl.atomic_add({pointer}, {code}{also}, sem="relaxed")')
            return
        more = f"{'' if masked is None else ', mask=' + masked}{last}"
        elements = math.prod(self.c.hold(d).lanes for d in frame)
        inside = self.c.scopes.here > 0  # of a branch, which has no end here
        self.waiting.put(s, code, elements, lambda value: f"tl.store({pointer}, {value}{more})", now=inside)

    def _store_own(self, own: OwnVector, stores: Sequence[ir.Store]) -> None:
        """Stores of the elements of vectors, one after the other, as one."""
        s = stores[0]
        frame = tuple(d for d in s.dims if self.c.hold(d).vector)
        values = [self.value_to_store(x, frame) for x in stores]
        pointer, _ = self.c.memory.address(self.c.tensors[s.tensor], s.index, frame)
        masked = self.c.masks(frame, frame)
        more = "" if masked is None else f", mask=({masked})[:, None]"
        more += ', eviction_policy="evict_first"' if self.c.reuse.writes else ""
        code = own.joined(values, self.c.hold(frame[0]).lanes)
        self.c.scopes.emit(f"tl.store({self.c.memory.whole(own, pointer)}, {code}{more})")

    def _holds(self, e: Expr, d: str) -> bool:
        """Whether e reads a value that has an axis of a dim."""
        return any(ld.tensor in self.c.buffers and d in dims_used(ld) for ld in loads(e))

    def _store_pairs(self, s: ir.Store, pair: Pair, frame: tuple[str, ...]) -> None:
        """A store of pairs of neighbours, the last dim's two indices, as one of twice the lanes of the dim before.

        Of an axis of two, Triton 3.6 lays a warp's lanes along the first axis, two elements each: a norm of 64 channels
        that are stored as pixels, two by two, sent the cache 8 times their bytes.
        """
        t, (*before, last) = self.c.tensors[s.tensor], frame
        lanes = [self.c.hold(d).lanes for d in before]
        if self._holds(s.expr, last):
            code = f"tl.reshape({self.value_to_store(s, frame)}, [{wide(lanes)}])"
        else:
            parts = [substitute(s.expr, {Index(last): lit(n)}) for n in range(TWO)]
            first, second = (self.value_to_store(replace(s, expr=e), tuple(before)) for e in parts)
            code = joined(first, second, lanes)
        pointer, _ = self.c.memory.address(t, s.index, before, pair)
        masked = self.c.memory.both_masks(pair, before)
        if masked is not None and len(before) > 1:
            masked = f"tl.broadcast_to({masked}, [{wide(lanes)}])"
        more = "" if masked is None else f", mask={masked}"
        more += ', eviction_policy="evict_first"' if self.c.reuse.writes else ""
        self.c.scopes.emit(f"tl.store({pointer}, {code}{more})")

    def value_to_store(self, s: ir.Store, frame: tuple[str, ...]) -> str:
        """What a store writes, over all of the frame and in the tensor's type."""
        return self._over(self._value(s, frame), frame, self.c.tensors[s.tensor].dtype)

    def _value(self, s: ir.Store, frame: tuple[str, ...]) -> Value:
        """The same, with the axes that it has, in the order that it is held in."""
        t = self.c.tensors[s.tensor]
        self.c.check_stored(f"a store to {t.name}", frame)
        e = self.c.settled(s.expr)
        if isinstance(e, Cast) and e.dtype is t.dtype and t.dtype.is_float:
            e = e.arg  # rounded once, as it is stored
        checked = self.c.expressions.checked(e, t.dtype)
        return self.c.stored(self.c.expressions.to_be_cast(e, t.dtype, frame), t.dtype, checked=checked)

    def _over(self, v: Value, frame: tuple[str, ...], dtype: DType) -> str:
        """Code of a value that is to be stored, over all of the frame."""
        code = fitted(v, frame)
        if frame and v.axes != frame:
            shape = ", ".join(str(self.c.hold(d).lanes) for d in frame)
            code = f"tl.broadcast_to({code}, [{shape}])" if v.axes else self.c.full(frame, code, dtype)
        return code
