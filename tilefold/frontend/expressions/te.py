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
`frontend.expressions.te_run`). Mistakes raise TilefoldError with the line of the definition. The style is that of
Neptune's Figure 12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import overload

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, Size, Sym, dims_used, type_of
from tilefold.block.schedule import Schedule
from tilefold.errors import TilefoldError
from tilefold.frontend.expressions.te_run import Compiled, compile, reference
from tilefold.frontend.expressions.te_values import (
    Dim,
    Extent,
    Operand,
    Reduction,
    Tensor,
    Value,
    abs,
    all,
    any,
    argmax,
    argmin,
    as_dtype,
    as_extent,
    as_value,
    call_op,
    cast,
    equal,
    exp,
    here,
    inf,
    log,
    max,
    maximum,
    min,
    minimum,
    mistake,
    prod,
    rsqrt,
    sigmoid,
    sqrt,
    sum,
    tanh,
    where,
)
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
    return Tensor(name, as_dtype(dtype), tuple(map(as_extent, shape)), loc=here())


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
    return _define(name, over, as_value(body), dtype)


def topk(names: tuple[str, str], over: tuple[Dim, ...], slot: Dim, body: Operand, along: Dim) -> tuple[Tensor, Tensor]:
    """The largest values of `body` along a dim, one a value of `slot` in falling order, and where they are."""
    values = _define(names[0], (*over, slot), as_value(body), None, "topk", (along,), names[1])
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
    loc = here()
    known = {d.name: d for d in (*over, *along)}
    if len(known) != len(over) + len(along):
        raise mistake(f"{name} has a dim twice: {', '.join(d.name for d in (*over, *along))}")
    for d in (*over, *along):
        if body.dims.get(d.name, d).extent != d.extent:
            raise mistake(f"{name} uses two dims called {d.name}, of different extents")
    missing = sorted(dims_used(body.expr) - set(known))
    if missing:
        raise mistake(f"{name} depends on {', '.join(missing)}", f"add it to the dims of {name}, or reduce over it")
    held = DType.I64 if reducer in ("argmax", "argmin") else _type(body)
    stored = as_dtype(dtype) if dtype is not None else held
    names = tuple(d.name for d in over)
    c = Compute(name, names, stored, body.expr, reducer, tuple(d.name for d in along), index_name, loc)
    shape = tuple(d.extent for d in over)
    return Tensor(name, stored, shape, c, body.reads, {**body.dims, **known}, loc)


def _type(v: Value) -> DType:
    return type_of(v.expr, lambda t: v.reads[t].dtype)


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
