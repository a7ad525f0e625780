"""Values of tensor expressions: dims, elements of tensors, operators, functions and reducers."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, Index, Load, call, lit
from tilefold.algebra.ops import INDEX_REDUCERS, OPS
from tilefold.errors import SourceLoc, TilefoldError
from tilefold.tensor.ir import Compute

#: Modules of tensor expressions: their frames are not the user's.
MACHINERY = tuple(os.path.join(os.path.dirname(__file__), name) for name in ("te.py", "te_values.py"))
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
        raise mistake("a condition is known only when the program runs", "use &, |, ~ and te.where")


class Dim(Value):
    """A named index with an extent: an integer, or an expression over `te.size`s."""

    __slots__ = ("extent", "name")

    def __init__(self, name: str, extent: Extent):
        self.name, self.extent = name, as_extent(extent)
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
            raise mistake(f"{self.name} has {len(self.shape)} axes, not {len(at)}")
        parts = [as_value(i) for i in at]
        for axis, p in zip(self.shape, parts, strict=True):
            if isinstance(p, Dim) and isinstance(axis, Const) and _longer(p.extent, axis):
                raise mistake(f"{p.name} runs beyond an axis of {self.name}, which has {axis.value} elements")
        reads, dims = merged(parts, self)
        return Value(Load(self.name, tuple(p.expr for p in parts)), reads, dims)


def _longer(e: Expr, axis: Const) -> bool:
    return isinstance(e, Const) and e.value > axis.value


def merged(values: Sequence[Value], *tensors: Tensor) -> tuple[dict[str, Tensor], dict[str, Dim]]:
    """Tensors and dims that several values (and further tensors) mention; no two may share a name."""
    reads: dict[str, Tensor] = {}
    dims: dict[str, Dim] = {}
    for t in (*(t for v in values for t in v.reads.values()), *tensors):
        if reads.setdefault(t.name, t) is not t:
            raise mistake(f"two tensors are called {t.name}")
    for d in (d for v in values for d in v.dims.values()):
        if dims.setdefault(d.name, d).extent != d.extent:
            raise mistake(f"two dims are called {d.name}, of different extents")
    return reads, dims


def here() -> SourceLoc | None:
    """The user's line."""
    return SourceLoc.of_caller(*MACHINERY)


def mistake(message: str, hint: str | None = None) -> TilefoldError:
    return TilefoldError(message, loc=here(), hint=hint)


def _unnamed(r: Reduction) -> TilefoldError:
    return mistake(f"a {r.reducer} inside an expression has no name", "name it with te.compute")


def as_value(o: Operand | Reduction) -> Value:
    if isinstance(o, Value):
        return o
    if isinstance(o, Reduction):
        raise _unnamed(o)
    if not isinstance(o, int | float):
        raise mistake(f"{o!r} is no value", "read an element: t[i, j]" if isinstance(o, Tensor) else None)
    return Value(lit(o), {}, {})


def as_extent(e: Extent) -> Expr:
    if isinstance(e, Dim):
        return e.extent
    return e.expr if isinstance(e, Value) else Const(int(e), DType.I64)


def as_dtype(name: str) -> DType:
    try:
        return DType(name)
    except ValueError:
        raise mistake(f"no dtype is called {name!r}", ", ".join(d.value for d in DType)) from None


# -- functions ------------------------------------------------------------------------------


def call_op(op: str, *args: Operand) -> Value:
    """An operation of `algebra.ops.OPS` by its name."""
    if op not in OPS or OPS[op].arity != len(args):
        raise mistake(f"no operation {op} of {len(args)} arguments")
    values = [as_value(a) for a in args]
    reads, dims = merged(values)
    return Value(call(op, *(v.expr for v in values)), reads, dims)


def cast(x: Operand, dtype: str) -> Value:
    """`x` rounded to a dtype; casts to f16 and bf16 are hints that more precision is not needed."""
    v = as_value(x)
    return Value(Cast(v.expr, as_dtype(dtype)), v.reads, v.dims)


def where(condition: Operand, x: Operand, y: Operand) -> Value:
    """x where the condition holds, else y; a Python condition chooses now."""
    if isinstance(condition, bool):
        return as_value(x if condition else y)
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
        return Reduction(name, as_value(body), over if isinstance(over, tuple) else (over,))

    apply.__name__ = apply.__qualname__ = name
    what = "index of the extreme value" if name in INDEX_REDUCERS else name
    apply.__doc__ = f"The {what} of `body` over one or several dims."
    return apply


sum, prod, max, min = (_reducer(r) for r in ("sum", "prod", "max", "min"))
any, all, argmax, argmin = (_reducer(r) for r in ("any", "all", "argmax", "argmin"))
