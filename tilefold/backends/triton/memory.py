"""Loads and stores: affine addresses split into a scalar part and vectors that do not vary in loops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Const,
    Expr,
    Index,
    Load,
    call,
    dims_used,
    lit,
    loads,
    substitute,
    walk,
)
from tilefold.algebra.facts import Range, range_of
from tilefold.backends.triton.existing import asked, unchecked
from tilefold.backends.triton.lane_steps import lane_step, looked_up, steps_along
from tilefold.backends.triton.own_vectors import OwnVector, own_vectors
from tilefold.backends.triton.pairs import TWO, Pair, both_exist, both_of, pair_of, split
from tilefold.backends.triton.traffic import REGISTER, WARP
from tilefold.backends.triton.values import Value, fitted
from tilefold.tensor.index_simplify import interval, minus, nonnegative, poly, same, simplify, within
from tilefold.tile import ir
from tilefold.tile.uses import expressions

if TYPE_CHECKING:
    from tilefold.backends.triton.context import Context


#: Limits of tensor maps: axes, indices of a box an axis, bytes that everything is a multiple of.
MOST_AXES, MOST_BOX, DIVISOR = 5, 256, 16
#: Bytes that memory and caches deal in, and of a line; neighbours that a warp has at most, in vectors, and lines of a
#: load that are few.
SECTOR, LINE, NEIGHBOURS, FEW = 32, 128, 8 * WARP, 4


class Memory:
    """Addresses of tensor elements over the current tiles."""

    def __init__(self, c: Context):
        self.c = c
        self.descriptors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.kept: dict[str, tuple[str, int]] = {}
        self._chain: dict[object, Value] | None = None  # loads within the one that is rendered, for its index

    def padded(self, e: Expr) -> tuple[Load | None, float, Expr]:
        """The load of a choice between elements of a tensor and one number, and that number, where the conditions say
        no more than that its positions lie inside of the tensor; and what is chosen then. That may be computed of the
        element, if it is that number of 0, which the load gives outside: rectified images between zeros."""
        fill: float | None = None
        conditions: list[Expr] = []
        while isinstance(e, Call) and e.op == "where" and isinstance(e.args[2], Const):
            value = float(e.args[2].value)
            if value not in (0.0, -math.inf) or fill not in (None, value):
                return None, 0.0, e
            fill = value
            conditions.append(e.args[0])
            e = e.args[1]
        ld = _only_load(e, fill)
        t = None if ld is None else self.c.tensors.get(ld.tensor)
        if ld is None or fill is None or t is None or t.role != "in" or t.dtype.nbytes < 2 or not t.dtype.is_float:
            return None, 0.0, e
        places = list(zip(ld.index, t.shape, strict=True))
        while conditions:
            match conditions.pop():
                case Call("and", (a, b)):
                    conditions += [a, b]
                case Call("ge", (at, Const(0, _))) if any(at == i for i, _ in places):
                    pass
                case Call("lt", (at, end)) if any(self._ends(i, n, at, end) for i, n in places):
                    pass
                case _:
                    return None, 0.0, e
        return ld, fill, e

    def _ends(self, i: Expr, n: Expr, at: Expr, end: Expr) -> bool:
        """Whether at < end says i < n, perhaps of whole numbers of m: i // m < n / m."""
        sizes = self.c.kernel.sizes
        if at == i or not (isinstance(n, Const) and isinstance(end, Const) and 0 < int(end.value) < n.value):
            return at == i and same(end, n, sizes)
        m, rest = divmod(int(n.value), int(end.value))
        return not rest and simplify(call("floordiv", i, m), sizes) == at

    def load(self, t: ir.TensorParam, index: Sequence[Expr], frame: Sequence[str], outside: float = 0.0) -> Value:
        """Elements of a tensor, axes in frame order; each distinct access is loaded once. outside: what stands for
        positions that it does not have."""
        if not any(map(loads, index)):
            return self._loaded(t, index, frame, outside)
        # what is read at a place that is read at a place .. is asked for several times by each
        if self._chain is None:
            self._chain = {}
            try:
                return self._loaded(t, index, frame, outside)
            finally:
                self._chain = None
        key = (t.name, tuple(index), tuple(frame), outside, self.c.chosen)
        if key not in self._chain:
            self._chain[key] = self._loaded(t, index, frame, outside)
        return self._chain[key]

    def _loaded(self, t: ir.TensorParam, index: Sequence[Expr], frame: Sequence[str], outside: float) -> Value:
        order = [*frame, *sorted({d for e in index for d in dims_used(e)} - set(frame))]
        own = self.own_vectors.get((t.name, tuple(index))) if not outside and not self.c.chosen else None
        if own is not None:
            assert t.unit_axis is not None
            index = [lit(own.first) if n == t.unit_axis else e for n, e in enumerate(index)]
        pair, which = self._pair(t, index, order), list[str]()
        if pair is None and (both := self._pairs(t, index, order)) is not None:
            pair, which, order = both[0], both[1][-1:], both[1][:-1]
        base, offsets, axes = self._address(t, index, order, pair)
        self.c.check_value(f"a load of {t.name}", axes)
        level = self._level
        masked = self.c.masks(axes, axes) if pair is None else self.both_masks(pair, axes)
        exist, computed = self.inside(t, index, axes)
        if exist is not None:
            masked = exist if masked is None else f"{masked} & {exist}"
            level = max(level, computed)
        if t.role == "in":
            level = max([level, *(v.level for v in self.c.chosen)])
            parts = [*([] if masked is None else [masked]), *(v.code for v in self.c.chosen)]
            masked = " & ".join(f"({p})" if len(parts) > 1 else p for p in parts) or None
        small = t.dtype.nbytes == 1 and t.dtype.is_float  # Triton casts no integer to them, its interpreter nothing
        fill = ", other=0" if not small else "" if self.c.interpreted else ", other=0.0"
        fill = ', other=float("-inf")' if outside else fill
        once = t.name in self.c.reuse.drop or t.name in self.c.passing
        hint = "last" if t.name in self.c.reuse.keep else "first" if once else ""
        hint = hint and f', eviction_policy="evict_{hint}"'
        pointer = base if offsets is None else f"{base} + {offsets}"
        lanes = [self.c.hold(d).lanes for d in axes]
        if own is not None:
            pointer = self.whole(own, pointer)
            masked = None if masked is None else f"({masked})[:, None]"
        code = f"tl.load({pointer}{hint})" if masked is None else f"tl.load({pointer}, mask={masked}{fill}{hint})"
        if masked is not None:
            level = max([level, *(self.c.hold(d).level for d in axes)])
        if own is not None:
            code = self._part(t, own, code, lanes[0], level)
        elif which:
            code = f"tl.reshape({code}, [{', '.join(map(str, lanes))}, {TWO}])"
        elif pair is not None:
            two = self.c.scopes.once(split(code, lanes), f"pair_{self.c.names[t.name][2:]}", level)
            code = f"{two}[{pair.place}]"
        elif offsets is not None and self._one_by_one(t, index, axes):
            code = self._flat(base, offsets, axes, masked, f"{fill}{hint}" if masked is not None else hint)
        written = t.role != "in"
        stem = f"x_{self.c.names[t.name][2:]}"
        if written:
            name = self.c.scopes.fresh(t.name)
            self.c.scopes.emit(f"{name} = {code}")
        elif self.c.gluon or self.c.multiplies or self.c.config.warps == 1:  # no warp waits for another
            name = self.c.scopes.once(code, stem, level)
        else:
            words = max(1.0, t.dtype.nbytes / REGISTER)
            name = self.c.scopes.read(code, stem, level, words * math.prod(lanes) / (WARP * self.c.config.warps))
        if not written and self.c.packed and axes:
            name = self._again(name)
        return Value(name, (*axes, *which), t.dtype, level)

    @cached_property
    def own_vectors(self) -> Mapping[tuple[str, tuple[Expr, ...]], OwnVector]:
        return own_vectors(self.c.kernel, self.c.config)

    def whole(self, own: OwnVector, pointer: str) -> str:
        """Addresses of vectors of which `pointer` says where they begin."""
        return f"({pointer})[:, None] + {self.c.scopes.once(f'tl.arange(0, {own.width})', 'r_own', 0)}[None, :]"

    def _part(self, t: ir.TensorParam, own: OwnVector, code: str, lanes: int, level: int) -> str:
        """One element a lane of vectors that `code` loads."""
        stem = f"own_{self.c.names[t.name][2:]}"
        code = self.c.scopes.once(code, stem, level)
        for split_off, half in own.split(lanes):
            code = f"{self.c.scopes.once(split_off.format(code), stem, level)}[{half}]"
        return code

    def inside(self, t: ir.TensorParam, index: Sequence[Expr], axes: Sequence[str]) -> tuple[str | None, int]:
        """Which computed positions lie inside of the tensor, and the level of that; None where it is known that all do.

        `where(i > 0, x[i - 1], 0)` reads x in all lanes: what is discarded must not be outside of memory.
        """
        sizes, level = self.c.kernel.sizes, 0
        parts: list[str] = []
        for e, size in zip(map(self.c.settled, index), t.shape, strict=True):
            for i, n in asked(e):  # those of what is read in the index were asked for with it
                v = self.checked(i, n, axes)
                parts.append(fitted(v, axes))
                level = max(level, v.level)
            if isinstance(e, Call) and e.op == "within" and poly(e.args[1], sizes) == poly(size, sizes):
                continue
            at, end = poly(e, sizes), poly(size, sizes)
            if (isinstance(e, Index) and poly(sizes[e.dim], sizes) == end) or within(at, end, sizes):
                continue
            known = interval(at, sizes)
            v = self.c.expressions.value(unchecked(e), axes)
            limit = self.c.expressions.value(size, ())
            level = max(level, v.level, limit.level)
            if known is None or not nonnegative(known[0]):
                parts.append(fitted(Value(f"({v.code} >= 0)", v.axes, DType.BOOL), axes))
            in_turn = any(t.inside(d, e, size, sizes) for d, t in self.c.turns.items() if d in dims_used(e))
            if not in_turn and (known is None or not nonnegative(minus(end, known[1], 1))):
                parts.append(fitted(Value(f"({v.code} < {limit.code})", v.axes, DType.BOOL), axes))
        return (" & ".join(parts), level) if parts else (None, 0)

    def checked(self, e: Expr, limit: Expr, axes: Sequence[str]) -> Value:
        """Whether an index that data chose exists: an error on the device where it does not, in lanes of elements."""
        v, end = self.c.expressions.value(e, axes), self.c.expressions.value(limit, ())
        lanes = self.c.masks(v.axes, v.axes) or "True"
        level = max([v.level, end.level, *(self.c.hold(d).level for d in v.axes)])
        code = f"({v.code} >= 0) & ({v.code} < {end.code})"
        if self.c.gluon:
            late = f"tf_exist({{}}, {lanes})" if v.axes else "tf_trap({})"
            return Value(self.c.scopes.once(code, "exists", level, late), v.axes, DType.BOOL, level)
        shape = tuple(self.c.hold(d).lanes for d in v.axes)
        return Value(self.c.scopes.checked(code, "exists", level, lanes, shape), v.axes, DType.BOOL, level)

    def _again(self, name: str) -> str:
        """What was loaded before the last reduction, kept as it is in memory until here."""
        now = self.c.reductions_done
        loaded, at = self.kept.setdefault(name, (name, now))
        if at != now:
            before, loaded = loaded, self.c.scopes.fresh(name)
            self.c.scopes.emit(f"{loaded} = tf_again({before})")
            self.kept[name] = (loaded, now)
        return loaded

    def tile(self, t: ir.TensorParam, index: Sequence[Expr], frame: Sequence[str]) -> Value | None:
        """The access as a copy by tensor map (TMA), where each axis is one tile of a dim or one position.

        None where it has no such form. Positions beyond the tensor read as 0; positions beyond a bound of the
        loop but inside the tensor are read, so that only their products with 0 may be used.
        """
        if (
            t.role != "in"
            or t.unit_axis != len(t.shape) - 1
            or not 2 <= len(t.shape) <= MOST_AXES
            or t.dtype.nbytes > 4
        ):
            return None
        box: list[int] = []
        at: list[str] = []
        order: list[str] = []
        self._level = 0
        for e in index:
            scalars: list[str] = []
            vectors: list[Value] = []
            self._axis(self.c.settled(e), 1, "1", scalars, vectors, frame)
            at.append(" + ".join(scalars) or "0")
            box.append(1)
            if vectors:
                d = vectors[0].axes[0]
                dim = self.c.hold(d)
                plain = len(vectors) == len(vectors[0].axes) == 1 and vectors[0].code == self.c.arange(d)
                if not plain or d in order or dim.lanes > MOST_BOX or dim.lanes != dim.tile:
                    return None
                order.append(d)
                box[-1] = dim.lanes
        if tuple(order) != tuple(frame) or box[-1] * t.dtype.nbytes < DIVISOR:
            return None
        self.c.check_value(f"a load of {t.name}", order)
        name = self._descriptor(t.name, tuple(box))
        lanes = ", ".join(str(self.c.hold(d).lanes) for d in order)
        position = ", ".join(a if a.isdigit() else f"({a}).to(tl.int32)" if self.c.wide else a for a in at)
        code = f"{name}.load([{position}]).reshape([{lanes}])"
        return Value(
            self.c.scopes.once(code, f"x_{self.c.names[t.name][2:]}", self._level), tuple(order), t.dtype, self._level
        )

    def _descriptor(self, tensor: str, box: tuple[int, ...]) -> str:
        for name, (known, shape) in self.descriptors.items():
            if (known, shape) == (tensor, box):
                return name
        name = f"d_{self.c.names[tensor][2:]}_{len(self.descriptors)}"
        self.descriptors[name] = (tensor, box)
        return name

    def _one_by_one(self, t: ir.TensorParam, index: Sequence[Expr], axes: Sequence[str]) -> bool:
        """Whether a load reads neighbours along its last axis, but every second, each twice (images made larger), in
        both directions (reflection), one of each row of a few (`lane_step`), from between two vectors of 16 bytes on
        (windows, slices), or at places that data give (`looked_up`), so that each element is a load of its own.

        Triton 3.6 then lays the lanes of a warp along the first axis, or gives each lane as many neighbours as a store
        of the same shape has: a warp's load touches 4 to 32 lines of the cache where it could touch one.
        """
        if self.c.matrix or self.c.multiplies or t.unit_axis is None:
            return False
        settled = [self.c.settled(e) for e in index]
        if looked_up(t.unit_axis, settled, [d for d in axes if self.c.hold(d).vector]):
            return True
        step = lane_step(t.unit_axis, t.shape, settled, axes, self.c.kernel.sizes, self._goes_on)
        if step is None or not 0 < step * t.dtype.nbytes < SECTOR:
            return False
        if step * t.dtype.nbytes * NEIGHBOURS <= LINE and self.c.hold(axes[-1]).lanes * FEW >= NEIGHBOURS:
            return False  # however lanes lie
        if not dims_used(index[t.unit_axis]) & set(axes) and self._beside(t, axes):
            return False
        return step != 1 or t.name in self._between

    def _beside(self, t: ir.TensorParam, axes: Sequence[str]) -> bool:
        """Whether neighbours of another tensor are read along the last axis: a thread has several of these, and what it
        takes of rows of a few elements would come to it through shared memory (weighted points, 48 times a turn of a
        loop: 286 us on an H200, 133 with as many of both a thread)."""
        for name, e in self._read_along:
            if name != t.name and axes[-1] in dims_used(e):
                at = poly(self.c.settled(e), self.c.kernel.sizes)
                if steps_along(at, axes[-1:], self._goes_on) == 1:
                    return True
        return False

    @cached_property
    def _read_along(self) -> tuple[tuple[str, Expr], ...]:
        """Positions along the axis of neighbours at which inputs are read, once each."""
        found = dict.fromkeys(ld for e in expressions(self.c.kernel.body) for ld in loads(e))
        inputs = {t.name: t.unit_axis for t in self.c.kernel.tensors if t.role == "in"}
        named = ((ld.tensor, ld.index[a]) for ld in found if (a := inputs.get(ld.tensor)) is not None)
        return tuple(dict.fromkeys(named))

    def _goes_on(self, d: str, n: int) -> bool:
        """Whether what is left of d by n goes on with d through a tile."""
        return self.c.hold(d).vector and self.c.fixed_quotient(d, n)

    def _first(self, t: ir.TensorParam, index: Sequence[Expr]) -> int:
        """The place along the axis of neighbours at which a load starts, as far as it is a number."""
        assert t.unit_axis is not None
        return poly(self.c.settled(index[t.unit_axis]), self.c.kernel.sizes).get((), 0)

    @cached_property
    def _between(self) -> frozenset[str]:
        """Tensors of which some load starts between two vectors: all loads of a window lie in registers alike."""
        found = set()
        for e in expressions(self.c.kernel.body):
            for ld in loads(e):
                t = self.c.tensors.get(ld.tensor)
                if t is not None and t.unit_axis is not None and self._first(t, ld.index) * t.dtype.nbytes % DIVISOR:
                    found.add(t.name)
        return frozenset(found)

    def _pair(self, t: ir.TensorParam, index: Sequence[Expr], order: Sequence[str]) -> Pair | None:
        """The pairs of neighbours of which a load reads one, where both are elements of the tensor."""
        if self.c.matrix or self.c.multiplies or self.c.packed or t.role != "in" or t.dtype is DType.BOOL:
            return None
        if t.unit_axis is None:
            return None
        at = poly(self.c.settled(index[t.unit_axis]), self.c.kernel.sizes)
        used = {d for e in index for d in dims_used(e)}
        pair = pair_of(at, index, t.unit_axis, [d for d in order if d in used and self.c.hold(d).vector])
        if pair is None or self.inside(t, index, order)[0] is not None:
            return None
        exist = both_exist(at, pair.place, t.shape[t.unit_axis], self.c.kernel.sizes)
        return pair if exist else None

    def _pairs(self, t: ir.TensorParam, index: Sequence[Expr], order: Sequence[str]) -> tuple[Pair, list[str]] | None:
        """The pairs of neighbours of which a load reads both, and its dims, the last of which says which one."""
        if self.c.multiplies or self.c.packed or t.role != "in" or t.dtype is DType.BOOL or t.unit_axis is None:
            return None
        used = {d for e in index for d in dims_used(e)}
        dims = [d for d in order if d in used and self.c.hold(d).vector]
        pair, at = self.joined(t, index, dims), poly(self.c.settled(index[t.unit_axis]), self.c.kernel.sizes)
        exist = within(at, poly(t.shape[t.unit_axis], self.c.kernel.sizes), self.c.kernel.sizes)
        return None if pair is None or not exist else (pair, dims)

    def _both(self, d: str) -> str:
        """The lanes of both elements of pairs, counted from 0."""
        return self.c.scopes.once(f"tl.arange(0, {TWO * self.c.hold(d).lanes})", f"r_{d}_both", 0)

    def both_masks(self, pair: Pair, axes: Sequence[str]) -> str | None:
        """`Context.masks` for both elements of pairs, in a form that shows which neighbours are valid alike."""
        dim, parts = self.c.hold(pair.dim), []
        for d in axes:
            m = self.c.mask(d)
            if m is None:
                continue
            if d == pair.dim:
                at = self._both(d) if dim.base == "0" else f"{dim.base} * {TWO} + {self._both(d)}"
                stop = dim.stop or ""
                end = str(TWO * int(stop)) if stop.isdigit() else f"({stop}) * {TWO}"
                m = Value(self.c.scopes.once(f"{at} < {end}", f"ok_{d}_both", m.level), (d,), DType.BOOL, m.level)
            parts.append(fitted(m, axes))
        return " & ".join(f"({p})" if len(parts) > 1 else p for p in parts) or None

    def joined(self, t: ir.TensorParam, index: Sequence[Expr], frame: Sequence[str]) -> Pair | None:
        """The pairs of neighbours that an access over a frame runs through (`both_of`)."""
        if self.c.matrix or t.unit_axis is None:
            return None
        return both_of([self.c.settled(e) for e in index], t.unit_axis, frame, self.c.kernel.sizes)

    def _flat(self, base: str, offsets: str, axes: Sequence[str], masked: str | None, rest: str) -> str:
        """A load through one axis of lanes, which are then neighbours along the last axis."""
        lanes = [self.c.hold(d).lanes for d in axes]
        shape = ", ".join(map(str, lanes))
        flat = f"{math.prod(lanes)}, 1" if len(lanes) == 1 else str(math.prod(lanes))
        where = "" if masked is None else f", mask=tl.reshape(tl.broadcast_to({masked}, [{shape}]), [{flat}])"
        return f"tl.reshape(tl.load({base} + tl.reshape({offsets}, [{flat}]){where}{rest}), [{shape}])"

    def address(
        self, t: ir.TensorParam, index: Sequence[Expr], frame: Sequence[str], pair: Pair | None = None
    ) -> tuple[str, tuple[str, ...]]:
        """Pointer code and its axes, in frame order. pair: of both elements of the pairs, lanes of its dim twice."""
        base, offsets, axes = self._address(t, index, frame, pair)
        return (base if offsets is None else f"{base} + {offsets}"), axes

    def _address(
        self, t: ir.TensorParam, index: Sequence[Expr], frame: Sequence[str], pair: Pair | None = None
    ) -> tuple[str, str | None, tuple[str, ...]]:
        """Code of the scalar part of an address and of its vectors, and their axes, in frame order."""
        scalars: list[str] = []
        vectors: list[Value] = []
        self._level = 0
        for axis, e in enumerate(index):
            if pair is None or axis != t.unit_axis:
                self._axis(self.c.settled(e), 1, self.c.stride(t, axis), scalars, vectors, frame)
                continue
            dim = self.c.hold(pair.dim)
            self._axis(pair.rest, 1, "1", scalars, vectors, frame)
            if dim.base != "0":
                scalars.append(_times(dim.base, TWO, "1"))
                self._level = max(self._level, dim.level)
            vectors.append(Value(self._both(pair.dim), (pair.dim,), DType.I64))
        axes = tuple(d for d in frame if any(d in v.axes for v in vectors))
        base = self.c.names[t.name]
        together = " + ".join(scalars) if scalars and vectors and self.c.one_sum else ""
        if scalars and not together:
            base = self.c.scopes.once(f"{base} + {' + '.join(scalars)}", f"at_{base[2:]}", self._level)
        if not vectors:
            return base, None, ()
        merged: dict[tuple[str, ...], list[str]] = {}
        for v in vectors:
            merged.setdefault(v.axes, []).append(v.code)
        parts = [fitted(Value("(" + " + ".join(c) + ")", a, DType.I64), axes) for a, c in merged.items()]
        if together:
            return base, f"({together} + {' + '.join(parts)})", axes
        if self.c.matrix:  # one pointer a row: the columns of a wide state are constants beside it
            return base, " + ".join(parts), axes
        return base, f"({' + '.join(parts)})", axes

    def _axis(
        self, e: Expr, k: int, stride: str, scalars: list[str], vectors: list[Value], frame: Sequence[str]
    ) -> None:
        """Add the terms of k * e * stride."""
        match e:
            case Call("add", (a, b)):
                self._axis(a, k, stride, scalars, vectors, frame)
                self._axis(b, k, stride, scalars, vectors, frame)
            case Call("sub", (a, b)):
                self._axis(a, k, stride, scalars, vectors, frame)
                self._axis(b, -k, stride, scalars, vectors, frame)
            case Call("mul", (Const(n, DType.I64), a)) | Call("mul", (a, Const(n, DType.I64))):
                self._axis(a, k * int(n), stride, scalars, vectors, frame)
            case Const(n, DType.I64):
                if int(n) * k:
                    scalars.append(_times(str(int(n)), k, stride))
            case Index(d) if self.c.hold(d).vector:
                dim = self.c.hold(d)
                if dim.base != "0":
                    scalars.append(_times(dim.base, k, stride))
                    self._level = max(self._level, dim.level)
                vectors.append(Value(_times(self.c.arange(d), k, stride), (d,), DType.I64))
            case Call("mod", (Index(d), Const(n, DType.I64))) if self._goes_on(d, int(n)):
                dim = self.c.hold(d)
                scalars.append(_times(f"({dim.base} % {int(n)})", k, stride))
                self._level = max(self._level, dim.level)
                vectors.append(Value(_times(self.c.arange(d), k, stride), (d,), DType.I64))
            case _:
                known = self._level  # an index that is loaded has an address of its own
                v = self.c.expressions.value(unchecked(e), frame)
                self._level = max(known, v.level)
                if v.code == "0":
                    return
                if v.axes:
                    vectors.append(Value(_times(f"({v.code})", k, stride), v.axes, DType.I64, v.level))
                else:
                    scalars.append(_times(v.code, k, stride))


def _only_load(e: Expr, fill: float | None) -> Load | None:
    """The load that `e` is, or that alone decides it and of whose 0 it is `fill`."""
    if isinstance(e, Load):
        return e
    found = [*dict.fromkeys(loads(e))]
    if len(found) != 1:
        return None
    of_none = substitute(e, {found[0]: Const(0.0, DType.F32)})
    ranges = [range_of(x, lambda ld: Range()) for x in walk(of_none)]
    known = all(math.isfinite(r.lo) and math.isfinite(r.hi) for r in ranges)  # and so is no number missing
    return found[0] if known and ranges[0].lo == ranges[0].hi == fill else None


def _times(code: str, k: int, stride: str) -> str:
    factors = [code] + ([str(k)] if k != 1 else []) + ([stride] if stride != "1" else [])
    return " * ".join(factors)
