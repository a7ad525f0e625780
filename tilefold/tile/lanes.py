"""Folds kept per lane: a streamed loop over a long axis without a reduction across lanes in it.

Law: a fold over an axis is the combination of the folds over segments of it (`block.split`). Here a segment is
what one lane of a vector meets: with L lanes and tiles of T = E L indices lane l folds the indices t T + e L + l,
and every state has a dim of L lanes. After the loop the lanes are combined. The combination is the loop's own body
once more, with the lanes as its tile: what is old there is the state of a lane, what is accumulated is the state
of each lane after its repair, and elements do not occur,

    v = R over lanes of repair(v_lane, D_lane, D).

What is reduced beside the loop's axis and held whole (images in a loop over a batch) has lanes of its own: a state then
has these dims too, and they are combined at the end with the others.

What the loop stores of elements alone, each lane stores of its own. What it reduces of an element over other dims each
lane reduces of its own: the parts of a complex number, or a row, where a state has a value for each of its columns
(means of rows that columns are summed about). Then lanes are a state's first dim, so that states lie as rows do.

Indices that do not fill a tile are folded afterwards by the loop as it was; where they are known and fill the lanes, or
the loop only reduces, by the lanes before they are combined, those without an index with the identity of the reduction.

A fold that divides by a state (a weighted mean, by the sum of the weights) is not kept so: the few elements of a
lane may have weights that nearly cancel. There the states that others depend on are accumulated over all lanes in
every tile, and only those that none depends on are kept per lane, if their repair is additive, v + b: then

    sum over lanes of (v_lane + elements) + b = (sum over lanes of v_lane) + b + elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import COMBINE, Env, Grid, evaluate, identity_of, reader
from tilefold.algebra.expr import (
    Call,
    Const,
    Expr,
    Index,
    Load,
    Size,
    call,
    dims_used,
    lit,
    loads,
    ops_used,
    transform,
    walk,
)
from tilefold.algebra.ops import TILE_EXTREMES
from tilefold.names import fresh
from tilefold.tile import ir
from tilefold.tile.lane_places import Places, met, of_all, places_of
from tilefold.tile.lane_rules import (
    across_lanes,
    adds,
    first_fill,
    met_by,
    plus,
    position,
    reduces_alone,
    rest_of,
    singular,
    stores_states,
)
from tilefold.tile.steady import MOST, Steady, steady
from tilefold.tile.uses import allocated

#: Most statements that a statement over a tile becomes.
MOST_STEPS = 16
#: Most elements that each lane reduces of its own.
MOST_EACH = 8
#: Most combinations of outer tiles for which the bounds of a loop are computed.
MOST_TRIED = 4096


def per_lane(kernel: ir.Kernel, lanes: Callable[[ir.For], int | None]) -> ir.Kernel:
    """`kernel` with the folds of its loops kept per lane where that is possible.

    lanes: how many for a loop, a divisor of its tile; None: leave it. Kept as they are: loops that store what depends
    on a state, that contain loops, several index reducers or matrix products, and loops over values that are held.
    """
    return _Pass(kernel, lanes).run()


def as_reduce(s: ir.Stmt) -> ir.Stmt:
    """A contraction as the reduction that it is."""
    return ir.Reduce(s.buf, "sum", s.rdims, Call("mul", (s.a, s.b)), s.accumulate) if isinstance(s, ir.Gemm) else s


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop whose states can be kept per lane: its statements, states with what they start as, and local buffers.

    elements: local buffers that have the loop's dim. varying: states that differ from lane to lane (a count does not).
    shared: states that are accumulated over all lanes in every tile. beside: dims that every reduction of the loop also
    runs over, whose indices are lanes. rows: whether it reduces rows of elements over dims that a state has.
    """

    at: ir.For
    body: tuple[ir.Stmt, ...]
    states: Mapping[str, ir.Fill]
    local: Mapping[str, ir.Buffer]
    elements: frozenset[str]
    varying: frozenset[str]
    shared: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()
    rows: bool = False


def by_tile(e: Expr, tiles: Mapping[str, int], sizes: Mapping[str, int]) -> Expr:
    """A loop bound with indices of tiles in place of the first and the last index of each; extremes over tiles of
    several indices stay."""

    def one(n: Expr) -> Expr | None:
        match n:
            case Call("tile_start", (Index(d),)):
                return call("mul", Index(d), tiles[d])
            case Call("tile_stop", (Index(d),)):
                return call("minimum", call("add", call("mul", Index(d), tiles[d]), tiles[d]), sizes[d])
            case Call(op, (x,)) if op in TILE_EXTREMES and all(tiles[d] == 1 for d in dims_used(x)):
                return x
        return None

    return transform(e, one)


class _Pass:
    def __init__(self, kernel: ir.Kernel, lanes: Callable[[ir.For], int | None]):
        self.kernel, self.lanes = kernel, lanes
        self.sizes: dict[str, Expr] = dict(kernel.sizes)
        self.taken = {*kernel.syms, *kernel.sizes, *(t.name for t in kernel.tensors), *allocated(kernel.body)}
        self.buffers: dict[str, ir.Buffer] = {}
        #: Of buffers with lanes, the axis that each axis was, were lanes behind the others.
        self.orders: dict[str, tuple[int, ...]] = {}

    def run(self) -> ir.Kernel:
        body = self.body(self.kernel.body, {t.dim: t.tile for t in self.kernel.grid})
        return replace(self.kernel, body=body, sizes=self.sizes)

    def fresh(self, name: str) -> str:
        return fresh(name, self.taken)

    def body(self, stmts: Sequence[ir.Stmt], tiles: Mapping[str, int]) -> tuple[ir.Stmt, ...]:
        out: list[ir.Stmt] = []
        for s in stmts:
            match s:
                case ir.Alloc(b):
                    self.buffers[b.name] = b
                    out.append(s)
                case ir.For():
                    out += self.loop(s, out, tiles)
                case _:
                    out.append(s)
        return tuple(out)

    def loop(self, s: ir.For, before: Sequence[ir.Stmt], tiles: Mapping[str, int]) -> list[ir.Stmt]:
        found = self.fold(s, before) or places_of(s, before, self.buffers)
        n = self.lanes(s) if found is not None else None
        start = lit(0) if s.start is None else position(s.start, tiles)
        kept = found is None or n is None or start is None
        lengths = set[int]() if kept else self.lengths(s, tiles)
        if found is None or n is None or start is None or (lengths and max(lengths) < s.tile):
            return [replace(s, body=self.body(s.body, {**tiles, s.dim: s.tile}))]
        length = next(iter(lengths)) if len(lengths) == 1 else None
        if isinstance(found, Places):
            return self.placed(found, n, start, length)
        return self.laned(found, n, start, length)

    def lengths(self, s: ir.For, tiles: Mapping[str, int]) -> set[int]:
        """Indices that the loop runs over in the tiles of the dims in its bounds; none: not known."""
        bounds = (s.start or lit(0), s.stop or Size(s.dim))
        if any(isinstance(n, Load) for e in bounds for n in walk(e)):
            return set()
        dims = sorted({d for e in bounds for d in dims_used(e)})
        used = {n.dim for e in bounds for n in walk(e) if isinstance(n, Size)} | set(dims)
        sizes = {d: int(e.value) for d in used if isinstance(e := self.kernel.sizes[d], Const)}
        if set(sizes) != used or math.prod(sizes[d] for d in dims) > MOST_TRIED:
            return set()
        together = [by_tile(e, tiles, sizes) for e in bounds]
        if all(ops_used(e).isdisjoint(TILE_EXTREMES) for e in together):
            grid = Grid({d: (0, -(-sizes[d] // tiles[d])) for d in dims})
            first, last = (evaluate(e, grid, Env(reader({}), sizes, {})) for e in together)
            return set((last - first).clamp(min=0).unique().tolist())
        found: set[int] = set()
        for at in itertools.product(*(range(0, sizes[d], tiles[d]) for d in dims)):
            grid = Grid({d: (i, min(i + tiles[d], sizes[d])) for d, i in zip(dims, at, strict=True)})
            lo, hi = (int(evaluate(e, grid, Env(reader({}), sizes, {}))) for e in bounds)
            found.add(max(0, hi - lo))
        return found

    def fold(self, s: ir.For, before: Sequence[ir.Stmt]) -> _Loop | None:
        """The loop, if all it does is fold elements of tensors into states that start as constants."""
        d, body = s.dim, tuple(as_reduce(x) for x in s.body)
        local = {x.buffer.name: x.buffer for x in body if isinstance(x, ir.Alloc)}
        reduced = [x.buf for x in body if isinstance(x, ir.Reduce)]
        starts = {n: first_fill(n, before) for n in reduced}
        states = {n: f for n, f in starts.items() if f is not None}
        elements = frozenset(n for n, b in local.items() if d in b.dims)
        done: set[str] = set()
        rows = False
        for x in body:
            match x:
                case ir.Alloc():
                    continue
                case ir.Map(buf, e) if buf in local or (buf in states and buf not in done):
                    varies = d in dims_used(e) or any(ld.tensor in elements for ld in loads(e))
                    if varies and buf not in elements:
                        return None
                case ir.Reduce(buf, _, rdims, e, accumulate) if (
                    accumulate and d in rdims and buf in states and buf not in done
                ):
                    done.add(buf)
                case ir.Reduce(buf, rdims=rdims) if buf in elements and d not in rdims:
                    rowwise = any({*rdims} <= {*self.buffers[n].dims} for n in states)
                    if not (rowwise or self.few(rdims)):
                        return None
                    rows = rows or rowwise
                case ir.Store(dims=dims) if d in dims:
                    pass
                case _:
                    return None
            if not all(self.readable(ld, d, local) for ld in loads(x.expr)):
                return None
        if not states or any(d in self.buffers[n].dims for n in states) or stores_states(body, states.keys()):
            return None
        beside = self.beside(d, body)
        if any(isinstance(x, ir.Reduce) and x.buf in elements and {*x.rdims} & {*beside} for x in body):
            return None
        varying = across_lanes(frozenset({d, *beside}), body, elements)
        if not singular(body, varying & states.keys()):
            return _Loop(s, body, states, local, elements, varying & states.keys(), beside=beside, rows=rows)
        computed = [x for x in body if isinstance(x, ir.Map | ir.Reduce)]
        read = {ld.tensor for x in computed for ld in loads(x.expr) if ld.tensor != x.buf}
        shared = frozenset(states) & read
        additive = all(
            x.op == "sum" if isinstance(x, ir.Reduce) else adds(x.expr, x.buf)
            for x in computed
            if x.buf in states.keys() - shared
        )
        return _Loop(s, body, states, local, elements, frozenset(states), shared, rows=rows) if additive else None

    def few(self, dims: Sequence[str]) -> bool:
        """Whether a lane has room for all that is reduced over these dims: scores of keys have tiles of their own."""
        sizes = [n.value for x in dims if isinstance(n := self.kernel.sizes[x], Const)]
        return len(sizes) == len(dims) and math.prod(int(n) for n in sizes) <= MOST_EACH

    def beside(self, d: str, body: Sequence[ir.Stmt]) -> tuple[str, ...]:
        """Fixed dims that all reductions over d run over beside it."""
        found = {tuple(x for x in s.rdims if x != d) for s in body if isinstance(s, ir.Reduce) and d in s.rdims}
        dims = found.pop() if len(found) == 1 else ()
        return dims if all(isinstance(self.kernel.sizes[x], Const) for x in dims) else ()

    def readable(self, ld: Load, d: str, local: Mapping[str, ir.Buffer]) -> bool:
        """Whether lanes find what a load reads: elements of the loop at their own place, nothing held along its dim."""
        b = local.get(ld.tensor) or self.buffers.get(ld.tensor)
        if b is None or d not in b.dims:
            return True
        return ld.tensor in local and ld.index[b.dims.index(d)] == Index(d)

    def laned(self, f: _Loop, lanes: int, start: Expr, length: int | None) -> list[ir.Stmt]:
        tile = f.at.tile
        lane, turn, turns, places = self.turned(f.at, lanes, start, length)
        out: list[ir.Stmt] = []
        own = [n for n in f.states if n not in f.shared]
        left = 0 if length is None else length % tile
        about = None
        if length is not None and tile < length <= MOST * lanes and not f.shared:
            about = steady(f.body, f.states, f.elements)
        plain = about is not None or reduces_alone(f.body, f.states.keys(), f.elements, self.buffers)
        alone = bool(left) and not f.shared and (plain or left % lanes == 0)
        varying = own if alone and left % lanes else f.varying  # lanes without a last index count one less
        more = {lane: lit(lanes)} | {x: self.kernel.sizes[x] for x in f.beside}
        held = {n: self.state(self.buffers[n], more if n in varying else {}, first=f.rows) for n in own}
        for n in own:
            out += [ir.Alloc(held[n]), replace(f.states[n], buf=held[n].name)]
        of = _Body(self, f, lane, lanes, held)
        if about is not None:
            first = of.again()
            out += first.stream(met_by(start, tile, lanes, lane))
            of = of.again(about, {n: first.names[n] for n in about.kept})
        if about is None or length is None or length >= 2 * tile:
            out.append(ir.For(turn, 1, of.again().stream(places), None if about is None else lit(1), turns))
        if alone:
            after = plus(start, lit(length - left if length is not None else 0))
            some = [plus(plus(after, lit(e)), Index(lane)) for e in range(0, left, lanes)]
            out += of.again().stream(some, left % lanes)
        if f.shared:
            for n, b in held.items():
                value = Load(b.name, tuple(Index(x) for x in b.dims))
                out.append(ir.Reduce(n, "sum", (lane,), value, True))
        else:
            out += of.combined()
        if length is None or (left and not alone):
            out.append(rest_of(f.at, turns, length))
        return out

    def turned(
        self, s: ir.For, lanes: int, start: Expr, length: int | None
    ) -> tuple[str, str, Expr | None, list[Expr]]:
        """Dims of lanes and of turns over whole tiles, how many turns there are where that is not the dim's extent, and
        the indices that a turn's lanes meet, one after the other."""
        d, tile = s.dim, s.tile
        assert tile % lanes == 0
        lane, turn = self.fresh(f"{d}_lane"), self.fresh(f"{d}_turn")
        self.sizes[lane] = lit(lanes)
        turns: Expr | None = None
        if length is not None:
            self.sizes[turn] = lit(length // tile)
        else:
            self.sizes[turn] = call("floordiv", self.kernel.sizes[d], tile)
            turns = call("floordiv", call("sub", s.stop or Size(d), s.start or lit(0)), tile)
        first = plus(start, call("mul", Index(turn), tile))
        return lane, turn, turns, met_by(first, tile, lanes, lane)

    def placed(self, f: Places, lanes: int, start: Expr, length: int | None) -> list[ir.Stmt]:
        """The place of an extreme; what does not fill a tile by the loop as it was, where that is not known."""
        tile = f.at.tile
        lane, turn, turns, places = self.turned(f.at, lanes, start, length)
        own = self.buffers[f.select.buf], replace(self.buffers[f.select.index_buf], dtype=DType.I32)
        best, at = (self.state(b, {lane: lit(lanes)}) for b in own)
        out: list[ir.Stmt] = []
        for b, fill in zip((best, at), f.fills, strict=True):
            out += [ir.Alloc(b), replace(fill, buf=b.name)]
        out.append(ir.For(turn, 1, tuple(x for place in places for x in met(f, best, at, place)), None, turns))
        left = 0 if length is None else length % tile
        for e in range(0, left, lanes):
            place = plus(plus(start, lit((length or 0) - left + e)), Index(lane))
            exists = call("lt", Index(lane), lit(left - e)) if left - e < lanes else None
            out += met(f, best, at, place, exists)
        out += of_all(f, best, at, lane)
        return out if length is not None else [*out, rest_of(f.at, turns, length)]

    def state(self, b: ir.Buffer, more: Mapping[str, Expr], *, first: bool = False) -> ir.Buffer:
        """The buffer that holds a state of each lane along these dims; none: of all, they have the same. first: these
        dims before its own."""
        dims, extents = (*b.dims, *more), (*b.extents, *more.values())
        own = len(b.dims) if first else 0
        order = (*range(own, len(dims)), *range(own))
        return self.ordered(b, f"{b.name}_lane", dims, extents, order)

    def ordered(
        self, b: ir.Buffer, name: str, dims: Sequence[str], extents: Sequence[Expr], order: tuple[int, ...]
    ) -> ir.Buffer:
        """A new buffer like b with these dims in that order."""
        made = replace(
            b, name=self.fresh(name), dims=tuple(dims[n] for n in order), extents=tuple(extents[n] for n in order)
        )
        self.buffers[made.name], self.orders[made.name] = made, order
        return made


class _Body:
    """The loop's body over lanes: `names` maps a buffer to the one with a dim of lanes that stands for it now.

    about: what the lanes' states are about from the first turn on; kept: the buffers that hold it.
    """

    def __init__(
        self,
        p: _Pass,
        f: _Loop,
        lane: str,
        lanes: int,
        held: Mapping[str, ir.Buffer],
        about: Steady | None = None,
        kept: Mapping[str, str] | None = None,
    ):
        self.p, self.f, self.lane, self.lanes = p, f, lane, lanes
        self.held, self.about, self.kept = held, about, kept or {}
        self.along = {lane: lit(lanes)} | {x: p.kernel.sizes[x] for x in f.beside}
        self.names: dict[str, str] = {} if f.shared else {n: b.name for n, b in held.items()}
        self.out: list[ir.Stmt] = []
        self.elements: list[dict[str, str]] = []

    def again(self, about: Steady | None = None, kept: Mapping[str, str] | None = None) -> _Body:
        """As this one began, or about what is kept."""
        return _Body(self.p, self.f, self.lane, self.lanes, self.held, about or self.about, kept or self.kept)

    def stream(self, places: Sequence[Expr], some: int = 0) -> tuple[ir.Stmt, ...]:
        """One turn: what belongs to elements once a place, accumulation along the lanes' own elements only. some: lanes
        that have an index at the last place, where that is not all."""
        d = self.f.at.dim
        self.elements = [{} for _ in places]
        self.names |= self.kept
        left: frozenset[int] = self.about.left if self.about is not None else frozenset()
        for s in (s for n, s in enumerate(self.f.body) if n not in left):
            match s:
                case ir.Map(buf, e) if buf in self.f.elements:
                    for names, at in zip(self.elements, places, strict=True):
                        self.local(buf, self.at(e, at, names), names)
                case ir.Map(buf, e) if buf in self.f.local:
                    self.local(buf, self.at(e, None, {}), self.names)
                case ir.Map(buf, e):
                    self.out.append(ir.Map(self.names.get(buf, buf), self.at(e, None, {})))
                case ir.Reduce(buf, expr=e) if buf in self.f.elements:
                    for names, at in zip(self.elements, places, strict=True):
                        self.reduced(s, self.at(e, at, names), names)
                case ir.Reduce(buf, op, rdims, e, _):
                    rest = tuple(x for x in rdims if x != d and x not in self.along)
                    values = [self.at(e, at, names) for names, at in zip(self.elements, places, strict=True)]
                    if some:
                        kind = self.p.buffers[buf].dtype.compute
                        none = Const(identity_of(op, kind.torch_dtype), kind)
                        values[-1] = call("where", call("lt", Index(self.lane), lit(some)), values[-1], none)
                    if buf in self.f.shared:
                        self.over_lanes(buf, op, rest, values)
                    else:
                        self.out += [self.accumulated(self.held[buf].name, op, rest, v) for v in values]
                case ir.Store():
                    self.out += [self.stored(s, at, names) for names, at in zip(self.elements, places, strict=True)]
        return tuple(self.out)

    def stored(self, s: ir.Store, place: Expr, elements: Mapping[str, str]) -> ir.Store:
        """What the lanes store of their elements at a place."""
        index = tuple(self.at(ix, place, elements) for ix in s.index)
        dims = tuple(self.lane if x == self.f.at.dim else x for x in s.dims)
        return replace(s, index=index, dims=dims, expr=self.at(s.expr, place, elements))

    def over_lanes(self, buf: str, op: str, rdims: tuple[str, ...], values: Sequence[Expr]) -> None:
        """Accumulation over all lanes: first the elements of each lane, then the lanes."""
        tile = self.p.state(self.p.buffers[buf], {self.lane: lit(self.lanes)}, first=self.f.rows)
        first = ir.Reduce(tile.name, op, rdims, values[0], False) if rdims else ir.Map(tile.name, values[0])
        self.out += [ir.Alloc(tile), first, *(self.accumulated(tile.name, op, rdims, v) for v in values[1:])]
        value = Load(tile.name, tuple(Index(x) for x in tile.dims))
        self.out.append(ir.Reduce(buf, op, (self.lane,), value, True))

    def accumulated(self, buf: str, op: str, rdims: tuple[str, ...], e: Expr) -> ir.Stmt:
        """Accumulation over `rdims`, which are none where only the loop's dim is reduced."""
        if rdims:
            return ir.Reduce(buf, op, rdims, e, True)
        old = Load(buf, tuple(Index(x) for x in self.p.buffers[buf].dims))
        return ir.Map(buf, call(COMBINE[op], old, e))

    def combined(self) -> tuple[ir.Stmt, ...]:
        """The lanes as a tile: a state is the lanes' until it is accumulated, then it is the whole's."""
        for s in self.f.body:
            match s:
                case ir.Map(buf) | ir.Reduce(buf) if buf in self.f.elements:
                    continue
                case ir.Store():
                    continue
                case ir.Map(buf, Call("sub", (now, _))) if self.about is not None and buf in self.about.moves:
                    kept = self.p.buffers[self.kept[self.about.moves[buf]]]
                    was = Load(kept.name, tuple(Index(x) for x in kept.dims))
                    self.local(buf, call("sub", self.at(now, None, {}), was), self.names)
                case ir.Map(buf, e) if buf in self.f.local:
                    self.local(buf, self.at(e, None, {}), self.names)
                case ir.Map(buf, e):
                    self.out.append(ir.Map(self.names[buf], self.at(e, None, {})))
                case ir.Reduce(buf, op):
                    mine = self.names.pop(buf)
                    value = Load(mine, tuple(Index(x) for x in self.p.buffers[mine].dims))
                    self.out.append(ir.Reduce(buf, op, tuple(self.along), value, False))
        return tuple(self.out)

    def local(self, buf: str, e: Expr, names: dict[str, str]) -> None:
        """A local buffer of the loop, defined anew with a dim of lanes if its value has one."""
        self.out.append(ir.Map(self.made(buf, e, names), e))

    def reduced(self, s: ir.Reduce, e: Expr, names: dict[str, str]) -> None:
        """What a reduction over other dims makes of the lanes' elements, or adds to that."""
        buf = names[s.buf] if s.accumulate else self.made(s.buf, e, names)
        self.out.append(replace(s, buf=buf, expr=e))

    def made(self, buf: str, e: Expr, names: dict[str, str]) -> str:
        """A new buffer for a value of a local one, of each lane where it has one."""
        b = self.f.local[buf]
        dims, extents = list(b.dims), list(b.extents)
        if self.f.at.dim in dims:
            at = dims.index(self.f.at.dim)
            dims[at], extents[at] = self.lane, lit(self.lanes)
        for x, n in self.along.items():
            if x in dims_used(e) and x not in dims:
                dims.append(x)
                extents.append(n)
        name = f"{buf}_lane" if self.lane in dims else buf
        made = self.p.ordered(b, name, dims, extents, self.order(dims))
        names[buf] = made.name
        self.out.append(ir.Alloc(made))
        return made.name

    def order(self, dims: Sequence[str]) -> tuple[int, ...]:
        """Of a value's axes: that of a state over the same dims, to which it is added as it lies in registers."""
        like = next((b.dims for b in self.held.values() if {*b.dims} == {*dims}), tuple(dims))
        return tuple(dims.index(d) for d in like)

    def at(self, e: Expr, place: Expr | None, elements: Mapping[str, str]) -> Expr:
        """`e` for the element at `place`, on the buffers of the lanes."""

        def one(n: Expr) -> Expr | None:
            match n:
                case Load(t, index) if t in elements:
                    at = [Index(self.lane) if x == place else x for x in index]
                    return Load(elements[t], tuple(at[k] for k in self.p.orders[elements[t]]))
                case Load(t, index) if t in self.names:
                    dims, order = self.p.buffers[self.names[t]].dims, self.p.orders[self.names[t]]
                    at = [*index, *(Index(dims[order.index(k)]) for k in range(len(index), len(dims)))]
                    return Load(self.names[t], tuple(at[k] for k in order))
                case Index(d) if d == self.f.at.dim and place is not None:
                    return place
            return None

        return transform(e, one)
