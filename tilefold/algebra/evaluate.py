"""The meaning of expressions and reducers, in torch: every interpreter is built on this file.

An expression is evaluated over a *grid*: an ordered list of dims, each with a range of
index values. The result has one axis a grid dim, of size 1 where the value does not
depend on it. `exact=True` evaluates in float64 and drops precision casts (f16, bf16),
which is what results are compared with; quantising casts (`DType.rounds`) are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tilefold.algebra.dtypes import DType, promote
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym, children, dims_used
from tilefold.algebra.ops import OPS


@dataclass(frozen=True, slots=True)
class Grid:
    """Ordered dims with their index ranges [start, stop)."""

    ranges: Mapping[str, tuple[int, int]]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.ranges.values())

    def axis(self, dim: str) -> int:
        return list(self.ranges).index(dim)


Reader = Callable[[str, tuple[torch.Tensor, ...]], torch.Tensor]
TileReader = Callable[[Load, Grid], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Env:
    """Everything an expression can refer to.

    `read(tensor, indices)` gathers elements (indices broadcast against each other and may be
    out of range only where a `where` discards the value: readers clamp). `tile`, where given, may
    answer a whole load at once, as a view broadcastable to the grid; None leaves it to `read`.
    """

    read: Reader
    sizes: Mapping[str, int]
    syms: Mapping[str, int]
    exact: bool = False
    tile: TileReader | None = None


def evaluate(e: Expr, grid: Grid, env: Env) -> torch.Tensor:
    """Value of `e` on the grid, shape broadcastable to `grid.shape`, in compute type. What it has several times is
    evaluated once."""
    return _value(e, grid, env, {})


def _value(e: Expr, grid: Grid, env: Env, known: dict[Expr, torch.Tensor]) -> torch.Tensor:
    """See `evaluate`. known: values of operations and loads that it has had."""
    if not children(e):
        return _made(e, grid, env, known)
    if e not in known:
        known[e] = _made(e, grid, env, known)
    return known[e]


def _made(e: Expr, grid: Grid, env: Env, known: dict[Expr, torch.Tensor]) -> torch.Tensor:
    n = len(grid.ranges)
    match e:
        case Const(value, dtype):
            t = torch.float64 if env.exact and dtype is DType.F32 else dtype.torch_dtype
            return torch.full((1,) * n, value, dtype=t)
        case Index(dim):
            if dim not in grid.ranges:
                raise KeyError(f"index {dim} is not in scope")
            start, stop = grid.ranges[dim]
            shape = [1] * n
            shape[grid.axis(dim)] = stop - start
            return torch.arange(start, stop).reshape(shape)
        case Size(dim):
            return torch.full((1,) * n, env.sizes[dim])
        case Sym(name):
            return torch.full((1,) * n, env.syms[name])
        case Load(tensor, index):
            if env.tile is not None and (whole := env.tile(e, grid)) is not None:
                return compute_type(whole, env.exact)
            at = tuple(_value(i, grid, env, known) for i in index)
            return compute_type(env.read(tensor, at), env.exact)
        case Cast(arg, dtype):
            return cast(_value(arg, grid, env, known), dtype, env.exact)
        case Call(("tile_start" | "tile_stop") as op, (Index(dim),)):
            start, stop = grid.ranges[dim]
            return torch.full((1,) * n, start if op == "tile_start" else stop)
        case Call(("tile_min" | "tile_max") as op, (arg,)):
            own = Grid({d: grid.ranges[d] for d in sorted(dims_used(arg))})
            values = evaluate(arg, own, env)
            return (values.amin() if op == "tile_min" else values.amax()).reshape((1,) * n)
        case Call(op, args):
            return apply(op, *(_value(a, grid, env, known) for a in args))
    raise AssertionError(e)


def apply(op: str, *args: torch.Tensor) -> torch.Tensor:
    """One operation on values in compute types, with Tilefold's promotion."""
    spec = OPS[op]
    if op != "where" and all(a.dtype is torch.float64 for a in args):
        return spec.torch(*args)  # nothing to promote
    if op == "where":
        both = promote(DType.of(args[1].dtype), DType.of(args[2].dtype)).torch_dtype
        return torch.where(args[0].bool(), args[1].to(both), args[2].to(both))
    t = DType.BOOL
    for a in args:
        t = promote(t, DType.of(a.dtype))
    if t is DType.BOOL and op in ("add", "mul", "sub", "neg"):
        t = DType.I64
    if spec.result == "float":
        t = promote(t, DType.F32)
    if t is not DType.F32 and t is not DType.F64 and op in ("floor", "ceil", "trunc", "round"):
        return args[0].to(t.torch_dtype)
    if t is not DType.F32 and t is not DType.F64 and op in ("isnan", "isinf"):
        return torch.zeros_like(args[0], dtype=torch.bool)
    return spec.torch(*(a.to(t.torch_dtype) for a in args))


def compute_type(x: torch.Tensor, exact: bool = False) -> torch.Tensor:
    """A tensor in its arithmetic type (f64 for every float when exact)."""
    d = DType.of(x.dtype)
    return x.to(torch.float64 if exact and d.is_float else d.compute.torch_dtype)


def cast(x: torch.Tensor, dtype: DType, exact: bool = False) -> torch.Tensor:
    """Round to `dtype`, result in its compute type; fp8 saturates as torch's conversion does not:
    values beyond the range follow torch (`Tensor.to`)."""
    if exact and dtype.is_float and not dtype.rounds:
        return x.to(torch.float64)
    if dtype.is_float and dtype.rounds and x.dtype == torch.float64:
        x = x.to(torch.float32)
    return compute_type(x.to(dtype.torch_dtype), exact)


def identity_of(reducer: str, dtype: torch.dtype) -> float | int | bool:
    """Value of the reduction of nothing."""
    if reducer in ("sum", "any"):
        return 0
    if reducer in ("prod", "all"):
        return 1
    lowest = reducer in ("max", "argmax", "topk")
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    if dtype is torch.bool:
        return not lowest
    info = torch.iinfo(dtype)
    return info.min if lowest else info.max


#: The operation that joins two partial results of a value reducer.
COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "or", "all": "and"}


def join_at(target: torch.Tensor, at: Sequence[torch.Tensor], x: torch.Tensor, reducer: str) -> None:
    """Join values with those of `target` at indices, which may repeat, in place: sums or maxima."""
    if reducer == "sum":
        target.index_put_(tuple(at), x, accumulate=True)
        return
    flat = torch.zeros_like(at[0])
    for i, n in zip(at, target.shape, strict=True):
        flat = flat * n + i
    made = target.reshape(-1).scatter_reduce(0, flat.reshape(-1), x.reshape(-1), f"a{reducer}")
    target.copy_(made.view(target.shape))


def reduce_values(x: torch.Tensor, reducer: str, axes: Sequence[int]) -> torch.Tensor:
    """Reduce `x` over `axes` (removed) by a value reducer; NaN propagates through max and min."""
    if not axes:
        return x
    kept = [a for a in range(x.ndim) if a not in axes]
    flat = x.permute(*kept, *axes).reshape(*[x.shape[a] for a in kept], math.prod(x.shape[a] for a in axes))
    if flat.shape[-1] == 0:
        return torch.full(flat.shape[:-1], identity_of(reducer, x.dtype), dtype=x.dtype)
    match reducer:
        case "sum":
            return flat.sum(-1)
        case "prod":
            return flat.prod(-1)
        case "max":
            return flat.amax(-1)
        case "min":
            return flat.amin(-1)
        case "any":
            return flat.bool().any(-1)
        case "all":
            return flat.bool().all(-1)
    raise KeyError(reducer)


def order_keys(x: torch.Tensor) -> torch.Tensor:
    """Values whose descending stable sort is torch's order for max: NaN first, ties by lowest index."""
    return torch.where(torch.isnan(x), torch.inf, x) if x.dtype.is_floating_point else x


def select_values(
    x: torch.Tensor, index: torch.Tensor, reducer: str, axis: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best along `axis` (moved last) with their `index` payload, best first.

    argmax, argmin: k = 1. Missing slots (fewer than k elements) hold the identity and index -1.
    """
    x, index = x.movedim(axis, -1), index.movedim(axis, -1).expand_as(x.movedim(axis, -1))
    down = -x if reducer == "argmin" else x
    nan = torch.isnan(down) if down.dtype.is_floating_point else torch.zeros_like(down, dtype=torch.bool)
    # NaN outranks +inf: sort by (nan, value) descending, stable, so that ties keep the lowest index
    order = torch.argsort(order_keys(down), dim=-1, descending=True, stable=True)
    order = order.gather(-1, torch.argsort(nan.gather(-1, order).to(torch.int8), dim=-1, descending=True, stable=True))
    top = order[..., :k]
    values, at = x.gather(-1, top), index.gather(-1, top)
    missing = k - top.shape[-1]
    if missing > 0:
        pad = (*values.shape[:-1], missing)
        values = torch.cat([values, torch.full(pad, identity_of(reducer, x.dtype), dtype=x.dtype)], -1)
        at = torch.cat([at, torch.full(pad, -1, dtype=at.dtype)], -1)
    return values, at


def reader(tensors: Mapping[str, torch.Tensor]) -> Reader:
    """Gather from whole tensors, clamping indices into range."""

    def read(name: str, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x = tensors[name]
        assert len(at) == x.ndim, (name, len(at), x.ndim)
        if not at:
            return x
        shape = torch.broadcast_shapes(*(i.shape for i in at))
        if any(s == 0 for s in x.shape):
            return torch.zeros(shape, dtype=x.dtype)
        clamped = tuple(i.clamp(0, s - 1) for i, s in zip(at, x.shape, strict=True))
        return x.view(torch.uint8)[clamped].view(x.dtype) if x.dtype.itemsize == 1 else x[clamped]

    return read
