"""The verifier of the tile IR: every rule of `tile.ir` that can be decided without running.

`verify(kernel)` raises VerifyError, whose message names the kernel, the enclosing loops and the
statement. What it checks, beside names and arity: dims in scope, no two nested loops over a dim,
loop bounds and sizes over what is known there, buffers large enough and written before they are
read, integer indices, contractions of plain loads, and that grid iterations store to
different elements.

A dim not among a statement's dims may be used as a scalar where it has one value: the enclosing
tile of it is 1, or its whole extent is 1.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn, assert_never

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym, dims_used, transform, type_of, walk
from tilefold.algebra.ops import INDEX_REDUCERS, OPS, TILE_BOUNDS, TILE_EXTREMES, VALUE_REDUCERS
from tilefold.algebra.text import show
from tilefold.errors import VerifyError
from tilefold.tile.affine import segment_of, separates
from tilefold.tile.ir import Alloc, Buffer, Fill, For, Gemm, Kernel, Map, Reduce, Select, Stmt, Store, TensorParam
from tilefold.tile.text import show_stmt

_RESERVED = frozenset({"inf", "nan", "size", "f64const"})


def verify(kernel: Kernel) -> Kernel:
    """The kernel itself; VerifyError where it breaks a rule of its grammar or of its meaning."""
    _Verifier(kernel).kernel_rules()
    return kernel


@dataclass(slots=True)
class _Scope:
    """Buffers in scope, those written so far, the tile of each dim that a loop is over, and loops' dims by the dim that
    cuts them into segments."""

    buffers: dict[str, Buffer]
    written: set[str]
    tiles: dict[str, int]
    path: tuple[str, ...] = ()
    segments: dict[str, str] = field(default_factory=dict)

    def inner(self, **tiles: int) -> _Scope:
        """The scope of a loop body; what it writes counts as written afterwards."""
        return _Scope(dict(self.buffers), self.written, {**self.tiles, **tiles}, self.path, dict(self.segments))


@dataclass(slots=True)
class _Verifier:
    kernel: Kernel
    tensors: dict[str, TensorParam] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)

    def fail(self, scope: _Scope | None, stmt: Stmt | None, why: str) -> NoReturn:
        where = [f"kernel {self.kernel.name}", *(scope.path if scope else ())]
        if stmt is not None and scope is not None:
            where.append(show_stmt(stmt, scope.buffers))
        raise VerifyError(f"{' / '.join(where)}: {why}")

    # ------------------------------------------------------------------ header

    def kernel_rules(self) -> None:
        k = self.kernel
        self.names((k.name, *k.syms, *k.sizes, *(t.name for t in k.tensors)))
        for n in filter(k.sizes.__contains__, k.syms):
            self.fail(None, None, f"{n} is both a dim and a symbol")
        for d, e in k.sizes.items():
            self.integer_over(None, None, e, f"the size of {d}", sizes=False, tiles=False)
        for t in k.tensors:
            self.tensor(t)
        scope = _Scope({}, set(), {})
        for g in k.grid:
            self.loop_over(scope, None, g.dim, g.tile)
            scope.tiles[g.dim] = g.tile
        self.body(k.body, scope)
        both = sorted(self.stored & self.loaded)
        if both:
            self.fail(None, None, f"{both[0]} is both loaded and stored")
        for t in k.tensors:
            if t.role == "out" and t.name not in self.stored:
                self.fail(None, None, f"output {t.name} is never stored")

    def names(self, names: Iterable[str]) -> None:
        for n in names:
            if not n.isidentifier() or keyword.iskeyword(n) or n in _RESERVED:
                self.fail(None, None, f"{n!r} is not a usable name")

    def tensor(self, t: TensorParam) -> None:
        if t.name in self.tensors:
            self.fail(None, None, f"tensor {t.name} is declared twice")
        if not t.shape and (t.name in self.kernel.sizes or t.name in self.kernel.syms):
            self.fail(None, None, f"{t.name} is a tensor without axes, and a dim or symbol")
        for e in t.shape:
            self.integer_over(None, None, e, f"an extent of {t.name}", sizes=False, tiles=False)
        if t.unit_axis is not None and not 0 <= t.unit_axis < len(t.shape):
            self.fail(None, None, f"{t.name} has no axis {t.unit_axis}")
        self.tensors[t.name] = t

    def loop_over(self, scope: _Scope, stmt: Stmt | None, dim: str, tile: int) -> None:
        if dim not in self.kernel.sizes:
            self.fail(scope, stmt, f"no dim {dim}")
        if dim in scope.tiles:
            self.fail(scope, stmt, f"a loop over {dim} inside a loop over {dim}")
        if tile < 1:
            self.fail(scope, stmt, f"a tile of {tile} indices")

    def integer_over(
        self, scope: _Scope | None, stmt: Stmt | None, e: Expr, what: str, *, sizes: bool, tiles: bool
    ) -> None:
        """`e` is an integer over syms, and sizes and ranges of dims, and extremes of data on these, where allowed."""
        e = transform(e, lambda n: self.extreme(scope, stmt, n, what)) if tiles else e
        for n in walk(e):
            match n:
                case Sym(name) if name not in self.kernel.syms:
                    self.fail(scope, stmt, f"{what}: no symbol {name}")
                case Size(d) if not sizes or d not in self.kernel.sizes:
                    self.fail(scope, stmt, f"{what}: size({d}) is not known here")
                case Load() | Cast():
                    self.fail(scope, stmt, f"{what} must be over symbols and sizes only")
                case Call(op, (Index(d),)) if tiles and op in TILE_BOUNDS and d not in self.kernel.sizes:
                    self.fail(scope, stmt, f"{what}: no dim {d}")
                case Call(op, args) if op in TILE_BOUNDS and not (tiles and isinstance(args[0], Index)):
                    self.fail(scope, stmt, f"{what}: {op} is legal in loop bounds only, of a dim")
                case Call(op, args) if op not in TILE_BOUNDS and any(isinstance(a, Index) for a in args):
                    self.fail(scope, stmt, f"{what} may not depend on an index")
        if isinstance(e, Index) or type_of(e, lambda _: DType.F32) is not DType.I64:
            self.fail(scope, stmt, f"{what} is not an integer over symbols and sizes")

    def extreme(self, scope: _Scope | None, stmt: Stmt | None, e: Expr, what: str) -> Expr | None:
        """A number in place of the least or greatest value of an expression over arguments and indices, if e is one."""
        match e:
            case Call(op, (arg,)) if op in TILE_EXTREMES:
                assert scope is not None and stmt is not None
                if any(isinstance(n, Load) and n.tensor not in self.tensors for n in walk(arg)):
                    self.fail(scope, stmt, f"{what}: {op} of what is no argument of the kernel")
                self.value(stmt, scope, arg, tuple(sorted(dims_used(arg))))
                if self.type(scope, arg) is not DType.I64:
                    self.fail(scope, stmt, f"{what}: {op} of what is no integer")
                return Const(0, DType.I64)
        return None

    # -------------------------------------------------------------- statements

    def body(self, body: tuple[Stmt, ...], scope: _Scope) -> None:
        for s in body:
            self.statement(s, scope)

    def statement(self, s: Stmt, scope: _Scope) -> None:
        match s:
            case Alloc(b):
                self.alloc(s, b, scope)
            case For(dim, tile, body, start, stop):
                self.loop_over(scope, s, dim, tile)
                for e in (start, stop):
                    if e is not None:
                        self.integer_over(scope, s, e, "a loop bound", sizes=True, tiles=True)
                inner = scope.inner(**{dim: tile})
                inner.path = (*scope.path, show_stmt(s, {}))
                if (segment := segment_of(start, stop)) is not None:
                    inner.segments[segment] = dim
                self.body(body, inner)
            case Fill(buf, value):
                if dims_used(value) or any(isinstance(n, Load) for n in walk(value)):
                    self.fail(scope, s, "fills with a value that varies")
                self.value(s, scope, value, ())
                self.write(s, scope, buf)
            case Map(buf, expr):
                dims = self.dest(s, scope, buf).dims
                self.value(s, scope, expr, dims)
                for n in walk(expr):
                    if isinstance(n, Load) and n.tensor == buf and n.index != tuple(map(Index, dims)):
                        self.fail(scope, s, f"reads {buf}, which it writes, at another element")
                self.write(s, scope, buf)
            case Reduce(buf, op, rdims, expr, accumulate):
                if op not in VALUE_REDUCERS:
                    self.fail(scope, s, f"{op} is not one of {', '.join(VALUE_REDUCERS)}")
                self.reduction(s, scope, (buf,), self.dest(s, scope, buf).dims, rdims, (expr,), accumulate)
            case Gemm(buf, a, b, rdims, accumulate):
                self.reduction(s, scope, (buf,), self.dest(s, scope, buf).dims, rdims, (a, b), accumulate)
                self.contraction(s, scope)
            case Select():
                self.selection(s, scope)
            case Store():
                self.store(s, scope)
            case _:
                assert_never(s)

    def alloc(self, s: Alloc, b: Buffer, scope: _Scope) -> None:
        self.names((b.name,))
        if b.name in scope.buffers or b.name in self.tensors:
            self.fail(scope, s, f"{b.name} is already declared")
        if not b.dims and (b.name in self.kernel.sizes or b.name in self.kernel.syms):
            self.fail(scope, s, f"{b.name} is a buffer without dims, and a dim or symbol")
        if len(b.extents) != len(b.dims):
            self.fail(scope, s, f"{len(b.extents)} extents for {len(b.dims)} dims")
        self.dims(s, scope, b.dims)
        for d, e in zip(b.dims, b.extents, strict=True):
            self.integer_over(scope, s, e, f"the extent of {d}", sizes=True, tiles=False)
            whole = self.kernel.sizes[d]
            bounds = [n for n in (scope.tiles.get(d), _const(whole)) if n is not None]
            n = _const(e)
            if n is not None and (not bounds or n < min(bounds)):
                self.fail(scope, s, f"an extent of {n} does not bound the range of {d}")
        scope.buffers[b.name] = b
        scope.written.discard(b.name)

    def dims(self, s: Stmt, scope: _Scope, dims: tuple[str, ...]) -> None:
        for n, d in enumerate(dims):
            if d not in self.kernel.sizes:
                self.fail(scope, s, f"no dim {d}")
            if d in dims[:n]:
                self.fail(scope, s, f"dim {d} appears twice")

    def dest(self, s: Stmt, scope: _Scope, buf: str) -> Buffer:
        if buf not in scope.buffers:
            self.fail(scope, s, f"no buffer {buf} in scope")
        return scope.buffers[buf]

    def write(self, s: Stmt, scope: _Scope, buf: str) -> None:
        self.dest(s, scope, buf)
        scope.written.add(buf)

    def value(self, s: Stmt, scope: _Scope, e: Expr, dims: tuple[str, ...]) -> None:
        """An expression over `dims` and scalars: names, arity, types."""
        for n in walk(e):
            match n:
                case Index(d):
                    self.index(s, scope, d, dims)
                case Size(d) if d not in self.kernel.sizes:
                    self.fail(scope, s, f"no dim {d}")
                case Sym(name) if name not in self.kernel.syms:
                    self.fail(scope, s, f"no symbol {name}")
                case Load(tensor, index):
                    self.load(s, scope, tensor, len(index))
                    for i in index:
                        if self.type(scope, i) is not DType.I64:
                            self.fail(scope, s, f"an index of {tensor} is not an integer")
                case Call(op, args):
                    if op not in OPS or len(args) != OPS[op].arity:
                        self.fail(scope, s, f"no operation {op} of {len(args)} argument(s)")
                    if op in (*TILE_BOUNDS, *TILE_EXTREMES):
                        self.fail(scope, s, f"{op} is legal in loop bounds only")

    def type(self, scope: _Scope, e: Expr) -> DType:
        def dtype(name: str) -> DType:
            return scope.buffers[name].dtype if name in scope.buffers else self.tensors[name].dtype

        return type_of(e, dtype)

    def index(self, s: Stmt, scope: _Scope, d: str, dims: tuple[str, ...]) -> None:
        if d not in self.kernel.sizes:
            self.fail(scope, s, f"no dim {d}")
        if d not in dims and scope.tiles.get(d) != 1 and _const(self.kernel.sizes[d]) != 1:
            self.fail(scope, s, f"index {d} has several values here and is not a dim of the statement")

    def load(self, s: Stmt, scope: _Scope, name: str, rank: int) -> None:
        if name in scope.buffers:
            have = len(scope.buffers[name].dims)
            if name not in scope.written:
                self.fail(scope, s, f"{name} is read before it is written")
        elif name in self.tensors:
            have = len(self.tensors[name].shape)
            self.loaded.add(name)
            if self.tensors[name].role == "out":
                self.fail(scope, s, f"loads the output {name}")
        else:
            self.fail(scope, s, f"no tensor or buffer {name} in scope")
        if have != rank:
            self.fail(scope, s, f"{name} has {have} axes, not {rank}")

    def reduction(
        self,
        s: Stmt,
        scope: _Scope,
        bufs: tuple[str, ...],
        dims: tuple[str, ...],
        rdims: tuple[str, ...],
        exprs: tuple[Expr, ...],
        accumulate: bool,
    ) -> None:
        """What Reduce, Gemm and Select share."""
        if not rdims:
            self.fail(scope, s, "reduces over nothing")
        self.dims(s, scope, (*dims, *rdims))
        for e in exprs:
            self.value(s, scope, e, (*dims, *rdims))
            for n in walk(e):
                if isinstance(n, Load) and n.tensor in bufs:
                    self.fail(scope, s, f"reads {n.tensor}, which it writes")
        for b in bufs:
            if accumulate and b not in scope.written:
                self.fail(scope, s, f"accumulates into {b}, which is not written yet")
            self.write(s, scope, b)

    def contraction(self, s: Gemm, scope: _Scope) -> None:
        dims = scope.buffers[s.buf].dims
        parts = [self.operand(s, scope, x, (*dims, *s.rdims)) for x in (s.a, s.b)]
        for d in s.rdims:
            if not all(d in p for p in parts):
                self.fail(scope, s, f"{d} is summed but is not a dim of both operands")
        for d in dims:
            if not any(d in p for p in parts):
                self.fail(scope, s, f"{d} is a dim of neither operand")

    def operand(self, s: Gemm, scope: _Scope, x: Load, dims: tuple[str, ...]) -> set[str]:
        """The statement dims of a load (formulas as in `h // 4` are fine: back ends handle or avoid them)."""
        used: list[str] = []
        for e in x.index:
            if any(isinstance(n, Load) for n in walk(e)):
                self.fail(scope, s, f"{x.tensor} is indexed by {show(e)}: gemm takes no indirect loads")
            used += dims_used(e) & set(dims)
        if len(set(used)) != len(used):
            self.fail(scope, s, f"{x.tensor} uses a dim for two of its axes")
        return set(used)

    def selection(self, s: Select, scope: _Scope) -> None:
        best, where = self.dest(s, scope, s.buf), self.dest(s, scope, s.index_buf)
        if s.op not in INDEX_REDUCERS:
            self.fail(scope, s, f"{s.op} is not one of {', '.join(INDEX_REDUCERS)}")
        if best.name == where.name or best.dims != where.dims:
            self.fail(scope, s, "values and indices need two buffers of the same dims")
        if not where.dtype.is_int:
            self.fail(scope, s, f"{where.name} holds {where.dtype.value}, not integers")
        dims = best.dims
        if s.op == "topk":
            if not dims:
                self.fail(scope, s, "topk needs a slot dim")
            *_, slot = dims
            if slot in scope.tiles or slot in s.rdims:
                self.fail(scope, s, f"the slot dim {slot} is cut into tiles or reduced")
            dims = dims[:-1]
        self.reduction(s, scope, (s.buf, s.index_buf), dims, s.rdims, (s.expr, s.payload), s.accumulate)
        if self.type(scope, s.payload) is not DType.I64:
            self.fail(scope, s, "the payload is not an integer")

    def store(self, s: Store, scope: _Scope) -> None:
        target = self.tensors.get(s.tensor)
        if target is None or target.role == "in":
            self.fail(scope, s, f"{s.tensor} is not an output")
        if len(s.index) != len(target.shape):
            self.fail(scope, s, f"{s.tensor} has {len(target.shape)} axes, not {len(s.index)}")
        self.dims(s, scope, s.dims)
        for e in (*s.index, s.expr):
            self.value(s, scope, e, s.dims)
        for e in s.index:
            if self.type(scope, e) is not DType.I64:
                self.fail(scope, s, f"an index of {s.tensor} is not an integer")
        self.stored.add(s.tensor)
        if s.added:
            return
        extents = {d: _const(e) for d, e in self.kernel.sizes.items()}
        for d in dict.fromkeys((*s.dims, *(g.dim for g in self.kernel.grid))):
            n, tile = extents[d], scope.tiles.get(d)
            one_tile = d not in s.dims and n is not None and tile is not None and n <= tile
            apart = scope.segments.get(d) in s.dims or separates(s.index, d, extents)
            if n != 1 and not one_tile and not apart:
                self.fail(scope, s, f"different values of {d} store to the same element")


def _const(e: Expr) -> int | None:
    return int(e.value) if isinstance(e, Const) else None
