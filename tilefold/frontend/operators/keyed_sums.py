"""Elements that are added at places that data give, as sums by keys (`tensor.keyed`).

    rows_of_sums    y[r, j] = sum over k of where(at[k] == r, rows[k, j], 0)
    index_put       y[i, r] = x[i, r] + sum over k of where(at[k] == r, values[i, k], 0), of any axes, added up
    scatter_add     y[i, r] = x[i, r] + sum over k of where(index[i, k] == r, src[i, k], 0)
    scatter_reduce  the same of "sum"; of "mean" over 1 + sum over k of where(index[i, k] == r, 1, 0)
                    "amax": maximum(x[i, r], max over k of where(index[i, k] == r, src[i, k], -inf))
                    "amin": that of negated elements, negated
    index_reduce    those of an index that all the other axes share

What is without what stands there is still that where no element is put: x and sum are chosen by the count.

On a GPU alone, whose kernels add in any order (`plan.keyed`): elsewhere each row would look at all elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.added_rows import rows_of_sums_op
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, broadcast, meta_of, normal_axis
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.frontend.operators.index import checker, wrapped
from tilefold.plan.keyed import CROWDED
from tilefold.tensor.keyed import NOTHING

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def in_a_region(node: torch.fx.Node) -> bool:
    """Whether a node's sums are a statement of a region: those in float32, which additions in any order may have."""
    return node.target is rows_of_sums_op and node.meta["val"].dtype is torch.float32


def against_sums(node: torch.fx.Node) -> str | None:
    """Why what a node adds at places is no statement of a region; None also of all other nodes."""
    if node.target is aten.index_put.default and len(node.args) > 3 and node.args[3] is True:
        given = node.args[1]
        assert isinstance(given, list | tuple)
        at = {n: x for n, x in enumerate(given) if isinstance(x, torch.fx.Node)}
        axes, places = [*at], torch.broadcast_shapes(*(x.meta["val"].shape for x in at.values()))
    elif node.target in (aten.scatter_add.default, aten.scatter_reduce.two, aten.index_reduce.default):
        axes = [int(node.args[1])]  # type: ignore[arg-type]
        index = node.args[2].meta["val"]  # type: ignore[union-attr]
        places = index.shape if node.target is aten.index_reduce.default else index.shape[axes[0] :][:1]
        if places == (1,) and node.target is aten.scatter_add.default:  # a comparison (`scatter`)
            return None
    else:
        return None
    val = node.meta["val"]
    if val.device.type != "cuda" or val.dtype not in _FLOATS or not val.dim():
        return f"{node.target} of {val.dtype} on {val.device.type}"
    extreme = attrs(node).get("reduce") in ("amax", "amin")  # the same in any order
    if torch.are_deterministic_algorithms_enabled() and not extreme:
        return f"{node.target} in an order of its own"
    if not all(isinstance(n, int) and n > 0 for n in (*val.shape, *places)):
        return f"{node.target} of sizes that are not known"
    if prod(places) > CROWDED * prod(val.shape[n] for n in axes):
        return f"{node.target} of many elements at few places"
    return None


def rows_of_sums(ctx: Context, node: torch.fx.Node) -> Value:
    """Indices may count from the end; an error where one does not exist. Nothing is added to row `skipped`."""
    a = attrs(node)
    at, rows = ctx.value(a["at"]), ctx.value(a["rows"])
    skipped = ctx.static_int(a["skipped"], "skipped")
    shape, dtype = meta_of(node)
    if dtype is not DType.F32:
        raise UnsupportedError(f"{ctx.origin} in {dtype.value}")
    key = _keys(ctx, at, shape[0])

    def one(i: Indices, k: Indices) -> Expr:
        row = key(k)
        if skipped >= 0:
            row = call("where", call("eq", row, skipped), -1, row)
        return call("where", call("eq", i[0], row), _wide(ctx, rows.at((*k, *i[1:]))), 0.0)

    return ctx.reduce("sum", shape, at.shape, dtype, one)


def index_put(ctx: Context, node: torch.fx.Node) -> Value:
    """Added up alone; where one element stands last among several is not known."""
    a = attrs(node)
    given, x, values = a["indices"], ctx.value(a["self"]), ctx.value(a["values"])
    assert isinstance(given, list | tuple)
    picks = {n: ctx.value(v) for n, v in enumerate(given) if v is not None}
    if a["accumulate"] is not True or node.meta["val"].device.type != "cuda":
        raise UnsupportedError(f"operator {ctx.origin} is not covered")
    if any(p.dtype is DType.BOOL or p.dtype is DType.U8 for p in picks.values()):
        raise UnsupportedError("indexing by a mask has a data-dependent shape")
    shape, _ = meta_of(node)
    over = torch.broadcast_shapes(*(v.meta["val"].shape for v in given if v is not None))
    axes = sorted(picks)
    first = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0
    keys = {n: _keys(ctx, p, shape[n]) for n, p in picks.items()}

    def one(i: Indices, k: Indices) -> Expr:
        rest = [e for n, e in enumerate(i) if n not in picks]
        here = [call("eq", i[n], key(k)) for n, key in keys.items()]
        value = broadcast(values, (*rest[:first], *k, *rest[first:]))
        return call("where", reduce(lambda p, q: call("and", p, q), here), _wide(ctx, value), 0.0)

    return _added_to(ctx, node, x, tuple(Const(int(n), DType.I64) for n in over), one)


def scatter_add(ctx: Context, node: torch.fx.Node) -> Value:
    """Of indices that have an element for each of the others' axes."""
    return _added_to(ctx, node, ctx.value(attrs(node)["self"]), *_scattered(ctx, node))


def scatter_reduce(ctx: Context, node: torch.fx.Node) -> Value:
    """Sums, means, maxima and minima."""
    a = attrs(node)
    x, how, own = ctx.value(a["self"]), a["reduce"], a.get("include_self", True)
    if how not in ("sum", "mean", "amax", "amin"):
        raise UnsupportedError(f"operator {ctx.origin} is not covered")
    shape, dtype = meta_of(node)
    if how == "sum" and own:
        return _added_to(ctx, node, x, *_scattered(ctx, node))
    reducer = "sum" if how in ("sum", "mean") else "max"
    over, one = _scattered(ctx, node, none=NOTHING[reducer], negated=how == "amin")
    total = ctx.reduce(reducer, shape, over, DType.F32, one, f"{ctx.base}_{reducer}")
    count = None
    if how == "mean" or not own:
        _, each = _scattered(ctx, node, Value((), DType.F32, lambda _: Const(1.0, DType.F32)))
        count = ctx.reduce("sum", shape, over, DType.F32, each, f"{ctx.base}_count")

    def both(i: Indices) -> Expr:
        here, made = _wide(ctx, x.at(i)), total.at(i)
        made = call("neg", made) if how == "amin" else made
        if own and count is not None:
            made = call("div", call("add", here, made), call("add", count.at(i), 1.0))
        elif own:
            made = call("maximum" if how == "amax" else "minimum", here, made)
        elif count is not None:
            made = call("div", made, count.at(i)) if how == "mean" else made
            made = call("where", call("gt", count.at(i), 0.0), made, here)
        return made if dtype is DType.F32 else Cast(made, dtype)

    return ctx.map(shape, dtype, both)


def _scattered(
    ctx: Context, node: torch.fx.Node, instead: Value | None = None, *, none: float = 0.0, negated: bool = False
) -> tuple[tuple[Expr, ...], Callable[[Indices, Indices], Expr]]:
    """Extents of the elements that a scatter puts to each place of its axis, and what it adds of each: of its source,
    or of what stands instead; `none` elsewhere."""
    a = attrs(node)
    index, src = ctx.value(a["index"]), ctx.value(a["src" if "src" in a else "source"]) if instead is None else instead
    shape, _ = meta_of(node)
    axis = normal_axis(int(a["dim"]), len(shape))  # type: ignore[call-overload]
    if node.meta["val"].device.type != "cuda":
        raise UnsupportedError("a scatter of more than one element a row")
    shared = node.target is aten.index_reduce.default
    if not shared and [*_but(index.shape, axis)] != [*_but(shape, axis)]:
        raise UnsupportedError("a scatter to a part of a tensor")
    key = _keys(ctx, index, shape[axis])

    def one(i: Indices, k: Indices) -> Expr:
        at = (*i[:axis], *k, *i[axis + 1 :])
        value = _wide(ctx, broadcast(src, at))
        here = call("eq", i[axis], key(k if shared else at))
        return call("where", here, call("neg", value) if negated else value, none)

    return (index.shape[0 if shared else axis],), one


def _but(shape: Indices, axis: int) -> Indices:
    return (*shape[:axis], *shape[axis + 1 :])


def _added_to(
    ctx: Context,
    node: torch.fx.Node,
    x: Value,
    over: tuple[Expr, ...],
    one: Callable[[Indices, Indices], Expr],
) -> Value:
    """x and a sum in float32, rounded once: also for a product, whose other operand has what the program rounds to."""
    shape, dtype = meta_of(node)
    total = ctx.reduce("sum", shape, over, DType.F32, one, f"{ctx.base}_sum")

    def both(i: Indices) -> Expr:
        base = x.at(i)
        none = isinstance(base, Const) and base.value == 0
        made = total.at(i) if none else call("add", _wide(ctx, base), total.at(i))
        return made if dtype is DType.F32 else Cast(made, dtype)

    return ctx.map(shape, dtype, both)


def _keys(ctx: Context, at: Value, extent: Expr) -> Callable[[Indices], Expr]:
    """The place that an index says, counted from the beginning; an error where there is none."""
    check = checker()

    def key(k: Indices) -> Expr:
        e = broadcast(at, k)
        return check(wrapped(e if ctx.type_of(e) is DType.I64 else Cast(e, DType.I64), extent), extent)

    return key


def _wide(ctx: Context, e: Expr) -> Expr:
    return e if ctx.type_of(e) is DType.F32 else Cast(e, DType.F32)


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    rows_of_sums_op: rows_of_sums,
    aten.index_put.default: index_put,
    aten.scatter_reduce.two: scatter_reduce,
    aten.index_reduce.default: scatter_reduce,
}
