"""Tile kernel to Triton source.

Every buffer is a tensor value whose axes are its dims of more than one index, every statement
one assignment. A dim is a scalar (tiles of one index), a vector (lanes: a power of two, masked
where fewer indices are valid) or looped over. Loops are rendered in up to three parts: tiles on
which some mask is undecided, tiles on which all are certain and nothing is ragged, the rest
(`facts`). A loop whose tile covers its extent is no loop, and what it loads is loaded once.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import identity_of
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, Size, tensors_read
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.facts import certain
from tilefold.backends.triton.memory import Memory
from tilefold.backends.triton.prelude import INTERPRETED, PRELUDE
from tilefold.backends.triton.product import Products
from tilefold.backends.triton.scalar import Expressions, Leaves, narrowed
from tilefold.backends.triton.scope import Dim, Known, Scopes
from tilefold.backends.triton.simplify import pull_scale, settle
from tilefold.backends.triton.values import TRITON_TYPE, Value, converted, fitted, is_number, number
from tilefold.errors import BackendError
from tilefold.tensor.analysis import is_static
from tilefold.tile import ir

#: Most elements of one value in a thread block.
LARGEST_TILE = 1 << 17
_REDUCE = {"max": "tf_max", "min": "tf_min", "prod": "tf_mul"}
_COMBINE = {"sum": "({0} + {1})", "prod": "({0} * {1})", "any": "({0} | {1})", "all": "({0} & {1})"}


@dataclass(frozen=True, slots=True)
class Rendered:
    """Source text; `arguments` in order: pointers, numbers, descriptors; the grid as tiles of dims.

    `covers`: dims without a loop and the most indices their vector holds: larger sizes need another rendering.
    """

    source: str
    name: str
    arguments: tuple[str, ...]
    grid: tuple[ir.Tiled, ...]
    covers: Mapping[str, int]
    descriptors: Mapping[str, tuple[str, tuple[int, ...]]]


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def render(
    kernel: ir.Kernel,
    config: TritonConfig,
    *,
    bins: Mapping[str, int] | None = None,
    wide: bool = False,
    interpreted: bool = False,
    nvidia: bool = True,
    tf32: bool = False,
) -> Rendered:
    """The Triton source of `kernel`. BackendError where it has no such form (a value too large to hold).

    bins: dynamic dim -> most indices a call may have (for dims held whole). wide: 64-bit offsets.
    """
    return _Renderer(kernel, config, bins or {}, wide, interpreted, nvidia, tf32).render()


class _Renderer:
    def __init__(self, kernel, config, bins, wide, interpreted, nvidia, tf32):  # type: ignore[no-untyped-def]
        self.kernel: ir.Kernel = kernel
        self.config: TritonConfig = config
        self.bins: Mapping[str, int] = bins
        self.wide: bool = wide
        self.interpreted: bool = interpreted
        self.scopes = Scopes()
        self.dims: dict[str, Dim] = {}
        self.known = Known()
        self.buffers: dict[str, ir.Buffer] = {}
        self.tensors = {t.name: t for t in kernel.tensors}
        self.names = _python_names([t.name for t in kernel.tensors])
        self.buffer_names: dict[str, str] = {}
        self.held: dict[str, tuple[int, ...]] = {}
        self.writes = _count_writes(kernel.body)
        self.covers: dict[str, int] = {}
        floats = [t.dtype for t in kernel.tensors if t.role == "in" and t.dtype.is_float]
        self.narrow = bool(floats) and all(d.nbytes <= 2 for d in floats)
        leaves = Leaves(
            self._load, self._index, self._size, self._sym, self._tile_start, self._tile_stop, self.fixed_quotient,
            narrow=self.narrow, interpreted=interpreted, nvidia=nvidia,
        )  # fmt: skip
        self.expressions = Expressions(leaves)
        self.memory = Memory(self)
        self.products = Products(self, tf32)

    # -- the kernel -------------------------------------------------------------------------

    def render(self) -> Rendered:
        name = _identifier(self.kernel.name)
        grid = tuple(self.kernel.grid)
        self._grid(grid)
        for d in self.kernel.sizes:
            self._whole(d)
        self.body(self.kernel.body)
        args: list[str] = []
        for t in self.kernel.tensors:
            args.append(self.names[t.name])
        for t in self.kernel.tensors:
            args += [self.stride(t, a) for a in range(len(t.shape)) if a != t.unit_axis]
        args += [f"sym_{s}" for s in self.kernel.syms]
        args += list(self.memory.descriptors)
        lines = ["", "", "@triton.jit", f"def {name}({', '.join(args)}):"]
        lines += [f"    # {line}" for line in self.kernel.listing.splitlines()]
        lines += ["    " + line for line in self.scopes.stack[0].lines or ["pass"]]
        prelude = PRELUDE + INTERPRETED if self.interpreted else PRELUDE
        source = prelude + "\n".join(lines) + "\n"
        return Rendered(source, name, tuple(args), grid, dict(self.covers), dict(self.memory.descriptors))

    def _grid(self, grid: Sequence[ir.Tiled]) -> None:
        """Program ids: the last tiled dim varies fastest, so that neighbours share operands."""
        if not grid:
            return
        pid = self.scopes.once("tl.program_id(0)" + (".to(tl.int64)" if self.wide else ""), "pid", 0)
        order = self.grid_order(grid)
        for n, t in enumerate(order):
            size = self._size(t.dim).code
            blocks = f"tl.cdiv({size}, {t.tile})" if not size.isdigit() else str(-(-int(size) // t.tile))
            last = n == len(order) - 1
            at = pid if last else self.scopes.once(f"{pid} % {blocks}", f"b_{t.dim}", 0)
            if not last:
                pid = self.scopes.once(f"{pid} // {blocks}", "pid", 0)
            base = at if t.tile == 1 else self.scopes.once(f"{at} * {t.tile}", f"{t.dim}0", 0)
            self._enter(t.dim, base, t.tile, size, 0)

    def grid_order(self, grid: Sequence[ir.Tiled]) -> list[ir.Tiled]:
        """Fastest first: dims in tiles, last one first, then the others, last one first."""
        tiled = [t for t in reversed(grid) if t.tile > 1]
        return tiled + [t for t in reversed(grid) if t.tile == 1]

    def _enter(self, d: str, base: str, tile: int, stop: str, level: int) -> None:
        lanes = max(self.config.lanes.get(d, 1), tile)
        lanes = power_of_two(lanes)
        whole = stop.isdigit() and tile == lanes and int(stop) % tile == 0
        bound: str | None = None if whole or lanes == 1 else stop
        if bound is not None and lanes > tile:
            full = stop.isdigit() and int(stop) % tile == 0
            end = f"{base} + {tile}"
            bound = self.scopes.once(end if full else f"tl.minimum({end}, {stop})", f"{d}_stop", level)
        self.dims[d] = Dim(d, base, lanes, tile, level, bound)

    def _whole(self, d: str) -> None:
        """A dim without a loop here: all of it, where that has a bound."""
        if d in self.dims:
            return
        e = self.kernel.sizes[d]
        if is_static(e):
            n = int(self._size(d).code)
            self.dims[d] = Dim(d, "0", power_of_two(n), n, 0, None if n == power_of_two(n) else str(n))

    def _hold(self, d: str) -> Dim:
        """The range of a dim; a dynamic one that nothing loops over is held whole, up to its bin."""
        if d not in self.dims:
            n = self.bins.get(d)
            if n is None:
                raise BackendError(f"{self.kernel.name} keeps all of {d}, whose size is not bounded")
            self.covers[d] = n
            self.dims[d] = Dim(d, "0", power_of_two(n), n, 0, self._size(d).code)
        return self.dims[d]

    # -- leaves -----------------------------------------------------------------------------

    def arange(self, d: str) -> str:
        return self.scopes.once(f"tl.arange(0, {self._hold(d).lanes})", f"r_{d}", 0)

    def _index(self, d: str) -> Value:
        dim = self._hold(d)
        if not dim.vector:
            return Value(dim.base, (), DType.I64, dim.level)
        code = (
            self.arange(d)
            if dim.base == "0"
            else self.scopes.once(f"{dim.base} + {self.arange(d)}", f"i_{d}", dim.level)
        )
        return Value(code, (d,), DType.I64, dim.level)

    def _size(self, d: str) -> Value:
        e = self.kernel.sizes[d]
        v = self.expressions.value(settle(e, {}, self.kernel.sizes, {}), ())
        if v.code.isdigit():
            return v
        try:
            return Value(str(int(_python_value(v.code))), (), DType.I64)
        except (NameError, SyntaxError, TypeError):
            return Value(self.scopes.once(v.code, f"n_{d}", 0), (), DType.I64)

    def _sym(self, s: str) -> Value:
        return Value(f"sym_{s}", (), DType.I64)

    def _tile_start(self, d: str) -> Value:
        dim = self._hold(d)
        return Value(dim.base, (), DType.I64, dim.level)

    def _tile_stop(self, d: str) -> Value:
        dim = self._hold(d)
        end = f"({dim.base} + {dim.tile})" if dim.base != "0" else str(dim.tile)
        if dim.stop is None:
            return Value(end, (), DType.I64, dim.level)
        return Value(f"tl.minimum({end}, {dim.stop})", (), DType.I64, dim.level)

    def fixed_quotient(self, d: str, n: int) -> bool:
        """Whether d // n is one number on a tile of d (tiles start at multiples of the tile)."""
        dim = self._hold(d)
        return n % dim.tile == 0 and dim.base != "0"

    def stride(self, t: ir.TensorParam, axis: int) -> str:
        return "1" if axis == t.unit_axis else f"s_{self.names[t.name]}_{axis}"

    def mask(self, d: str) -> Value | None:
        """Which lanes of a dim are valid; None where all are."""
        dim = self._hold(d)
        if dim.stop is None or not dim.vector:
            return None
        i = self._index(d)
        code = self.scopes.once(f"{i.code} < {dim.stop}", f"ok_{d}", max(i.level, dim.level))
        return Value(code, (d,), DType.BOOL, i.level)

    def masks(self, axes: Sequence[str], frame: Sequence[str]) -> str | None:
        """The conjunction of the masks of `axes`, over `frame`."""
        parts = [fitted(m, frame) for d in axes if (m := self.mask(d)) is not None]
        return " & ".join(f"({p})" if len(parts) > 1 else p for p in parts) or None

    def _load(self, ld: Load, frame: Sequence[str]) -> Value:
        v = self.raw_load(ld, frame)
        return converted(Value(v.code, v.axes, v.kind, v.level), v.kind.compute)

    def raw_load(self, ld: Load, frame: Sequence[str]) -> Value:
        """The element type as stored, no conversion."""
        if ld.tensor in self.buffers:
            return self._buffer(ld)
        return self.memory.load(self.tensors[ld.tensor], ld.index, frame)

    def _buffer(self, ld: Load) -> Value:
        b = self.buffers[ld.tensor]
        axes = []
        for d, ix, lanes in zip(b.dims, ld.index, self.held[b.name], strict=True):
            if lanes == 1:
                continue
            if not isinstance(ix, Index) or self._hold(ix.dim).lanes != lanes:
                raise BackendError(f"{self.kernel.name} reads {b.name} at a computed position of {d}")
            axes.append(ix.dim)
        return Value(self.buffer_names[b.name], tuple(axes), b.dtype, self.scopes.here)

    # -- statements -------------------------------------------------------------------------

    def body(self, stmts: Sequence[ir.Stmt]) -> None:
        for s in stmts:
            self.stmt(s)

    def stmt(self, s: ir.Stmt) -> None:
        match s:
            case ir.Alloc(buffer):
                self.buffers[buffer.name] = buffer
                self.known.alias.pop(buffer.name, None)
                self.held[buffer.name] = tuple(self._hold(d).lanes for d in buffer.dims)
                self.buffer_names[buffer.name] = self.buffer_names.get(buffer.name) or _identifier("v_" + buffer.name)
                self._check_size(buffer)
            case ir.For():
                self.loop(s)
            case ir.Fill(buf, value):
                b = self.buffers[buf]
                v = self.expressions.value(value, ())
                self.assign(buf, f"tl.full({self.shape(b)}, {v.code}, {TRITON_TYPE[b.dtype]})")
            case ir.Map(buf, expr):
                self.map(buf, expr)
            case ir.Reduce():
                self.reduce(s)
            case ir.Gemm():
                self.products.gemm(s)
            case ir.Select():
                self.select(s)
            case ir.Store():
                self.store(s)

    def _check_size(self, b: ir.Buffer) -> None:
        n = 1
        for d in b.dims:
            n *= self._hold(d).lanes
        if n > LARGEST_TILE:
            raise BackendError(
                f"{self.kernel.name}: {b.name} would hold {n} elements in a thread block",
                hint="smaller tiles, or fewer operators in the kernel",
            )

    def axes(self, b: ir.Buffer) -> tuple[str, ...]:
        return tuple(d for d in b.dims if self._hold(d).vector)

    def shape(self, b: ir.Buffer) -> str:
        return "[" + ", ".join(str(self._hold(d).lanes) for d in self.axes(b)) + "]"

    def assign(self, buf: str, code: str) -> None:
        name = self.buffer_names[buf]
        self.scopes.emit(f"{name} = {code}")
        self.scopes.forget(name)

    def settled(self, e: Expr) -> Expr:
        return settle(e, self.known.facts, self.kernel.sizes, self.known.alias)

    def map(self, buf: str, expr: Expr) -> None:
        b = self.buffers[buf]
        e = self.settled(expr)
        if self.writes[buf] == 1 and not b.dtype.rounds and b.dtype in (DType.F32, DType.F64) and len(self.axes(b)) > 1:
            k, core = pull_scale(e, loose=self.narrow)
            if k != 1.0:
                plain = Load(buf, tuple(Index(d) for d in b.dims))
                self._set(b, core)
                self.known.alias[buf] = Call("mul", (plain, Const(k, DType.F32)))
                return
        self._set(b, e)

    def _set(self, b: ir.Buffer, e: Expr) -> None:
        axes = self.axes(b)
        v = self.expressions.value(e, axes)
        self.assign(b.name, self.spread(self.stored(v, b.dtype), v.axes, axes, b))

    def stored(self, v: Value, dtype: DType) -> Value:
        """`v` in the type of memory."""
        v = converted(v, dtype.compute) if dtype.compute.is_float or v.kind.is_float else v
        if v.kind is dtype:
            return v
        if is_number(v.code):
            return v
        if dtype.is_float:
            return Value(narrowed(v.code, v.kind, dtype), v.axes, dtype, v.level)
        return Value(f"({v.code}).to({TRITON_TYPE[dtype]})", v.axes, dtype, v.level)

    def spread(self, v: Value, have: Sequence[str], axes: tuple[str, ...], b: ir.Buffer) -> str:
        """Code of `v` over all of `axes`."""
        if tuple(have) == axes and (axes or not is_number(v.code)):
            return v.code
        if not have:
            return f"tl.full({self.shape(b)}, {v.code}, {TRITON_TYPE[b.dtype]})"
        return f"tl.broadcast_to({fitted(v, axes)}, {self.shape(b)})"

    # -- reductions -------------------------------------------------------------------------

    def reduce(self, s: ir.Reduce) -> None:
        b = self.buffers[s.buf]
        if s.op == "sum" and self.products.contraction(s):
            return
        axes = self.axes(b)
        rdims = [d for d in s.rdims if self._hold(d).vector]
        e = self.settled(s.expr)
        scale, e = pull_scale(e, loose=False) if s.op in ("max", "min") else (1.0, e)
        frame = (*axes, *rdims)
        v = (
            converted(self.expressions.value(e, frame), b.dtype.compute)
            if b.dtype is not DType.BOOL
            else self.expressions.value(e, frame)
        )
        missing = [d for d in rdims if d not in v.axes]
        code = self._over_missing(v, s.op, missing)
        v = Value(code, v.axes, v.kind, v.level)
        present = [d for d in rdims if d in v.axes]
        masked = self.masks(present, v.axes)
        if masked is not None:
            none = number(identity_of(s.op, b.dtype.compute.torch_dtype), b.dtype.compute)
            v = Value(f"tl.where({masked}, {v.code}, {none})", v.axes, v.kind, v.level)
        code = v.code
        left = list(v.axes)
        for d in sorted(present, key=left.index, reverse=True):
            code = self._reduced(s.op, code, left.index(d), b.dtype)
            left.remove(d)
        if scale != 1.0:
            code = f"({code} * {number(scale, DType.F32)})"
        if s.accumulate:
            merged = fitted(Value(code, tuple(left), v.kind), axes)
            self.assign(s.buf, self._combined(s.op, self.buffer_names[s.buf], merged, b.dtype))
        else:
            stored = self.stored(Value(code, tuple(left), b.dtype.compute), b.dtype)
            self.assign(s.buf, self.spread(stored, left, axes, b))

    def _over_missing(self, v: Value, op: str, missing: Sequence[str]) -> str:
        """A reduction over dims that the element does not depend on: n x for sums, x^n for products."""
        code = v.code
        for d in missing:
            if op not in ("sum", "prod"):
                continue
            dim = self._hold(d)
            count = str(dim.tile) if dim.stop is None else f"tl.minimum({dim.stop} - {dim.base}, {dim.lanes})"
            kind = TRITON_TYPE[v.kind]
            code = f"({code} * ({count}).to({kind}))" if not count.isdigit() else f"({code} * {count})"
            if op == "prod":
                raise BackendError(f"{self.kernel.name}: a product over {d} of something that does not vary along it")
        return code

    def _reduced(self, op: str, code: str, axis: int, dtype: DType) -> str:
        if op == "sum":
            return f"tl.sum({code}, {axis})"
        if op in ("any", "all"):
            return f"(tl.{'max' if op == 'any' else 'min'}(({code}).to(tl.int32), {axis}) != 0)"
        if self.interpreted and op in ("max", "min"):
            return f"tl.{op}({code}, {axis})"
        combine = _REDUCE[op] if dtype.is_float or op == "prod" else f"tf_int_{op}"
        return f"tl.reduce({code}, {axis}, {combine})"

    def _combined(self, op: str, old: str, new: str, dtype: DType) -> str:
        if op in _COMBINE:
            return _COMBINE[op].format(old, new)
        nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_float and not self.interpreted else ""
        return f"tl.{op}imum({old}, {new}{nan})"

    def select(self, s: ir.Select) -> None:
        """argmax, argmin, topk by one 64-bit key an element: rank of the value, then the lower index."""
        b = self.buffers[s.buf]
        if b.dtype.compute is not DType.F32 and b.dtype.compute is not DType.I64:
            raise BackendError(f"{self.kernel.name}: {s.op} of {b.dtype.value} has no Triton form")
        slot = s.op == "topk" and self._hold(b.dims[-1]).vector
        axes = self.axes(b)
        keep = tuple(d for d in b.dims[:-1] if self._hold(d).vector) if slot else axes
        rdims = tuple(d for d in s.rdims if self._hold(d).vector)
        if not rdims:
            raise BackendError(f"{self.kernel.name}: {s.op} over single elements")
        frame = (*keep, *rdims)
        v = converted(self.expressions.value(self.settled(s.expr), frame), DType.F32)
        p = self.expressions.value(self.settled(s.payload), frame)
        key = self._ranked(v, p, frame, s.op)
        shape = "[" + ", ".join(str(self._hold(d).lanes) for d in frame) + "]"
        least = "-9223372036854775808"
        keys = self.scopes.fresh("keys")
        spread = key if set(v.axes) | set(p.axes) == set(frame) else f"tl.broadcast_to({key}, {shape})"
        valid = self.masks(rdims, frame)
        self.scopes.emit(f"{keys} = {spread if valid is None else f'tl.where({valid}, {spread}, {least})'}")
        if len(rdims) > 1:
            lanes = 1
            for d in rdims:
                lanes *= self._hold(d).lanes
            flat = [str(self._hold(d).lanes) for d in keep] + [str(lanes)]
            self.scopes.emit(f"{keys} = tl.reshape({keys}, [{', '.join(flat)}])")
        held, held_at = self.buffer_names[s.buf], self.buffer_names[s.index_buf]
        old = self.scopes.fresh("held")
        sign = "-" if s.op == "argmin" else ""
        if s.accumulate:
            rank = f"tf_rank({sign}{held}, {held_at}.to(tl.int32))"
            self.scopes.emit(f"{old} = tl.where({held_at} < 0, {least}, {rank})")
        if slot:
            self._top(s, b, keys, old, keep)
            return
        best = self.scopes.fresh("best")
        found = (
            f"tl.reduce({keys}, {len(keep)}, tf_int_max)" if not self.interpreted else f"tl.max({keys}, {len(keep)})"
        )
        self.scopes.emit(f"{best} = tl.maximum({found}, {old})" if s.accumulate else f"{best} = {found}")
        self._unranked(s, best, sign)

    def _ranked(self, v: Value, p: Value, frame: Sequence[str], op: str) -> str:
        sign = "-" if op == "argmin" else ""
        return f"tf_rank({sign}{fitted(v, frame)}, ({fitted(p, frame)}).to(tl.int32))"

    def _unranked(self, s: ir.Select, best: str, sign: str) -> None:
        none = number(identity_of(s.op, self.buffers[s.buf].dtype.compute.torch_dtype), DType.F32)
        least = "-9223372036854775808"
        self.assign(s.buf, f"tl.where({best} == {least}, {none}, {sign}tf_ranked_value({best}))")
        self.assign(s.index_buf, f"tl.where({best} == {least}, -1, tf_ranked_index({best}))")

    def _top(self, s: ir.Select, b: ir.Buffer, keys: str, old: str, keep: Sequence[str]) -> None:
        """k times the best key, which is then removed (keys differ, for so do indices)."""
        slot = b.dims[-1]
        dim = self._hold(slot)
        axis, least = len(keep), "-9223372036854775808"
        best = self.scopes.fresh("best")
        slots = fitted(self._index(slot), (*keep, slot))
        reduce = (
            (lambda k: f"tl.max({k}, {axis}, keep_dims=True)")
            if self.interpreted
            else (lambda k: f"tl.reduce({k}, {axis}, tf_int_max, keep_dims=True)")
        )
        self.scopes.emit(f"{best} = tl.full({self.shape(b)}, {least}, tl.int64)")
        one = self.scopes.fresh("top")
        self.scopes.open()
        self.scopes.emit(f"{one} = {reduce(keys)}")
        if s.accumulate:
            self.scopes.emit(f"{one} = tl.maximum({one}, {reduce(old)})")
            self.scopes.emit(f"{old} = tl.where({old} == {one}, {least}, {old})")
        self.scopes.emit(f"{keys} = tl.where({keys} == {one}, {least}, {keys})")
        self.scopes.emit(f"{best} = tl.where({slots} == slot, {one}, {best})")
        self.scopes.close(f"for slot in tl.static_range({dim.tile}):")
        self._unranked(s, best, "")

    # -- loops ------------------------------------------------------------------------------

    def loop(self, s: ir.For) -> None:
        size = self._size(s.dim).code
        lo = "0" if s.start is None else self._bound(s.start, f"{s.dim}_lo")
        hi = size if s.stop is None else self._bound(s.stop, f"{s.dim}_hi")
        outer = self.dims.get(s.dim)
        bin_ = int(size) if size.isdigit() else self.bins.get(s.dim)
        if bin_ is not None and lo == "0" and (s.tile >= bin_ or self._keeps(s)):
            self._single(replace(s, tile=max(s.tile, bin_)), hi, None if size.isdigit() else bin_)
        else:
            self._segments(s, lo, hi)
        if outer is not None:
            self.dims[s.dim] = outer
        else:
            self.dims.pop(s.dim, None)

    def _keeps(self, s: ir.For) -> bool:
        """Whether the loop goes over values that the block holds whole: registers cannot be sliced."""
        read = {t for e in _exprs(s.body) for t in tensors_read(e)} | set(_written(s.body))
        return any(s.dim in b.dims for n, b in self.buffers.items() if n in read and n not in _allocated(s.body))

    def _bound(self, e: Expr, stem: str) -> str:
        v = self.expressions.value(self.settled(e), ())
        return v.code if v.code.isdigit() else self.scopes.once(v.code, stem, self.scopes.here)

    def _single(self, s: ir.For, hi: str, covered: int | None) -> None:
        """The tile covers the extent: no loop."""
        lanes = power_of_two(s.tile)
        if covered is not None:
            self.covers[s.dim] = min(s.tile, self.covers.get(s.dim, s.tile))
        self.dims[s.dim] = Dim(s.dim, "0", lanes, s.tile, self.scopes.here, None if hi == str(lanes) else hi)
        self.body(s.body)

    def _segments(self, s: ir.For, lo: str, hi: str) -> None:
        """Before, in and after the stretch of tiles on which masks are settled and nothing is ragged."""
        outer = frozenset(self.dims) | {s.dim}
        found = certain(_exprs(s.body), s.dim, outer - {s.dim})
        starts = [self._bound(e, f"{s.dim}_from") for e in found.starts]
        stops = [self._bound(e, f"{s.dim}_to") for e in found.stops]
        lanes = max(power_of_two(s.tile), self.config.lanes.get(s.dim, 1))
        exact = lo == "0" and lanes == s.tile and self._divisible(s.stop or Size(s.dim), s.tile)
        if exact and not found.conditions:
            self._part(s, lo, hi, None, {})
            return
        if lanes != s.tile:
            self._part(s, lo, hi, hi, {})
            return
        here = self.scopes.here
        first = lo
        if starts:
            after = _nested("tl.maximum", starts)
            first = self.scopes.once(
                f"{lo} + tl.cdiv(tl.maximum({after} - {lo}, 0), {s.tile}) * {s.tile}", f"{s.dim}_a", here
            )
            first = self.scopes.once(f"tl.minimum({first}, {hi})", f"{s.dim}_a", here)
        end = _nested("tl.minimum", [hi, *stops]) if stops else hi
        last = self.scopes.once(f"{first} + tl.maximum({end} - {first}, 0) // {s.tile} * {s.tile}", f"{s.dim}_b", here)
        if starts:
            self._part(s, lo, first, None if exact else hi, {})
        self._part(s, first, last, None, dict(found.conditions))
        self._part(s, last, hi, None if exact else hi, {})

    def _divisible(self, e: Expr, n: int) -> bool:
        """Whether a loop bound is a multiple of n for certain."""
        match settle(e, {}, self.kernel.sizes, {}):
            case Const(v, _):
                return int(v) % n == 0
            case Call(("minimum" | "maximum"), (a, b)):
                return self._divisible(a, n) and self._divisible(b, n)
            case Call("tile_stop", (Index(d),)):
                return self._hold(d).tile % n == 0 and self._divisible(Size(d), n)
        return False

    def _part(self, s: ir.For, lo: str, hi: str, stop: str | None, facts: Mapping[Expr, bool]) -> None:
        known = Known(dict(self.known.alias), {**self.known.facts, **facts})
        before, self.known = self.known, known
        self.scopes.open()
        at = f"{s.dim}0"
        lanes = max(power_of_two(s.tile), self.config.lanes.get(s.dim, 1))
        if lanes == 1:
            stop = None
        bound = (
            stop
            if stop is None or lanes == s.tile
            else self.scopes.once(f"tl.minimum({at} + {s.tile}, {stop})", f"{s.dim}_stop", self.scopes.here)
        )
        self.dims[s.dim] = Dim(s.dim, at, lanes, s.tile, self.scopes.here, bound)
        self.body(s.body)
        written = {n for n in _written(s.body)}
        self.scopes.close(self._header(s, at, lo, hi, facts, stop))
        for n in written:
            self.scopes.forget(self.buffer_names[n])
        self.known = before

    def _header(self, s: ir.For, at: str, lo: str, hi: str, facts: Mapping[Expr, bool], stop: str | None) -> str:
        extra = f", num_stages={self.config.stages}"
        if self.config.specialize and stop is None:
            extra += ", warp_specialize=True"
        if self.interpreted:
            return f"for {at} in tf_range({lo}, {hi}, {s.tile}):"
        return f"for {at} in tl.range({lo}, {hi}, {s.tile}{extra}):"

    # -- results ----------------------------------------------------------------------------

    def store(self, s: ir.Store) -> None:
        t = self.tensors[s.tensor]
        frame = tuple(d for d in s.dims if self._hold(d).vector)
        v = self.stored(self.expressions.value(self.settled(s.expr), frame), t.dtype)
        pointer, axes = self.memory.address(t, s.index, frame)
        if set(axes) != set(frame):
            raise BackendError(f"{self.kernel.name}: a store to {t.name} does not depend on all of {frame}")
        code = fitted(v, frame)
        if frame and v.axes != frame:
            shape = ", ".join(str(self._hold(d).lanes) for d in frame)
            code = (
                f"tl.broadcast_to({code}, [{shape}])"
                if v.axes
                else f"tl.full([{shape}], {code}, {TRITON_TYPE[t.dtype]})"
            )
        masked = self.masks(frame, frame)
        if masked is not None:
            shape = ", ".join(str(self._hold(d).lanes) for d in frame)
            if len(frame) > 1:
                masked = f"tl.broadcast_to({masked}, [{shape}])"
        self.scopes.emit(f"tl.store({pointer}, {code}{'' if masked is None else ', mask=' + masked})")


def _nested(op: str, items: Sequence[str]) -> str:
    out = items[0]
    for i in items[1:]:
        out = f"{op}({out}, {i})"
    return out


def _exprs(stmts: Sequence[ir.Stmt]) -> list[Expr]:
    out: list[Expr] = []
    for s in stmts:
        match s:
            case ir.Map(_, e) | ir.Store(expr=e):
                out.append(e)
            case ir.Reduce(expr=e):
                out.append(e)
            case ir.Select(expr=e, payload=p):
                out += [e, p]
            case ir.Gemm(a=a, b=b):
                out += [a, b]
            case ir.For(body=body):
                out += _exprs(body)
    return out


def _allocated(stmts: Sequence[ir.Stmt]) -> set[str]:
    found: set[str] = set()
    for s in stmts:
        if isinstance(s, ir.Alloc):
            found.add(s.buffer.name)
        elif isinstance(s, ir.For):
            found |= _allocated(s.body)
    return found


def _written(stmts: Sequence[ir.Stmt]) -> list[str]:
    out: list[str] = []
    for s in stmts:
        match s:
            case ir.Fill(buf) | ir.Map(buf) | ir.Reduce(buf) | ir.Gemm(buf):
                out.append(buf)
            case ir.Select(buf, index_buf):
                out += [buf, index_buf]
            case ir.For(body=body):
                out += _written(body)
    return out


def _count_writes(stmts: Sequence[ir.Stmt]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for n in _written(stmts):
        counts[n] = counts.get(n, 0) + 1
    return counts


def _identifier(name: str) -> str:
    out = re.sub(r"\W", "_", name)
    return f"{out}_" if keyword.iskeyword(out) or out[0].isdigit() or out in ("tl", "triton", "libdevice") else out


def _python_names(names: Sequence[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    for n in names:
        name = _identifier("p_" + n)
        while name in out.values():
            name += "_"
        out[n] = name
    return out


def _python_value(code: str) -> object:
    """The value of an arithmetic expression of literals."""
    if not re.fullmatch(r"[\d\s()+*/\-%]+", code):
        raise SyntaxError(code)
    return eval(code, {"__builtins__": {}})
