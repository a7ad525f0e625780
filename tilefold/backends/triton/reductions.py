"""Reductions over vectors: masked, along one axis after the other, combined with what a buffer holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import identity_of
from tilefold.algebra.expr import Cast, Expr, Load, dims_used, loads
from tilefold.backends.triton.coarse import is_truth
from tilefold.backends.triton.context import Context
from tilefold.backends.triton.pairwise import in_threads
from tilefold.backends.triton.product import Products
from tilefold.backends.triton.simplify import pull_scale
from tilefold.backends.triton.traffic import VECTOR, WARP
from tilefold.backends.triton.values import TRITON_TYPE, Value, converted, fitted, number
from tilefold.errors import BackendError
from tilefold.tile import ir
from tilefold.tile.uses import every, expressions

#: Threads of a warp of AMD's.
WAVE = 64
_REDUCE = {"max": "tf_max", "min": "tf_min", "prod": "tf_mul"}
_COMBINE = {"sum": "({0} + {1})", "prod": "({0} * {1})", "any": "({0} | {1})", "all": "({0} & {1})"}


@dataclass(frozen=True, slots=True)
class Reduced:
    """A value over the `dims` that are reduced, with the identity beyond the valid indices, without a factor `scale`.

    bare: it is a load, and unmasked.
    """

    value: Value
    dims: list[str]
    scale: float
    bare: bool


class Reductions:
    """Sums of products go to `Products` where they are matrix products."""

    def __init__(self, c: Context, products: Products):
        self.c, self.products = c, products

    def reduce(self, s: ir.Reduce) -> None:
        """One statement."""
        b = self.c.buffers[s.buf]
        if s.op == "sum" and self.products.contraction(s):
            return
        axes = self.c.axes(b)
        x = self.masked(s, counts=True)
        v, present, scale = x.value, x.dims, x.scale
        by_thread = s.accumulate and s.buf in self.c.entered and x.bare and not self.c.matrix  # Gluon has no such pass
        code = v.code
        self.c.reductions_done += bool(present)
        left = list(v.axes)
        if len(present) > 1 and not self.c.matrix:
            code = self._joined(code, left, present)
        for d in sorted(present, key=left.index, reverse=True):
            if by_thread and left.index(d) == len(left) - 1 > 0:
                code = self._turned(code, left)
            code = self._reduced(s.op, code, left.index(d), b.dtype)
            left.remove(d)
        if b.dtype is DType.I64 and v.kind is DType.I32:
            code = f"({code}).to(tl.int64)"
        if scale != 1.0:  # rounded: what is subtracted from the elements is then one of them
            factor = number(scale, DType.F32)
            code = f"tl.fma({code}, {factor}, 0.0)" if b.dtype is DType.F32 else f"({code} * {factor})"
        if s.accumulate:
            merged = fitted(Value(code, tuple(left), v.kind), axes)
            self.c.assign(s.buf, self._combined(s.op, self.c.buffer_names[s.buf], merged, b.dtype))
        else:
            stored = self.c.stored(Value(code, tuple(left), b.dtype.compute), b.dtype)
            self.c.assign(s.buf, self.c.spread(stored, left, axes, b))

    def masked(self, s: ir.Reduce, *, counts: bool = False) -> Reduced:
        """What is reduced. counts: conditions that are counted may be numbers of 32 bits, which no tile exceeds."""
        b = self.c.buffers[s.buf]
        axes = self.c.axes(b)
        rdims = [d for d in s.rdims if self.c.hold(d).vector]
        e = self.c.settled(s.expr)
        self.c.bounds.reduced(s.buf, s.op, e, accumulate=s.accumulate)
        scale, e = pull_scale(e, loose=False) if s.op in ("max", "min") else (1.0, e)
        over, out = ({d: self.c.hold(d).lanes for d in dims} for dims in (rdims, axes))
        pairs = not self.c.matrix and in_threads(e, over, out, self.c.config.warps)
        frame = (*rdims, *axes) if pairs else self._frame(axes, rdims)
        self.c.layouts.wrote(s.buf, self.c.layouts.made((e,), frame))
        kind = b.dtype.compute
        if counts and s.op == "sum" and kind is DType.I64 and rdims and is_truth(condition := _uncast(e)):
            kind, e = DType.I32, condition
        v = self.c.expressions.value(e, frame)
        if kind is not DType.BOOL:
            v = converted(v, kind)
        self.c.check_value(f"what {s.buf} is reduced from", v.axes)
        if not isinstance(e, Load):
            self.c.check_computed(f"what {s.buf} is reduced from", v.axes)
        missing = [d for d in rdims if d not in v.axes]
        code = self._over_missing(v, s.op, missing)
        v = Value(code, v.axes, v.kind, v.level)
        present = [d for d in rdims if d in v.axes]
        masked = self.c.masks(present, v.axes)
        if masked is not None:
            none = number(identity_of(s.op, kind.torch_dtype), kind)
            v = Value(f"tl.where({masked}, {v.code}, {none})", v.axes, v.kind, v.level)
        return Reduced(v, present, scale, isinstance(e, Load) and masked is None)

    def _frame(self, axes: tuple[str, ...], rdims: Sequence[str]) -> tuple[str, ...]:
        """The order of the axes of what is reduced over one dim: that of the first value which is kept, or stored, over
        the same dims. In another order what both read would be loaded twice, and what is kept change places among
        threads (a norm over channels of images read them again behind its sum: 104 us on an H100, Inductor's 46)."""
        if len(rdims) != 1 or self.c.matrix or self.c.multiplies:
            return (*axes, *rdims)
        for dims in self._frames:
            found = tuple(d for d in dims if self.c.hold(d).vector) if {*axes, *rdims} <= {*dims} else ()
            if sorted(found) == sorted((*axes, *rdims)):  # the first of them
                return found if tuple(d for d in found if d not in rdims) == axes else (*axes, *rdims)
        return (*axes, *rdims)

    @cached_property
    def _frames(self) -> tuple[tuple[str, ...], ...]:
        """Dims of values and of what is stored, of two and more."""
        found = [
            s.buffer.dims if isinstance(s, ir.Alloc) else s.dims
            for s in every(self.c.kernel.body)
            if isinstance(s, ir.Alloc | ir.Store)
        ]
        return tuple(dict.fromkeys(dims for dims in found if len(dims) > 1))

    def _joined(self, code: str, left: list[str], present: list[str]) -> str:
        """`code` with axes that are reduced and side by side as one (in `left` and `present` too).

        Triton reduces an axis over a thread's elements, the threads of a warp and the warps, one axis after the other:
        warps first hand on all that the other axes still have, through shared memory, where what threads have side by
        side meets in one bank. Of 128 x 16 sums over eight warps, 32 elements a thread, on an H100: 60.5 us for 33 MB.
        As one axis they hand on one element a warp.
        """
        beside = {d for d, e in zip(left[1:], left, strict=False) if d in present and e in present}
        if not beside or not self._beside_in_warps(left, beside):
            return code
        shape: list[int] = []
        for d in left:
            lanes = self.c.hold(d).lanes
            if d in beside:
                shape[-1] *= lanes
            else:
                shape.append(lanes)
        left[:], present[:] = [d for d in left if d not in beside], [d for d in present if d not in beside]
        return f"tl.reshape({code}, [{', '.join(map(str, shape))}])"

    def _beside_in_warps(self, left: Sequence[str], beside: Collection[str]) -> bool:
        """Whether threads of a warp that share a row are neighbours once the axes `beside` others are joined to them.

        Triton gives threads first to the axis along which a load has neighbours, then to the others in order. Where
        rows come before the rest of what is reduced, those of one row may be threads 0 to 7 and 16 to 23 of a warp;
        Triton 3.6 then reduces over 0 to 15, other rows among them (its pull request 9219 mends that). They are
        neighbours where there is one row, where neighbours in memory lie along another axis, or where theirs and the
        rows fill the warp.
        """
        groups: list[list[str]] = []
        for d in left:
            if d in beside:
                groups[-1].append(d)
            else:
                groups.append([d])
        lanes = {d: self.c.hold(d).lanes for d in left}
        total = math.prod(lanes.values())
        warp = WARP if self.c.nvidia else WAVE
        held = max(1, total // (warp * self.c.config.warps))  # by a thread; of which it has one vector side by side
        vector = min(held, VECTOR // min(t.dtype.nbytes for t in self.c.kernel.tensors))
        for g in groups:
            others = total // math.prod(lanes[d] for d in g)
            first = [d for d in g if d in self._neighbours]
            if len(g) > 1 and others > 1 and any(others * lanes[d] < warp * vector for d in first):
                return False
        return True

    @cached_property
    def _neighbours(self) -> frozenset[str]:
        """Dims along which some load or store runs through neighbours in memory."""
        stores = [s for s in every(self.c.kernel.body) if isinstance(s, ir.Store)]
        seen = [(ld.tensor, ld.index) for e in expressions(self.c.kernel.body) for ld in loads(e)]
        found = set[str]()
        for name, index in (*seen, *((s.tensor, s.index) for s in stores)):
            t = self.c.tensors.get(name)
            if t is not None and t.unit_axis is not None:
                found |= dims_used(index[t.unit_axis])
        return frozenset(found)

    def _turned(self, code: str, axes: list[str]) -> str:
        """`code` with its last axis, which is reduced next, made the first one (in `axes` too).

        A state to which a loop adds `reduce(load)` over the last axis is kept as one part a thread by Triton's pass
        TritonGPUOptimizeThreadLocality, and reduced after the loop. It does not look whether the loop also reads or
        moves the state (3.6: wrong numbers), nor whether anything reads it afterwards (an assertion ends the
        process). What is transposed first is no load, and free.
        """
        axes.insert(0, axes.pop())
        if len(axes) == 2:
            return f"tl.trans({code})"
        return f"tl.permute({code}, [{len(axes) - 1}, {', '.join(map(str, range(len(axes) - 1)))}])"

    def _over_missing(self, v: Value, op: str, missing: Sequence[str]) -> str:
        """A reduction over dims that the element does not depend on: n x for sums, x^n for products."""
        code = v.code
        for d in missing:
            if op not in ("sum", "prod"):
                continue
            dim = self.c.hold(d)
            count = str(dim.tile) if dim.stop is None else f"tl.minimum({dim.stop} - {dim.base}, {dim.lanes})"
            kind = TRITON_TYPE[v.kind]
            code = f"({code} * ({count}).to({kind}))" if not count.isdigit() else f"({code} * {count})"
            if op == "prod":
                raise BackendError(f"{self.c.kernel.name}: a product over {d} of something that does not vary along it")
        return code

    def _reduced(self, op: str, code: str, axis: int, dtype: DType) -> str:
        if op == "sum":
            return f"tl.sum({code}, {axis})"
        if op in ("any", "all"):
            return f"(tl.{'max' if op == 'any' else 'min'}(({code}).to(tl.int32), {axis}) != 0)"
        if self.c.interpreted and op in ("max", "min"):
            return f"tl.{op}({code}, {axis})"
        combine = _REDUCE[op] if dtype.is_float or op == "prod" else f"tf_int_{op}"
        return f"tl.reduce({code}, {axis}, {combine})"

    def _combined(self, op: str, old: str, new: str, dtype: DType) -> str:
        if op in _COMBINE:
            return _COMBINE[op].format(old, new)
        nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_float and not self.c.interpreted else ""
        return f"tl.{op}imum({old}, {new}{nan})"


def _uncast(e: Expr) -> Expr:
    """A condition that is made a number, without that."""
    return e.arg if isinstance(e, Cast) and not e.dtype.is_float else e
