"""What a tile reads along the stream alone: each value in one thread until it is needed (`row_folds`).

A log-sum-exp or a difference that a backward reads of each query, where groups own keys: in the layout of a product's
result every thread would load, and keep, a fourth of them all. Instead they are loaded, and what follows from them
alone is computed, one value a thread, while the products of the lift run, and cross over when they are used. A quotient
by such a value is a product with its inverse, which is finite and not 0 for what is between 2^-126 and 2^126.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Expr, Index, Load, children, dims_used, loads, rebuild, tensors_read, transform
from tilefold.algebra.ops import OPS
from tilefold.backends.triton.context import Context
from tilefold.backends.triton.gluon_text import WARPS
from tilefold.backends.triton.parts import writes
from tilefold.backends.triton.row_walk import Shared
from tilefold.errors import BackendError
from tilefold.tile import ir

#: Threads of a warp.
THREADS = 32


@dataclass(frozen=True, slots=True)
class Line:
    """The buffer `name` along the stream: an expression of tensors, or its inverse."""

    name: str
    expr: Expr
    inverse: bool


def lines_of(
    stmts: Sequence[ir.Stmt], stream: str, singles: Collection[str], tensors: Iterable[ir.TensorParam]
) -> tuple[tuple[ir.Stmt, ...], tuple[Line, ...]]:
    """Statements that read lines where they read tensors along the stream alone, and those lines. singles: dims of one
    index at a time."""
    found = _Lines(stream, frozenset(singles), {t.name for t in tensors if t.dtype.is_float})
    made = [x for s in stmts if (x := found.without(s, stmts)) is not None]
    gone = found.inside.keys()
    kept = tuple(s for s in made if not (isinstance(s, ir.Alloc) and s.buffer.name in gone))
    return kept, tuple(found.lines.values())


class _Lines:
    def __init__(self, stream: str, singles: frozenset[str], floats: set[str]):
        self.stream, self.singles, self.floats = stream, singles, floats
        self.lines: dict[tuple[Expr, bool], Line] = {}
        self.inside: dict[str, Expr] = {}  # buffers that are lines

    def without(self, s: ir.Stmt, stmts: Sequence[ir.Stmt]) -> ir.Stmt | None:
        """A statement that reads lines; None: it computed one."""
        if not isinstance(s, ir.Map | ir.Reduce | ir.Store):
            return s
        e = transform(s.expr, lambda x: self.inside.get(x.tensor) if isinstance(x, Load) else None)
        if isinstance(s, ir.Map) and self._is_line(e) and sum(writes(x) == s.buf for x in stmts) == 1:
            self.inside[s.buf] = e
            return None
        return replace(s, expr=self.put(e))

    def put(self, e: Expr) -> Expr:
        """The expression with lines in place of what is one."""
        if self._is_line(e):
            return self._line(e, inverse=False)
        match e:
            case Call("div", (a, b)) if self._is_line(b):
                return Call("mul", (self.put(a), self._line(b, inverse=True)))
            case Load():
                return e
        kids = children(e)
        return rebuild(e, tuple(self.put(k) for k in kids)) if kids else e

    def _is_line(self, e: Expr) -> bool:
        """Whether e is a float that follows from tensors, and varies along the stream alone."""
        kind = isinstance(e, Load) or (isinstance(e, Call) and OPS[e.op].result in ("same", "float"))
        read = tensors_read(e)
        along = any(self.stream in dims_used(x) for x in loads(e))
        return kind and along and read <= self.floats and dims_used(e) <= self.singles | {self.stream}

    def _line(self, e: Expr, *, inverse: bool) -> Load:
        key = (e, inverse)
        if key not in self.lines:
            self.lines[key] = Line(f"line_{len(self.lines)}", e, inverse)
        return Load(self.lines[key].name, (Index(self.stream),))


class Streamed:
    """The lines of one tile of the stream: `outer` at that tile, its lifts started."""

    def __init__(self, of: Shared, outer: Context, lines: Sequence[Line]):
        self.of, self.outer, self.stream = of, outer, of.r.loop.dim
        self.missing: dict[str, str] = {}
        if not lines:
            return
        c = of.context((self.stream,))
        c.scopes.stack = [outer.scopes.stack[-1].nested()]
        c.scopes.used = outer.scopes.used
        c.dims = {d: replace(x, level=0) for d, x in outer.dims.items()}
        c.layout, c.one_sum = "by_thread", True
        for line in lines:
            v = c.expressions.value(c.settled(line.expr), (self.stream,))
            if v.axes != (self.stream,) or v.kind is not DType.F32:
                raise BackendError(f"{c.kernel.name}: a line that is not of float32 along {self.stream}")
            code = f"tf_inverse({v.code})" if line.inverse else v.code
            self.missing[line.name] = c.scopes.once(code, line.name, 0)

    def needed(self, stmts: Sequence[ir.Stmt]) -> None:
        """Bring the lines that statements read to where the products' results lie."""
        read = {t for s in stmts if isinstance(s, ir.Map | ir.Reduce) for t in tensors_read(s.expr)}
        for name in [n for n in self.missing if n in read]:
            here = self.outer.scopes.fresh(name)
            self.outer.scopes.emit(
                f"{here} = gl.convert_layout({self.missing.pop(name)}, gl.SliceLayout(0, {self.outer.layout}))"
            )
            extent = self.of.kernel.sizes[self.stream]
            self.outer.buffers[name] = ir.Buffer(name, (self.stream,), (extent,), DType.F32)
            self.outer.held[name] = (self.of.r.loop.tile,)
            self.outer.buffer_names[name] = here
            self.outer.layouts.born(name)


def by_thread() -> str:
    """The layout of lines: one value a thread, as far as there are as many."""
    return f"gl.BlockedLayout([1], [{THREADS}], [{WARPS}], [0])"
