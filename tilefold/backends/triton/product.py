"""Sums of products on tensor cores.

A reduction sum over K of a * b is a matrix product when each side keeps dims that the other
lacks: M and N. Several dims on a side (heads that share their keys, and rows) are flattened.
Operands are taken in the wider type of two tensors; a value computed in the kernel is rounded to the 16 bits
of the other, as the program it came from rounds it, unless the product keeps it (`block.kept`). What is float32 in
memory is rounded where the program rounds it, and nothing is rounded to 8 bits but where the program says so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Index, Load, dims_used
from tilefold.backends.triton.scalar import narrowed
from tilefold.backends.triton.values import Value, fitted
from tilefold.errors import BackendError
from tilefold.tile import ir
from tilefold.tile.pieces import MATRIX_UNIT

if TYPE_CHECKING:
    from tilefold.backends.triton.context import Context


#: Products of 8-bit floats that a Hopper matrix unit sums with fewer bits than float32 has, before they are added.
MOST_COARSE = 64
#: Fewest lanes of the last of several columns that Triton keeps in shared memory as they are: for fewer in a right
#: operand it has no layout (3.6: an error that it does not report as one), and their matrix is laid transposed.
FEWEST = 8


#: Triton 3.6 multiplies other elements than it was given where an operand lies transposed in shared memory with more
#: rows than this, each longer than a line of its swizzle (bytes): it writes the rows of a line one after the other, and
#: reads them in parts of `TALL` (what `tl.permute` becomes; not where pointers were laid out transposed).
TALL, LINE = 256, 128

#: Integers whose values all floats of 16 bits hold.
BYTES = frozenset({DType.I8, DType.U8, DType.BOOL})


def multiplied(kinds: Collection[DType], summed: DType) -> bool:
    """Whether operands of these types are multiplied as matrices; what is not is summed element by element: float64,
    and integers, exactly, but for bytes that are summed in float32."""
    if any(k.is_float for k in kinds):
        return DType.F64 not in kinds
    return summed is DType.F32 and BYTES.issuperset(kinds)


def in_float(kinds: Collection[DType]) -> DType:
    """The type that operands are multiplied in of which some are integers, as the program does in float32. Of bytes
    16 bits hold every value, products of two are exact, and sums are those of float32."""
    floats = {k for k in kinds if k.is_float}
    short = len(floats) < 2 and floats <= {DType.F16, DType.BF16}
    return next(iter(floats), DType.F16) if short and BYTES.issuperset(set(kinds) - floats) else DType.F32


@dataclass(frozen=True, slots=True)
class _Sides:
    a: Load
    b: Load
    m: tuple[str, ...]
    n: tuple[str, ...]
    k: tuple[str, ...]
    kept: DType | None


class Products:
    def __init__(self, c: Context, tf32: bool):
        self.c, self.tf32 = c, tf32

    def contraction(self, s: ir.Reduce) -> bool:
        """Render a sum as a product where it is one; False leaves it to element-wise code."""
        match self.c.settled(s.expr):
            case Call("mul", (Load() as a, Load() as b)):
                sides = self._sides(s, a, b)
                if sides is not None:
                    self._emit(s.buf, sides, s.accumulate)
                    return True
        return False

    def gemm(self, s: ir.Gemm) -> bool:
        """Render a contraction as a product where it is one; False leaves it to element-wise code."""
        sides = self._sides(s, s.a, s.b)
        if sides is None:
            return False
        self._emit(s.buf, sides, s.accumulate)
        return True

    def _sides(self, s: ir.Reduce | ir.Gemm, a: Load, b: Load) -> _Sides | None:
        c = self.c
        if not multiplied([self._dtype(x) for x in (a, b)], c.buffers[s.buf].dtype):
            return None
        out = c.axes(c.buffers[s.buf])
        da, db = self._dims(a), self._dims(b)
        k = tuple(d for d in s.rdims if c.hold(d).vector)
        if not k or not (set(k) <= da and set(k) <= db) or da & db & set(out):
            return None
        m, n = tuple(d for d in out if d in da), tuple(d for d in out if d in db)
        if set(m) | set(n) != set(out) or not m or not n or (da | db) - set(out) - set(k):
            return None
        if out != (*m, *n):
            a, b, m, n = b, a, n, m
        if out != (*m, *n) or any(self._lanes(x) < MATRIX_UNIT for x in (m, n, k)):
            return None
        return _Sides(a, b, m, n, k, s.kept)

    def _lanes(self, dims: Sequence[str]) -> int:
        n = 1
        for d in dims:
            n *= self.c.hold(d).lanes
        return n

    def _dims(self, ld: Load) -> set[str]:
        """Vector dims that an operand varies over."""
        found: set[str] = set()
        for e in ld.index:
            found |= set(self.c.expressions.value(self.c.settled(e), self._all()).axes)
        return found

    def _all(self) -> tuple[str, ...]:
        return tuple(self.c.kernel.sizes)

    def _emit(self, buf: str, s: _Sides, accumulate: bool) -> None:
        self.c.check_product(self.c.buffers[buf])
        c = self.c
        out = c.buffers[buf]
        turned = self._turned(s)
        if turned:  # (A B)^T = B^T A^T
            s = _Sides(s.b, s.a, s.n, s.m, s.k, s.kept)
        zeros = s.a.tensor in c.buffers or s.b.tensor in c.buffers
        left = self._operand(s.a, s.m, s.k, s.k, zeros=zeros)
        right = self._operand(s.b, s.k, s.n, s.k, zeros=zeros)
        kind = self._kind(s.a, s.b, s.kept)
        c.check_operand(s.a.tensor, (*s.m, *s.k), kind)
        c.check_operand(s.b.tensor, (*s.k, *s.n), kind)
        x, y = self._in(left, kind), self._in(right, kind)
        name = c.buffer_names[buf]
        flat = len(s.m) == 1 and len(s.n) == 1
        precision = ""
        if kind is DType.F32:
            rounded = self.tf32 and all(self._dtype(x).is_float for x in (s.a, s.b))
            rounded |= s.kept is DType.F16 and self.c.nvidia  # of fp16's precision
            precision = f', input_precision="{"tf32" if rounded else "ieee"}"'
        elif kind.nbytes == 1:
            precision = f", max_num_imprecise_acc={min(MOST_COARSE, self._lanes(s.k))}"
        # Added to afterwards where the state has other axes: Triton cannot lay out a loop's state that is reshaped.
        inside = accumulate and flat and not turned
        before = f", {name}" if inside else ""
        code = f"tl.dot({x}, {y}{before}{precision})"
        if turned:
            code = f"tl.permute({code}, (1, 0))"
        if not flat:
            code = f"tl.reshape({code}, {c.shape(out)})"
        c.layouts.wrote(buf, frozenset({turned}))
        c.assign(buf, f"{name} + {code}" if accumulate and not inside else code)

    def _turned(self, s: _Sides) -> bool:
        """Whether an operand would be a result of a product, transposed (see `layouts`): then the product is."""
        of = self.c.layouts.operand
        if True not in of(s.a, (*s.m, *s.k)) | of(s.b, (*s.k, *s.n)):
            return False
        if True in of(s.a, (*s.k, *s.m)) | of(s.b, (*s.n, *s.k)):
            raise BackendError(
                f"{self.c.kernel.name}: a product of {s.a.tensor} and {s.b.tensor}, one of them a transposed product",
                hint="compute one of the two in a kernel of its own",
            )
        return True

    def _operand(
        self, ld: Load, rows: Sequence[str], cols: Sequence[str], reduced: Sequence[str], *, zeros: bool
    ) -> Value:
        """A matrix [rows, cols], raw element type; lanes beyond a ragged end of the reduced dim are 0.

        zeros: an operand has those zeros anyway, so that this one, if it is a tensor, may go on to the tensor's end.
        """
        c = self.c
        frame = (*rows, *cols)
        natural = self._natural(ld, frame)
        if natural != frame and self._tall(rows, cols, self._dtype(ld)):
            natural = frame
        v = None
        inside = zeros or all(self._ends_with(ld, d) for d in reduced)
        if c.config.descriptors and inside and ld.tensor in c.tensors and ld.tensor not in c.buffers:
            v = c.memory.tile(c.tensors[ld.tensor], ld.index, natural)
        v = v or c.raw_load(ld, natural)
        narrow = len(cols) > 1 and tuple(rows) == tuple(reduced) and self._lanes(cols[-1:]) < FEWEST
        axes = (*cols, *rows) if narrow else frame
        if (narrow or tuple(d for d in axes if d in v.axes) != v.axes) and self._tall(rows, cols, v.kind):
            raise BackendError(
                f"{c.kernel.name}: {ld.tensor} would be multiplied transposed, with more than {TALL} rows",
                hint="compute what it is multiplied with in a kernel of its own, or choose smaller tiles",
            )
        code = fitted(v, axes)
        if ld.tensor in c.buffers:
            masked = c.masks(reduced, axes)
            if masked is not None:
                code = f"tl.where({masked}, {code}, 0.0)"
        if narrow:
            code = f"tl.permute(tl.reshape({code}, [{self._lanes(cols)}, {self._lanes(rows)}]), (1, 0))"
        elif len(rows) > 1 or len(cols) > 1:
            code = f"tl.reshape({code}, [{self._lanes(rows)}, {self._lanes(cols)}])"
        return Value(code, frame, v.kind, v.level)

    def _ends_with(self, ld: Load, d: str) -> bool:
        """Whether all lanes of d are valid, or the others lie beyond the tensor (and not in another segment)."""
        c = self.c
        stop = c.hold(d).stop
        if stop is None:
            return True
        if ld.tensor not in c.tensors or stop != c.size(d).code:
            return False
        axes = [(ix, n) for ix, n in zip(ld.index, c.tensors[ld.tensor].shape, strict=True) if d in dims_used(ix)]
        return axes == [(Index(d), c.kernel.sizes[d])]

    def _natural(self, ld: Load, frame: Sequence[str]) -> tuple[str, ...]:
        """The frame in the order of the tensor's axes, so that a transposed operand is loaded as it lies in memory."""
        if ld.tensor in self.c.buffers:
            return tuple(frame)
        order: list[str] = []
        for e in ld.index:
            v = self.c.expressions.value(self.c.settled(e), tuple(frame))
            order += [d for d in v.axes if d not in order]
        return tuple(order) if set(order) == set(frame) else tuple(frame)

    def _tall(self, rows: Sequence[str], cols: Sequence[str], kind: DType) -> bool:
        """Whether a matrix [rows, cols] must not lie in shared memory as [cols, rows] (see `TALL`)."""
        return self._lanes(cols) > TALL and self._lanes(rows) * max(2, kind.nbytes) > LINE

    def _kind(self, a: Load, b: Load, kept: DType | None) -> DType:
        """The type of both operands: of two in memory the wider. What the kernel computed is rounded to the other's 16
        bits, but not to 8: then to the 16 bits of another argument, if there is one; to none if it is kept. What the
        program rounds has the type that it is rounded to."""
        kinds = {self.c.rounded.get(x.tensor) or self._dtype(x) for x in (a, b)}
        if not all(k.is_float for k in kinds):
            return in_float(kinds)
        if kept is DType.BF16 and DType.F32 in kinds:
            return next(iter(kinds - {DType.F32}), self._half("in"))
        if kept is not None and DType.F32 in kinds:
            return DType.F32
        made = DType.F32 in kinds and not any(
            x.tensor in self.c.tensors and self._dtype(x) is DType.F32 for x in (a, b)
        )
        if made and kinds == {DType.F32}:
            return self._half("in")  # what the program multiplies in float32 is kept (`block.kept`)
        if made:
            kinds.remove(DType.F32)
        wide = [k for k in kinds if k.nbytes > 1]
        if wide:
            return wide[0] if len(wide) == 1 else DType.F32
        if made:
            return self._half()
        rounded = len(kinds) == 1 and self._half() is not DType.F32
        return next(iter(kinds)) if rounded else DType.F16  # which holds all values of 8-bit floats

    def _half(self, *roles: str) -> DType:
        """The 16-bit type of the kernel's arguments (in any role, or these); float32: it has none."""
        found = (t.dtype for t in self.c.kernel.tensors if t.role in (roles or ("in", "out")))
        return next((d for d in found if d in (DType.F16, DType.BF16)), DType.F32)

    def _dtype(self, ld: Load) -> DType:
        b = self.c.buffers.get(ld.tensor)
        return self.c.tensors[ld.tensor].dtype if b is None else b.dtype

    def _in(self, v: Value, kind: DType) -> str:
        code = v.code if v.kind is kind else narrowed(v.code, v.kind, kind)
        # the interpreter multiplies the bits of bf16 and knows no 8-bit floats
        return f"({code}).to(tl.float32)" if self.c.interpreted and kind.nbytes < 4 else code
