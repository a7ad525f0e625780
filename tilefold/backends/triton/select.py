"""argmax, argmin and topk: by one 64-bit key an element, rank of the value, then the lower index."""

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
        if not rdims:
            raise BackendError(f"{self.c.kernel.name}: {s.op} over single elements")
        frame = (*keep, *rdims)
        v = converted(self.c.expressions.value(self.c.settled(s.expr), frame), DType.F32)
        p = self.c.expressions.value(self.c.settled(s.payload), frame)
        key = self._ranked(v, p, frame, s.op)
        if s.may_lack:
            key = f"tl.where({fitted(p, frame)} < 0, {LEAST_KEY}, {key})"
        shape = "[" + ", ".join(str(self.c.hold(d).lanes) for d in frame) + "]"
        keys = self.c.scopes.fresh("keys")
        spread = key if set(v.axes) | set(p.axes) == set(frame) else f"tl.broadcast_to({key}, {shape})"
        valid = self.c.masks(rdims, frame)
        self.c.scopes.emit(f"{keys} = {spread if valid is None else f'tl.where({valid}, {spread}, {LEAST_KEY})'}")
        held, held_at = self.c.buffer_names[s.buf], self.c.buffer_names[s.index_buf]
        old = self.c.scopes.fresh("held")
        sign = "-" if s.op == "argmin" else ""
        if s.accumulate:
            rank = f"tf_rank({sign}{held}, {held_at}.to(tl.int32))"
            self.c.scopes.emit(f"{old} = tl.where({held_at} < 0, {LEAST_KEY}, {rank})")
        if slot:
            self._top(s, b, keys, old, keep, len(rdims))
            return
        best = self.c.scopes.fresh("best")
        found = self._largest(keys, len(keep), len(rdims))
        self.c.scopes.emit(f"{best} = tl.maximum({found}, {old})" if s.accumulate else f"{best} = {found}")
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
