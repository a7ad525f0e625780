"""argmax, argmin and topk: by one 64-bit key an element, rank of the value, then the lower index.

Of argmax and argmin only what a tile comes to has a key: its extreme, and the lowest index of an element that is equal
to it or, as the extreme is then, no number. Keys of all elements take three times as many instructions.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import identity_of
from tilefold.backends.triton.context import Context
from tilefold.backends.triton.values import Value, converted, fitted, number
from tilefold.errors import BackendError
from tilefold.tile import ir

#: The key of no element: the least int64.
LEAST_KEY = "-9223372036854775808"
#: The index of no element.
NONE = "2147483647"


def _over(code: str, combine: str, axes: Sequence[int]) -> str:
    """`code` reduced over axes, the last first: Triton 3.6 mixes up rows where several are one before they are."""
    for axis in axes:
        code = f"tl.reduce({code}, {axis}, {combine})"
    return code


class Selections:
    """Renders `Select` statements."""

    def __init__(self, c: Context):
        self.c = c

    def select(self, s: ir.Select) -> None:
        """One statement; accumulating, what is held takes part."""
        b = self.c.buffers[s.buf]
        if b.dtype.compute is not DType.F32 and b.dtype.compute is not DType.I64:
            raise BackendError(f"{self.c.kernel.name}: {s.op} of {b.dtype.value} has no Triton form")
        slot = s.op == "topk" and self.c.hold(b.dims[-1]).vector
        axes = self.c.axes(b)
        keep = tuple(d for d in b.dims[:-1] if self.c.hold(d).vector) if slot else axes
        rdims = tuple(d for d in s.rdims if self.c.hold(d).vector)
        if not rdims and slot:
            raise BackendError(f"{self.c.kernel.name}: {s.op} over single elements")
        frame = (*keep, *rdims)
        v = converted(self.c.expressions.value(self.c.settled(s.expr), frame), DType.F32)
        p = self.c.expressions.value(self.c.settled(s.payload), frame)
        if not rdims:
            self._element(s, v, p, keep)
            return
        if not (slot or s.may_lack or self.c.interpreted):
            self._by_value(s, v, p, keep, rdims)
            return
        key = self._ranked(v, p, frame, s.op)
        if s.may_lack:
            key = f"tl.where({fitted(p, frame)} < 0, {LEAST_KEY}, {key})"
        shape = "[" + ", ".join(str(self.c.hold(d).lanes) for d in frame) + "]"
        keys = self.c.scopes.fresh("keys")
        spread = key if set(v.axes) | set(p.axes) == set(frame) else f"tl.broadcast_to({key}, {shape})"
        valid = self.c.masks(rdims, frame)
        self.c.scopes.emit(f"{keys} = {spread if valid is None else f'tl.where({valid}, {spread}, {LEAST_KEY})'}")
        sign = "-" if s.op == "argmin" else ""
        old = self._held(s, sign)
        if slot:
            self._top(s, b, keys, old, keep, len(rdims))
            return
        best = self.c.scopes.fresh("best")
        found = self._largest(keys, len(keep), len(rdims))
        self.c.scopes.emit(f"{best} = tl.maximum({found}, {old})" if s.accumulate else f"{best} = {found}")
        self._unranked(s, best, sign)

    def _element(self, s: ir.Select, v: Value, p: Value, keep: Sequence[str]) -> None:
        """One element after what is held: of equals (and of what is no number) that of the lower index."""
        x, at, emit = self.c.scopes.fresh("value"), self.c.scopes.fresh("at"), self.c.scopes.emit
        emit(f"{x} = {fitted(v, keep)}")
        emit(f"{at} = ({fitted(p, keep)}).to(tl.int64)" if p.axes else f"{at} = {p.code}")
        exists = f"({at} >= 0)" if s.may_lack else None
        if not s.accumulate:
            none = number(identity_of(s.op, self.c.buffers[s.buf].dtype.compute.torch_dtype), DType.F32)
            self.c.assign(s.buf, x if exists is None else f"tl.where({exists}, {x}, {none})")
            self.c.assign(s.index_buf, at if exists is None else f"tl.where({exists}, {at}, -1)")
            return
        held, held_at, take = self.c.buffer_names[s.buf], self.c.buffer_names[s.index_buf], self.c.scopes.fresh("take")
        better = f"({x} {'<' if s.op == 'argmin' else '>'} {held}) | (({x} != {x}) & ({held} == {held}))"
        same = f"(({x} == {held}) | (({x} != {x}) & ({held} != {held}))) & ({at} < {held_at})"
        emit(f"{take} = ({held_at} < 0) | {better} | ({same})")
        if exists is not None:
            emit(f"{take} = {take} & {exists}")
        self.c.assign(s.buf, f"tl.where({take}, {x}, {held})")
        self.c.assign(s.index_buf, f"tl.where({take}, {at}, {held_at})")

    def _held(self, s: ir.Select, sign: str) -> str:
        """The key of what is held, where it takes part."""
        old = self.c.scopes.fresh("held")
        if s.accumulate:
            held, held_at = self.c.buffer_names[s.buf], self.c.buffer_names[s.index_buf]
            rank = f"tf_rank({sign}{held}, {held_at}.to(tl.int32))"
            self.c.scopes.emit(f"{old} = tl.where({held_at} < 0, {LEAST_KEY}, {rank})")
        return old

    def _by_value(self, s: ir.Select, v: Value, p: Value, keep: Sequence[str], rdims: Sequence[str]) -> None:
        """The largest value of the tile, and the lowest index of those that are as large."""
        frame, emit = (*keep, *rdims), self.c.scopes.emit
        sign = "-" if s.op == "argmin" else ""
        values, top, equal, at = (self.c.scopes.fresh(n) for n in ("values", "top", "equal", "at"))
        shape = "[" + ", ".join(str(self.c.hold(d).lanes) for d in frame) + "]"
        spread = fitted(v, frame) if set(v.axes) == set(frame) else f"tl.broadcast_to({fitted(v, frame)}, {shape})"
        valid = self.c.masks(rdims, frame)
        emit(f"{values} = {sign}{spread}")
        if valid is not None:
            emit(f'{values} = tl.where({valid}, {values}, float("-inf"))')
        axes = list(reversed(range(len(keep), len(frame))))
        beside = "[" + ", ".join([":"] * len(keep) + ["None"] * len(rdims)) + "]" if keep else ""
        emit(f"{top} = {_over(values, 'tf_max', axes)}")
        emit(f"{equal} = ({values} == {top}{beside}) | ({values} != {values})")
        if valid is not None:
            emit(f"{equal} = {equal} & {valid}")
        emit(f"{at} = tl.where({equal}, tl.broadcast_to(({fitted(p, frame)}).to(tl.int32), {shape}), {NONE})")
        emit(f"{at} = {_over(at, 'tf_int_min', axes)}")
        old, best = self._held(s, sign), self.c.scopes.fresh("best")
        emit(f"{best} = tl.where({at} == {NONE}, {LEAST_KEY}, tf_rank({top}, {at}))")
        if s.accumulate:
            emit(f"{best} = tl.maximum({best}, {old})")
        self._unranked(s, best, sign)

    def _largest(self, keys: str, first: int, count: int) -> str:
        """The largest key over the last axes, one after the other: Triton 3.6 mixes up rows where keys of several axes
        are reshaped to one before they are reduced (8 rows of 32 x 2 keys)."""
        for axis in reversed(range(first, first + count)):
            keys = f"tl.max({keys}, {axis})" if self.c.interpreted else f"tl.reduce({keys}, {axis}, tf_int_max)"
        return keys

    def _ranked(self, v: Value, p: Value, frame: Sequence[str], op: str) -> str:
        sign = "-" if op == "argmin" else ""
        return f"tf_rank({sign}{fitted(v, frame)}, ({fitted(p, frame)}).to(tl.int32))"

    def _unranked(self, s: ir.Select, best: str, sign: str) -> None:
        none = number(identity_of(s.op, self.c.buffers[s.buf].dtype.compute.torch_dtype), DType.F32)
        self.c.assign(s.buf, f"tl.where({best} == {LEAST_KEY}, {none}, {sign}tf_ranked_value({best}))")
        self.c.assign(s.index_buf, f"tl.where({best} == {LEAST_KEY}, -1, tf_ranked_index({best}))")

    def _top(self, s: ir.Select, b: ir.Buffer, keys: str, old: str, keep: Sequence[str], count: int) -> None:
        """k times the best key, which is then removed (keys differ, for so do indices)."""
        slot = b.dims[-1]
        dim = self.c.hold(slot)
        axis = len(keep)
        best = self.c.scopes.fresh("best")
        slots = fitted(self.c.index(slot), (*keep, slot))
        self.c.scopes.emit(f"{best} = tl.full({self.c.shape(b)}, {LEAST_KEY}, tl.int64)")
        one = self.c.scopes.fresh("top")
        self.c.scopes.open()
        self.c.scopes.emit(f"{one} = {self._kept(keys, axis, count)}")
        if s.accumulate:
            self.c.scopes.emit(f"{one} = tl.maximum({one}, {self._kept(old, axis, 1)})")
            self.c.scopes.emit(f"{old} = tl.where({old} == {one}, {LEAST_KEY}, {old})")
        spread = one if count == 1 else f"tl.expand_dims({one}, {axis})"
        for _ in range(count - 2):
            spread = f"tl.expand_dims({spread}, {axis})"
        self.c.scopes.emit(f"{keys} = tl.where({keys} == {spread}, {LEAST_KEY}, {keys})")
        self.c.scopes.emit(f"{best} = tl.where({slots} == slot, {one}, {best})")
        self.c.scopes.close(f"for slot in tl.static_range({dim.tile}):")
        self._unranked(s, best, "")

    def _kept(self, keys: str, axis: int, count: int) -> str:
        """The largest key over the last axes, with one axis of one key in their place."""
        inner = self._largest(keys, axis + 1, count - 1)
        if self.c.interpreted:
            return f"tl.max({inner}, {axis}, keep_dims=True)"
        return f"tl.reduce({inner}, {axis}, tf_int_max, keep_dims=True)"
