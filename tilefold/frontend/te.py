"""Tensor expressions: programs written as index notation, in Python.

    n = te.size("n")                                             # known when the program runs
    i, j = te.dims(i=1024, j=n)
    x = te.tensor("x", (i, j), "f32")                            # an argument
    m = te.compute("m", (i,), te.max(x[i, j], over=j))
    t = te.compute("t", (i,), te.sum(te.exp(x[i, j] - m[i]), over=j))
    y = te.compute("y", (i, j), te.exp(x[i, j] - m[i]) / t[i])
    softmax = te.program("softmax", y)

Every definition has a name, by which a schedule addresses it. A program is a `tensor.ir.Program`; it can
be scheduled by hand (`te.schedule`), or compiled as it is, on the automatic road (`te.compile`, in
`frontend.te_run`). Mistakes raise TilefoldError with the line of the definition. The style is that of
Neptune's Figure 12.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import overload

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, Index, Load, Size, Sym, call, dims_used, lit, type_of
from tilefold.algebra.ops import INDEX_REDUCERS, OPS
from tilefold.block.schedule import Schedule
from tilefold.errors import SourceLoc, TilefoldError
from tilefold.frontend.te_run import Compiled, compile, reference
from tilefold.tensor.ir import Compute, Input, Program

__all__ = [
    "Compiled",
    "Dim",
    "Extent",
    "Operand",
    "Reduction",
    "Schedule",
    "Tensor",
    "Value",
    "abs",
    "all",
    "any",
    "argmax",
    "argmin",
    "call_op",
    "cast",
    "compile",
    "compute",
    "dims",
    "equal",
    "exp",
    "extent",
    "inf",
    "log",
    "max",
    "maximum",
    "min",
    "minimum",
    "prod",
    "program",
    "reference",
    "rsqrt",
    "schedule",
    "sigmoid",
    "size",
    "sqrt",
    "sum",
    "tanh",
    "tensor",
    "topk",
    "where",
]

inf = math.inf
_numbered = itertools.count()


class Value:
    """A scalar expression over dims. Python's operators build larger ones; comparisons give conditions, which
    `&`, `|` and `~` combine. `reads`: the tensors it mentions, `dims` the dims, by name.
    """

    __slots__ = ("dims", "expr", "reads")

    def __init__(self, expr: Expr, reads: Mapping[str, Tensor], dims: Mapping[str, Dim]):
        self.expr, self.reads, self.dims = expr, reads, dims

    def __add__(self, o: Operand) -> Value:
        return call_op("add", self, o)

    def __radd__(self, o: Operand) -> Value:
        return call_op("add", o, self)

    def __sub__(self, o: Operand) -> Value:
        return call_op("sub", self, o)

    def __rsub__(self, o: Operand) -> Value:
        return call_op("sub", o, self)

    def __mul__(self, o: Operand) -> Value:
        return call_op("mul", self, o)

    def __rmul__(self, o: Operand) -> Value:
        return call_op("mul", o, self)

    def __truediv__(self, o: Operand) -> Value:
        return call_op("div", self, o)

    def __rtruediv__(self, o: Operand) -> Value:
        return call_op("div", o, self)

    def __floordiv__(self, o: Operand) -> Value:
        return call_op("floordiv", self, o)

    def __mod__(self, o: Operand) -> Value:
        return call_op("mod", self, o)

    def __pow__(self, o: Operand) -> Value:
        return call_op("pow", self, o)

    def __neg__(self) -> Value:
        return call_op("neg", self)

    def __lt__(self, o: Operand) -> Value:
        return call_op("lt", self, o)

    def __le__(self, o: Operand) -> Value:
        return call_op("le", self, o)

    def __gt__(self, o: Operand) -> Value:
        return call_op("gt", self, o)

    def __ge__(self, o: Operand) -> Value:
        return call_op("ge", self, o)

    def __and__(self, o: Operand) -> Value:
        return call_op("and", self, o)

    def __or__(self, o: Operand) -> Value:
        return call_op("or", self, o)

    def __invert__(self) -> Value:
        return call_op("not", self)

    def __bool__(self) -> bool:
        raise _mistake("a condition is known only when the program runs", "use &, |, ~ and te.where")


class Dim(Value):
    """A named index with an extent: an integer, or an expression over `te.size`s."""

    __slots__ = ("extent", "name")

    def __init__(self, name: str, extent: Extent):
        self.name, self.extent = name, _extent(extent)
        super().__init__(Index(name), {}, {name: self})


Operand = Value | int | float | bool
Extent = int | Value


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction over dims; it becomes a value when `te.compute` gives it a name."""

    reducer: str
    body: Value
    over: tuple[Dim, ...]

    def _alone(self, other: object) -> Value:
        raise _unnamed(self)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _alone


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An argument or a definition. `t[i, j]` reads an element, at dims or at any integer values."""

    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    made_by: Compute | None = None
    reads: Mapping[str, Tensor] = field(default_factory=dict)
    dims: Mapping[str, Dim] = field(default_factory=dict)
    loc: SourceLoc | None = None
    number: int = field(default_factory=lambda: next(_numbered))

    def __getitem__(self, index: Operand | tuple[Operand, ...]) -> Value:
        at = index if isinstance(index, tuple) else (index,)
        if len(at) != len(self.shape):
            raise _mistake(f"{self.name} has {len(self.shape)} axes, not {len(at)}")
        parts = [_value(i) for i in at]
        reads = {name: t for p in parts for name, t in p.reads.items()} | {self.name: self}
        dims = {name: d for p in parts for name, d in p.dims.items()}
        return Value(Load(self.name, tuple(p.expr for p in parts)), reads, dims)


def _mistake(message: str, hint: str | None = None) -> TilefoldError:
    return TilefoldError(message, loc=SourceLoc.of_caller(__file__), hint=hint)


def _unnamed(r: Reduction) -> TilefoldError:
    return _mistake(f"a {r.reducer} inside an expression has no name", "name it with te.compute")


def _value(o: Operand | Reduction) -> Value:
    if isinstance(o, Value):
        return o
    if isinstance(o, Reduction):
        raise _unnamed(o)
    if not isinstance(o, int | float):
        raise _mistake(f"{o!r} is no value", "read an element: t[i, j]" if isinstance(o, Tensor) else None)
    return Value(lit(o), {}, {})


def _extent(e: Extent) -> Expr:
    if isinstance(e, Dim):
        return e.extent
    return e.expr if isinstance(e, Value) else Const(int(e), DType.I64)


# -- building ------------------------------------------------------------------------------


def size(name: str) -> Value:
    """An extent that is known when the program runs; some argument must have it as an axis."""
    return Value(Sym(name), {}, {})


def dims(**extents: Extent) -> tuple[Dim, ...]:
    """Dims by name, with their extents."""
    return tuple(Dim(name, e) for name, e in extents.items())


def extent(d: Dim) -> Value:
    """The extent of a dim as a value."""
    return Value(Size(d.name), {}, {d.name: d})


def tensor(name: str, shape: tuple[Extent, ...], dtype: str = "f32") -> Tensor:
    """An argument. `shape`: extents, or dims whose extents they are; dtype: as in `DType`, such as "bf16"."""
    return Tensor(name, _dtype(dtype), tuple(map(_extent, shape)), loc=SourceLoc.of_caller(__file__))


@overload
def compute(name: str, over: tuple[Dim, ...], body: Operand | Reduction, dtype: str | None = None) -> Tensor: ...
@overload
def compute(
    name: str, over: tuple[Dim, ...], body: Callable[..., Operand | Reduction], dtype: str | None = None
) -> Tensor: ...


def compute(
    name: str,
    over: tuple[Dim, ...],
    body: Operand | Reduction | Callable[..., Operand | Reduction],
    dtype: str | None = None,
) -> Tensor:
    """The definition name[over] = body, for all values of the dims `over`: a value, a reduction, or a function of
    the dims that gives one. dtype: what it is stored as (default: the type it is computed in).
    """
    if callable(body):
        body = body(*over)
    if isinstance(body, Reduction):
        return _define(name, over, body.body, dtype, body.reducer, body.over)
    return _define(name, over, _value(body), dtype)


def topk(names: tuple[str, str], over: tuple[Dim, ...], slot: Dim, body: Operand, along: Dim) -> tuple[Tensor, Tensor]:
    """The largest values of `body` along a dim, one a value of `slot` in falling order, and where they are."""
    values = _define(names[0], (*over, slot), _value(body), None, "topk", (along,), names[1])
    index = Tensor(names[1], DType.I64, values.shape, values.made_by, values.reads, values.dims, values.loc)
    return values, index


def _define(
    name: str,
    over: tuple[Dim, ...],
    body: Value,
    dtype: str | None,
    reducer: str | None = None,
    along: tuple[Dim, ...] = (),
    index_name: str | None = None,
) -> Tensor:
    loc = SourceLoc.of_caller(__file__)
    known = {d.name: d for d in (*over, *along)}
    if len(known) != len(over) + len(along):
        raise _mistake(f"{name} has a dim twice: {', '.join(d.name for d in (*over, *along))}")
    for d in (*over, *along):
        if body.dims.get(d.name, d).extent != d.extent:
            raise _mistake(f"{name} uses two dims called {d.name}, of different extents")
    missing = sorted(dims_used(body.expr) - set(known))
    if missing:
        raise _mistake(f"{name} depends on {', '.join(missing)}", f"add it to the dims of {name}, or reduce over it")
    held = DType.I64 if reducer in ("argmax", "argmin") else _type(body)
    stored = _dtype(dtype) if dtype is not None else held
    names = tuple(d.name for d in over)
    c = Compute(name, names, stored, body.expr, reducer, tuple(d.name for d in along), index_name, loc)
    shape = tuple(d.extent for d in over)
    return Tensor(name, stored, shape, c, body.reads, {**body.dims, **known}, loc)


def _type(v: Value) -> DType:
    return type_of(v.expr, lambda t: v.reads[t].dtype)


def _dtype(name: str) -> DType:
    try:
        return DType(name)
    except ValueError:
        raise _mistake(f"no dtype is called {name!r}", ", ".join(d.value for d in DType)) from None


def program(name: str, *outputs: Tensor) -> Program:
    """Everything that `outputs` need. Arguments are in the order in which they were created."""
    found: dict[str, Tensor] = {}
    for t in outputs:
        for made in _needed(t):
            other = found.setdefault(made.name, made)
            if other is not made:
                raise TilefoldError(f"two tensors are called {made.name}: {other.loc} and this one", loc=made.loc)
    arguments = sorted((t for t in found.values() if t.made_by is None), key=lambda t: t.number)
    body = list(dict.fromkeys(t.made_by for t in found.values() if t.made_by is not None))
    sizes: dict[str, Expr] = {}
    for t in found.values():
        for d in t.dims.values():
            if sizes.setdefault(d.name, d.extent) != d.extent:
                raise TilefoldError(f"two dims are called {d.name}, of different extents", loc=t.loc)
    syms = dict.fromkeys(s for e in (*sizes.values(), *(e for t in arguments for e in t.shape)) for s in _syms(e))
    twice = sorted({*found, *(i for c in body for i in c.results)} & {*sizes, *syms} | set(sizes) & set(syms))
    if twice:
        raise TilefoldError(f"{name} uses {twice[0]} for two things: a tensor, a dim or a size", hint="rename one")
    inputs = tuple(Input(t.name, t.dtype, t.shape) for t in arguments)
    return Program(name, inputs, sizes, tuple(body), tuple(t.name for t in outputs), tuple(syms))


def _needed(t: Tensor) -> Iterator[Tensor]:
    """Tensors that `t` needs, before those that need them."""
    done: dict[Tensor, None] = {}

    def visit(x: Tensor) -> None:
        if x not in done:
            for r in sorted(x.reads.values(), key=lambda r: r.number):
                visit(r)
            done[x] = None

    visit(t)
    return iter(done)


def _syms(e: Expr) -> Iterator[str]:
    if isinstance(e, Sym):
        yield e.name
    for k in getattr(e, "args", ()):
        yield from _syms(k)


def schedule(p: Program) -> Schedule:
    """The unfused program, to be transformed step by step."""
    return Schedule.of(p)


# -- functions ------------------------------------------------------------------------------


def call_op(op: str, *args: Operand) -> Value:
    """An operation of `algebra.ops.OPS` by its name."""
    if op not in OPS or OPS[op].arity != len(args):
        raise _mistake(f"no operation {op} of {len(args)} arguments")
    values = [_value(a) for a in args]
    reads: dict[str, Tensor] = {}
    for v in values:
        for name, t in v.reads.items():
            if reads.setdefault(name, t) is not t:
                raise _mistake(f"two tensors are called {name}")
    found = {name: d for v in values for name, d in v.dims.items()}
    return Value(call(op, *(v.expr for v in values)), reads, found)


def cast(x: Operand, dtype: str) -> Value:
    """`x` rounded to a dtype; casts to f16 and bf16 are hints that more precision is not needed."""
    v = _value(x)
    return Value(Cast(v.expr, _dtype(dtype)), v.reads, v.dims)


def where(condition: Operand, x: Operand, y: Operand) -> Value:
    """x where the condition holds, else y; a Python condition chooses now."""
    if isinstance(condition, bool):
        return _value(x if condition else y)
    return call_op("where", condition, x, y)


def equal(x: Operand, y: Operand) -> Value:
    """x == y (Python's operator compares objects)."""
    return call_op("eq", x, y)


def maximum(x: Operand, y: Operand) -> Value:
    """The larger of two values; `te.max` is the reduction."""
    return call_op("maximum", x, y)


def minimum(x: Operand, y: Operand) -> Value:
    """The smaller of two values; `te.min` is the reduction."""
    return call_op("minimum", x, y)


def _function(op: str) -> Callable[[Operand], Value]:
    def apply(x: Operand) -> Value:
        return call_op(op, x)

    apply.__name__ = apply.__qualname__ = op
    apply.__doc__ = f"`{op}` of a value."
    return apply


abs, exp, log, rsqrt = (_function(op) for op in ("abs", "exp", "log", "rsqrt"))
sigmoid, sqrt, tanh = (_function(op) for op in ("sigmoid", "sqrt", "tanh"))


def _reducer(name: str) -> Callable[..., Reduction]:
    def apply(body: Operand, over: Dim | tuple[Dim, ...]) -> Reduction:
        return Reduction(name, _value(body), over if isinstance(over, tuple) else (over,))

    apply.__name__ = apply.__qualname__ = name
    what = "index of the extreme value" if name in INDEX_REDUCERS else name
    apply.__doc__ = f"The {what} of `body` over one or several dims."
    return apply


sum, prod, max, min = (_reducer(r) for r in ("sum", "prod", "max", "min"))
any, all, argmax, argmin = (_reducer(r) for r in ("any", "all", "argmax", "argmin"))
