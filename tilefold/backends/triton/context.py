"""What rendering knows at a point of a kernel: ranges of dims, buffers, names, what holds; and code from it.

Every buffer is a tensor value whose axes are its dims of more than one index. Lanes of a dim beyond
its valid indices hold anything: whoever reduces over a dim, or stores, masks them (`masks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, loads, walk
from tilefold.algebra.facts import Range, range_of
from tilefold.backends.triton.bounds import Bounds
from tilefold.backends.triton.coarse import coarse, is_truth
from tilefold.backends.triton.config import SHARED, TooLarge, TritonConfig
from tilefold.backends.triton.extremes import extreme
from tilefold.backends.triton.facts import Turns
from tilefold.backends.triton.far import far_tensors, may_be_far
from tilefold.backends.triton.layouts import Layouts
from tilefold.backends.triton.memory import Memory
from tilefold.backends.triton.names import python_names, python_value
from tilefold.backends.triton.prepare import packed
from tilefold.backends.triton.reuse import Reuse
from tilefold.backends.triton.scalar import Expressions, Leaves, narrowed
from tilefold.backends.triton.scope import Dim, Known, Scopes
from tilefold.backends.triton.traffic import WARP
from tilefold.backends.triton.values import TRITON_TYPE, Value, converted, fitted, is_number
from tilefold.block.bounds import integers
from tilefold.errors import BackendError
from tilefold.tensor.analysis import is_static
from tilefold.tile import ir
from tilefold.tile.pieces import power_of_two, product_dims
from tilefold.tile.settle import settle
from tilefold.tile.uses import count_writes, entered, expressions, read_raw, rounded

#: Most elements of one buffer in a thread block.
LARGEST_TILE = 1 << 17
#: Most elements of any value: Triton's `TRITON_MAX_TENSOR_NUMEL`.
LARGEST_VALUE = 1 << 20
#: The same of a result of a product: half of a multiprocessor's registers. Of twice as many (64 rows of 1,024 columns)
#: Triton 3.6 made code for Hopper that wrote outside of shared memory.
LARGEST_PRODUCT = 1 << 15
#: Most elements a thread of what is computed to be reduced: the code is unrolled, so that its length, and the time of
#: its compilation, grow with them (Triton 3.6: of 2,048, 65,000 lines of PTX and two minutes of a slow core).
MOST_A_THREAD = 512
#: The same of what is stored: more of it spills, whatever else there is.
MOST_STORED = 192
#: Lanes of a dim that has or may have no index at all: a scalar could not be masked.
EMPTY = 2


class Context:
    """The state of one rendering. bins: dynamic dim -> most indices. wide: 64-bit offsets."""

    def __init__(
        self,
        kernel: ir.Kernel,
        config: TritonConfig,
        bins: Mapping[str, int],
        *,
        wide: bool,
        interpreted: bool,
        nvidia: bool,
    ):
        self.kernel: ir.Kernel = kernel
        self.config: TritonConfig = config
        self.bins: Mapping[str, int] = bins
        self.wide: bool = wide
        self.interpreted: bool = interpreted
        self.nvidia: bool = nvidia
        self.scopes = Scopes()
        self.matrix: tuple[str, ...] = ()  # in Gluon: rows and columns of the layout that values have
        self.layout = "mma"  # its name
        self.gluon = False  # values have layouts
        self.one_sum = False  # addresses are a tensor's and one sum: what a loop keeps of it has 32 bits, not 64
        self.lanes_here = False  # what follows from lanes is computed where it stands, not kept through loops
        self.dims: dict[str, Dim] = {}
        self.turns: dict[str, Turns] = {}  # of loops over whole tiles
        self.known = Known()
        self.reuse = Reuse()
        self.passing: frozenset[str] = frozenset()  # inputs that stream by (`reuse.passing`)
        self.packed = packed(kernel, config) and nvidia and not interpreted
        self.chosen: tuple[Value, ...] = ()  # of thread blocks: loads are needed only where all of these are true
        self.reductions_done = 0
        self.buffers: dict[str, ir.Buffer] = {}
        self.tensors = {t.name: t for t in kernel.tensors}
        self.data = integers((t.name, t.dtype) for t in kernel.tensors if t.role == "in")
        self.names = python_names([t.name for t in kernel.tensors])
        self.buffer_names: dict[str, str] = {}
        self.held: dict[str, tuple[int, ...]] = {}
        self.there: dict[Load, Value] = {}  # elements of tensors that were brought otherwise than by pointers
        self.born: dict[str, int] = {}
        self.layouts = Layouts(kernel.body)
        self.raw = read_raw(kernel.body)
        self.writes = count_writes(kernel.body)
        self.entered = entered(kernel.body)
        self.rounded = rounded(kernel.body)
        self.ranges: dict[str, Range] = {}
        self.distant = far_tensors(kernel)
        self.bounds = Bounds()
        self.covers: dict[str, int] = {}
        self.multiplies = bool(product_dims(kernel))
        floats = [t.dtype for t in kernel.tensors if t.dtype.is_float]
        all_narrow = bool(floats) and all(d.nbytes <= 2 for d in floats)
        self.narrow = all_narrow or coarse(kernel)
        leaves = Leaves(
            self.load, self.exists, self.guarded, self.index, self.size, self.sym, self.tile_start, self.tile_stop,
            self.extreme, self.fixed_quotient, self.range_of, self.bounds.quotient, self.scopes.once, self.far,
            self.only,
            narrow=self.narrow, all_narrow=all_narrow, exact=_coarse(kernel), inverses=not self.multiplies,
            multiplies=self.multiplies, interpreted=interpreted, nvidia=nvidia,
            positions=lambda: not (wide or self.gluon),
        )  # fmt: skip
        self.expressions = Expressions(leaves)
        self.memory = Memory(self)

    def range_of(self, e: Expr) -> Range:
        """What is known of the value of e, through the buffers that are written once."""
        return range_of(e, lambda ld: self.ranges.get(ld.tensor, Range()), self.most_of)

    def most_of(self, d: str) -> float:
        """The largest index of a dim, infinite where that is not known."""
        e = self.kernel.sizes.get(d)
        return float(e.value) - 1 if isinstance(e, Const) else math.inf

    @contextmanager
    def only(self, condition: Value, chosen: bool) -> Iterator[None]:
        """See `Leaves.only`. Operands of products are read ahead of their use, whatever is chosen."""
        before = self.chosen
        if not (self.gluon or self.multiplies):
            self.chosen = (*before, replace(condition, code=condition.code if chosen else f"({condition.code} == 0)"))
        try:
            yield
        finally:
            self.chosen = before

    def far(self, e: Expr) -> bool:
        """Whether e may be so far from 0 that its product with log2(e) overflows."""
        return may_be_far(e, lambda ld: ld.tensor in self.distant)

    # -- ranges of dims ---------------------------------------------------------------------

    def enter(self, d: str, base: str, tile: int, stop: str, level: int) -> None:
        """The tile of a grid dim that starts at `base`; indices from `stop` on are not valid."""
        lanes = power_of_two(max(self.config.lanes.get(d, 1), tile))
        whole = stop.isdigit() and tile == lanes and int(stop) % tile == 0
        bound: str | None = None if whole or lanes == 1 else stop
        if bound is not None and lanes > tile:
            full = stop.isdigit() and int(stop) % tile == 0
            end = f"{base} + {tile}"
            bound = self.scopes.once(end if full else f"tl.minimum({end}, {stop})", f"{d}_stop", level)
        self.dims[d] = Dim(d, base, lanes, tile, level, bound)

    def whole(self, d: str) -> None:
        """A dim without a loop here: all of it, where that has a bound."""
        if d in self.dims:
            return
        e = self.kernel.sizes[d]
        if is_static(e):
            n = int(self.size(d).code)
            lanes = power_of_two(max(n, self.config.lanes.get(d, 1))) if n else EMPTY
            self.dims[d] = Dim(d, "0", lanes, n, 0, None if n == lanes else str(n))

    def hold(self, d: str) -> Dim:
        """The range of a dim; a dynamic one that nothing loops over is held whole, up to its bin."""
        if d not in self.dims:
            n = self.bins.get(d)
            if n is None:
                raise BackendError(f"{self.kernel.name} keeps all of {d}, whose size is not bounded")
            self.covers[d] = n
            self.dims[d] = Dim(d, "0", max(EMPTY, power_of_two(n)), n, 0, self.size(d).code)
        return self.dims[d]

    def arange(self, d: str) -> str:
        """The lanes of a dim, counted from 0."""
        more = " + tf_apart()" if self.lanes_here else ""
        return self.scopes.once(f"tl.arange(0, {self.hold(d).lanes}{self.laid((d,))}){more}", f"r_{d}", 0)

    def index(self, d: str) -> Value:
        """The indices of a dim: a vector, or the one that its tile has."""
        dim = self.hold(d)
        if not dim.vector:
            return Value(dim.base, (), DType.I64, dim.level)
        code = (
            self.arange(d)
            if dim.base == "0"
            else self.scopes.once(f"{dim.base} + {self.arange(d)}", f"i_{d}", dim.level)
        )
        return Value(code, (d,), DType.I64, dim.level)

    def size(self, d: str) -> Value:
        """The extent of a dim: a literal where it is static."""
        e = self.kernel.sizes[d]
        v = self.expressions.value(settle(e, {}, self.kernel.sizes, {}), ())
        if v.code.isdigit():
            return v
        try:
            return Value(str(python_value(v.code)), (), DType.I64)
        except (NameError, SyntaxError, TypeError):
            return Value(self.scopes.once(v.code, f"n_{d}", 0), (), DType.I64)

    def sym(self, s: str) -> Value:
        """A symbolic size."""
        return Value(f"sym_{s}", (), DType.I64)

    def tile_start(self, d: str) -> Value:
        """The first index of the current range."""
        dim = self.hold(d)
        return Value(dim.base, (), DType.I64, dim.level)

    def tile_stop(self, d: str) -> Value:
        """One past the last valid index of the current range."""
        dim = self.hold(d)
        end = f"({dim.base} + {dim.tile})" if dim.base != "0" else str(dim.tile)
        if dim.stop is None:
            return Value(end, (), DType.I64, dim.level)
        return Value(f"tl.minimum({end}, {dim.stop})", (), DType.I64, dim.level)

    def extreme(self, op: str, e: Expr) -> Value:
        """The least or greatest value of `e` over the current ranges of its dims."""
        return extreme(self, op, e)

    def fixed_quotient(self, d: str, n: int) -> bool:
        """Whether d // n is one number on a tile of d: tiles that start at multiples of the tile."""
        dim = self.hold(d)
        return dim.even and n % dim.tile == 0 and dim.base != "0"

    def stride(self, t: ir.TensorParam, axis: int) -> str:
        """Elements from one index of a tensor's axis to the next."""
        return "1" if axis == t.unit_axis else f"s_{self.names[t.name]}_{axis}"

    def mask(self, d: str) -> Value | None:
        """Which lanes of a dim are valid; None where all are."""
        dim = self.hold(d)
        if dim.stop is None or not dim.vector:
            return None
        i = self.index(d)
        code = self.scopes.once(f"{i.code} < {dim.stop}", f"ok_{d}", max(i.level, dim.level))
        return Value(code, (d,), DType.BOOL, i.level)

    def masks(self, axes: Sequence[str], frame: Sequence[str]) -> str | None:
        """The conjunction of the masks of `axes`, over `frame`."""
        parts = [fitted(m, frame) for d in axes if (m := self.mask(d)) is not None]
        return " & ".join(f"({p})" if len(parts) > 1 else p for p in parts) or None

    # -- values -----------------------------------------------------------------------------

    def load(self, ld: Load, frame: Sequence[str]) -> Value:
        """An element of a tensor or buffer in its compute type."""
        v = self.raw_load(ld, frame)
        return converted(Value(v.code, v.axes, v.kind, v.level), v.kind.compute)

    def exists(self, index: Expr, extent: Expr, frame: Sequence[str]) -> Value:
        """Whether an index that data chose exists; the device stops where it does not."""
        return self.memory.checked(index, extent, frame)

    def guarded(self, e: Expr, frame: Sequence[str]) -> Value | None:
        """An element of a tensor, or what stands for those outside of it (padding), which the load gives by itself, or
        what is computed of it; None for any other choice."""
        ld, fill, chosen = self.memory.padded(e)
        if ld is None or ld.tensor in self.buffers or self.matrix:
            return None
        if chosen != ld:
            return self.expressions.value(chosen, frame)
        v = self.memory.load(self.tensors[ld.tensor], ld.index, frame, fill)
        return converted(Value(v.code, v.axes, v.kind, v.level), v.kind.compute)

    def raw_load(self, ld: Load, frame: Sequence[str]) -> Value:
        """The element type as stored, no conversion."""
        if ld.tensor in self.buffers:
            return self._buffer(ld)
        if ld in self.there:
            return self.there[ld]
        return self.memory.load(self.tensors[ld.tensor], ld.index, frame)

    def _buffer(self, ld: Load) -> Value:
        b = self.buffers[ld.tensor]
        axes = []
        for d, ix, lanes in zip(b.dims, ld.index, self.held[b.name], strict=True):
            if lanes == 1:
                continue
            if not isinstance(ix, Index) or self.hold(ix.dim).lanes != lanes:
                raise BackendError(f"{self.kernel.name} reads {b.name} at a computed position of {d}")
            axes.append(ix.dim)
        return Value(self.buffer_names[b.name], tuple(axes), b.dtype, self.scopes.here)

    def check_size(self, b: ir.Buffer) -> None:
        """TooLarge for a buffer that is too large for a thread block."""
        self._check(b.name, b.dims, LARGEST_TILE)

    def check_product(self, b: ir.Buffer) -> None:
        """TooLarge for a result of the matrix unit that the registers of a thread block do not hold."""
        self._check(b.name, b.dims, LARGEST_PRODUCT)

    def check_operand(self, what: str, axes: Sequence[str], dtype: DType) -> None:
        """TooLarge for an operand of the matrix unit that the shared memory of a thread block does not hold."""
        self._check(what, axes, SHARED // dtype.nbytes)

    def check_value(self, what: str, axes: Sequence[str]) -> None:
        """TooLarge for a value, loaded or computed on the way to a buffer, that Triton would refuse."""
        self._check(what, axes, LARGEST_VALUE)

    def check_computed(self, what: str, axes: Sequence[str]) -> None:
        """TooLarge for a value that is computed element by element (a product that no matrix unit takes), too much of
        it by each thread."""
        self._check_share(what, axes, MOST_A_THREAD)

    def check_stored(self, what: str, axes: Sequence[str]) -> None:
        """The same for what is stored, which is in registers."""
        self.check_value(what, axes)
        self._check_share(what, axes, MOST_STORED)

    def _check_share(self, what: str, axes: Sequence[str], most: int) -> None:
        self._check(what, axes, most * WARP * self.config.warps)

    def _check(self, what: str, dims: Sequence[str], most: int) -> None:
        n = math.prod(self.hold(d).lanes for d in dims)
        if n <= most:
            return
        hint = "smaller tiles, or fewer operators in the kernel"
        if not all(is_static(self.kernel.sizes[d]) for d in dims):
            hint = (
                "some of its sizes are symbolic: compile with dynamic=False, or mark those that are no lengths "
                "(numbers of heads, head sizes) with torch._dynamo.mark_static(x, axis)"
            )
        raise TooLarge(f"{self.kernel.name}: {what} would hold {n} elements in a thread block", hint=hint)

    def axes(self, b: ir.Buffer) -> tuple[str, ...]:
        """Dims of a buffer that are vectors: the axes of its value."""
        return tuple(d for d in b.dims if self.hold(d).vector)

    def shape(self, b: ir.Buffer) -> str:
        """The shape of a buffer's value."""
        return "[" + ", ".join(str(self.hold(d).lanes) for d in self.axes(b)) + "]"

    def full(self, axes: Sequence[str], code: str, dtype: DType) -> str:
        """A value of vectors that is the same everywhere."""
        shape = ", ".join(str(self.hold(d).lanes) for d in axes)
        return f"tl.full([{shape}], {code}, {TRITON_TYPE[dtype]}{self.laid(axes)})"

    def laid(self, axes: Sequence[str]) -> str:
        """The argument that says how a value of these axes lies, where that is said (Gluon)."""
        if not self.matrix or not axes:
            return ""
        if tuple(axes) == self.matrix:
            return f", {self.layout}"
        if len(axes) > 1 or axes[0] not in self.matrix:
            raise BackendError(f"{self.kernel.name}: a value over {tuple(axes)} beside a matrix of {self.matrix}")
        return f", tl.SliceLayout({1 - self.matrix.index(axes[0])}, {self.layout})"

    def assign(self, buf: str, code: str) -> None:
        """Give a buffer a new value."""
        name = self.buffer_names[buf]
        self.scopes.emit(f"{name} = {code}")
        self.scopes.forget(name)

    def settled(self, e: Expr) -> Expr:
        """`e` with what is known here put in."""
        return settle(e, self.known.facts, self.kernel.sizes, self.known.scales, self._place)

    def _place(self, e: Expr) -> int | None:
        """An index, or where a tile starts, that is one number here. What depends on nothing else is no code: Triton
        takes a condition of numbers for no mask, and compiles all that such a condition discards."""
        match e:
            case Call("tile_start", (Index(d),)):
                dim = self.dims.get(d)
            case Index(d) if (dim := self.dims.get(d)) is not None and not dim.vector:
                pass
            case _:
                return None
        return int(dim.base) if dim is not None and dim.base.isdigit() else None

    def stored(self, v: Value, dtype: DType, *, checked: bool = True) -> Value:
        """`v` in the type of memory; unchecked, it is known to be in its range."""
        v = converted(v, dtype.compute) if dtype.compute.is_float or v.kind.is_float else v
        if v.kind is dtype:
            return v
        if is_number(v.code):
            return v
        if dtype.is_float:
            return Value(narrowed(v.code, v.kind, dtype, checked=checked), v.axes, dtype, v.level)
        return Value(f"({v.code}).to({TRITON_TYPE[dtype]})", v.axes, dtype, v.level)

    def spread(self, v: Value, have: Sequence[str], axes: tuple[str, ...], b: ir.Buffer) -> str:
        """Code of `v` over all of `axes`."""
        if tuple(have) == axes and (axes or not is_number(v.code)):
            return v.code
        if not have:
            return self.full(axes, v.code, b.dtype)
        return f"tl.broadcast_to({fitted(v, axes)}, {self.shape(b)})"


def _coarse(kernel: ir.Kernel) -> bool:
    """Whether something is rounded to a grid so coarse that an error in the last place shows as a whole step."""
    steps = {"floor", "ceil", "trunc", "round", "floordiv", "mod"}
    made = any(t.dtype.rounds and t.dtype.is_float for t in kernel.tensors if t.role != "in")
    if made:
        return True
    found = [x for e in expressions(kernel.body) for x in walk(e)]
    truths = {t.name for t in kernel.tensors if t.dtype is DType.BOOL}
    casts = any(
        isinstance(x, Cast) and x.dtype.rounds and x.dtype is not DType.BOOL and not is_truth(x.arg, truths)
        for x in found
    )
    # positions are divided too (heads that share keys), which rounds no value
    return casts or any(loads(x) for x in found if isinstance(x, Call) and x.op in steps)
