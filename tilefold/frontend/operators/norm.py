"""Softmax and the normalisations, as chains of plain reductions and maps (never one opaque op)."""

from __future__ import annotations

import math

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, keep_axes, meta_of, normal_axis
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.frontend.operators.reduce import centred, mean_value, reduce_value
from tilefold.frontend.operators.view import reshaped
from tilefold.tensor.index_simplify import const

aten = torch.ops.aten


def _row(v: Value, axis: int, i: Indices) -> Expr:
    """Element of a value that lacks `axis`."""
    return v.at((*i[:axis], *i[axis + 1 :]))


def softmax(ctx: Context, node: torch.fx.Node) -> Value:
    """max, exp(x - max), sum, quotient."""
    x, axis, shape, dtype = _softmax_args(ctx, node)
    ct = dtype.compute
    top = reduce_value(ctx, "max", x, [axis], ct, name=f"{ctx.base}_max")
    e = ctx.map(shape, ct, lambda i: call("exp", _in(ctx, x.at(i), ct) - _row(top, axis, i)), f"{ctx.base}_exp")
    t = reduce_value(ctx, "sum", e, [axis], ct, name=f"{ctx.base}_sum")
    return _shaped(node, ctx.map(shape, dtype, lambda i: e.at(i) / _row(t, axis, i)))


def safe_softmax(ctx: Context, node: torch.fx.Node) -> Value:
    """Softmax whose rows without any finite score are 0: the shift is 0 there, and so is the sum."""
    x, axis, shape, dtype = _softmax_args(ctx, node)
    ct = dtype.compute
    top = reduce_value(ctx, "max", x, [axis], ct, name=f"{ctx.base}_max")

    def shift(i: Indices) -> Expr:
        m = _row(top, axis, i)
        return call("where", call("eq", m, -math.inf), 0.0, m)

    e = ctx.map(shape, ct, lambda i: call("exp", _in(ctx, x.at(i), ct) - shift(i)), f"{ctx.base}_exp")
    t = reduce_value(ctx, "sum", e, [axis], ct, name=f"{ctx.base}_sum")

    def at(i: Indices) -> Expr:
        s = _row(t, axis, i)
        return e.at(i) / call("where", call("eq", s, 0.0), 1.0, s)

    return _shaped(node, ctx.map(shape, dtype, at))


def log_softmax(ctx: Context, node: torch.fx.Node) -> Value:
    """x - max - log(sum exp(x - max))."""
    x, axis, shape, dtype = _softmax_args(ctx, node)
    ct = dtype.compute
    top = reduce_value(ctx, "max", x, [axis], ct, name=f"{ctx.base}_max")

    def shifted(e: Expr, i: Indices) -> Expr:
        return _in(ctx, e, ct) - _row(top, axis, i)

    t = reduce_value(ctx, "sum", x, [axis], ct, body=lambda e, i: call("exp", shifted(e, i)), name=f"{ctx.base}_sum")
    return _shaped(node, ctx.map(shape, dtype, lambda i: shifted(x.at(i), i) - call("log", _row(t, axis, i))))


def _softmax_args(ctx: Context, node: torch.fx.Node) -> tuple[Value, int, tuple[Expr, ...], DType]:
    a = attrs(node)
    x = ctx.value(a["self"])
    shape, dtype = meta_of(node)
    if not dtype.is_float:
        raise UnsupportedError(f"a softmax of {dtype.value}: PyTorch has none of integers, though it captures one")
    if not shape:
        return Value((const(1),), x.dtype, lambda _: x.at(())), 0, (const(1),), dtype
    return x, normal_axis(int(a["dim"]), len(shape)), shape, dtype  # type: ignore[call-overload]


def _shaped(node: torch.fx.Node, v: Value) -> Value:
    """The softmax of a scalar was computed as that of a vector of one."""
    return v if meta_of(node)[0] else Value((), v.dtype, lambda _: v.at((const(0),)))


def _in(ctx: Context, e: Expr, ct: DType) -> Expr:
    """An element in arithmetic type ct."""
    return e if ctx.type_of(e) is ct else Cast(e, ct)


def softmax_backward(ctx: Context, node: torch.fx.Node) -> Value:
    """y (g - sum(g y))."""
    a = attrs(node)
    g, y = ctx.value(a["grad_output"]), ctx.value(a["output"])
    shape, dtype = meta_of(node)
    axis = normal_axis(int(a["dim"]), len(shape))  # type: ignore[call-overload]
    dot = reduce_value(ctx, "sum", g, [axis], dtype.compute, body=lambda e, i: e * y.at(i), name=f"{ctx.base}_dot")
    return ctx.map(shape, dtype, lambda i: y.at(i) * (g.at(i) - _row(dot, axis, i)))


def log_softmax_backward(ctx: Context, node: torch.fx.Node) -> Value:
    """g - exp(y) sum(g)."""
    a = attrs(node)
    g, y = ctx.value(a["grad_output"]), ctx.value(a["output"])
    shape, dtype = meta_of(node)
    axis = normal_axis(int(a["dim"]), len(shape))  # type: ignore[call-overload]
    s = reduce_value(ctx, "sum", g, [axis], dtype.compute, name=f"{ctx.base}_sum")
    return ctx.map(shape, dtype, lambda i: g.at(i) - call("exp", y.at(i)) * _row(s, axis, i))


def _statistics(ctx: Context, x: Value, axes: list[int], eps: float) -> tuple[Value, Value]:
    """Mean and 1 / sqrt(variance + eps) over axes (removed), in arithmetic type."""
    ct = x.dtype.compute
    mean = mean_value(ctx, x, axes, ct, f"{ctx.base}_mean")
    squares, n = centred(ctx, x, axes, mean, f"{ctx.base}_squares")
    rstd = ctx.map(squares.shape, ct, lambda i: call("rsqrt", call("div", squares.at(i), n) + eps), f"{ctx.base}_rstd")
    return mean, rstd


def layer_norm(ctx: Context, node: torch.fx.Node) -> tuple[Value, ...]:
    """(x - mean) rstd w + b over the last axes; also mean and rstd, with those axes of extent 1."""
    a = attrs(node)
    x = ctx.value(a["input"])
    inner = len(a["normalized_shape"])  # type: ignore[arg-type]
    shape, dtype = meta_of(node, 0)
    lead = len(shape) - inner
    axes = list(range(lead, len(shape)))
    mean, rstd = _statistics(ctx, x, axes, float(a["eps"]))  # type: ignore[arg-type]
    w = None if a["weight"] is None else ctx.value(a["weight"])
    b = None if a["bias"] is None else ctx.value(a["bias"])

    def at(i: Indices) -> Expr:
        e = (x.at(i) - mean.at(i[:lead])) * rstd.at(i[:lead])
        e = e if w is None else e * w.at(i[lead:])
        return e if b is None else e + b.at(i[lead:])

    y = ctx.map(shape, dtype, at)
    return y, keep_axes(mean, axes, True), keep_axes(rstd, axes, True)


def rms_norm(ctx: Context, node: torch.fx.Node) -> tuple[Value, ...]:
    """x / sqrt(mean(x^2) + eps) w; also the factor."""
    a = attrs(node)
    x = ctx.value(a["input"])
    inner = len(a["normalized_shape"])  # type: ignore[arg-type]
    shape, dtype = meta_of(node, 0)
    lead = len(shape) - inner
    axes = list(range(lead, len(shape)))
    ct = x.dtype.compute
    eps = torch.finfo(dtype.torch_dtype if dtype is DType.F64 else torch.float32).eps if a["eps"] is None else a["eps"]
    square = Value(x.shape, ct, lambda i: x.at(i) * x.at(i))
    mean = mean_value(ctx, square, axes, ct, f"{ctx.base}_mean")
    rstd = ctx.map(mean.shape, ct, lambda i: call("rsqrt", mean.at(i) + float(eps)), f"{ctx.base}_rstd")  # type: ignore[arg-type]
    w = None if a["weight"] is None else ctx.value(a["weight"])

    def at(i: Indices) -> Expr:
        e = x.at(i) * rstd.at(i[:lead])
        return e if w is None else e * w.at(i[lead:])

    return ctx.map(shape, dtype, at), keep_axes(rstd, axes, True)


def group_norm(ctx: Context, node: torch.fx.Node) -> tuple[Value, ...]:
    """Statistics over each group of channels and all positions; instance norm is one channel a group."""
    a = attrs(node)
    x = ctx.value(a["input"])
    shape, dtype = meta_of(node, 0)
    groups = ctx.static_int(a["group"], "the number of groups")
    per = ctx.simplify(call("floordiv", shape[1], const(groups)))
    grouped = reshaped(ctx, x, (shape[0], const(groups), per, *shape[2:]))
    axes = list(range(2, len(grouped.shape)))
    mean, rstd = _statistics(ctx, grouped, axes, float(a["eps"]))  # type: ignore[arg-type]
    w = None if a["weight"] is None else ctx.value(a["weight"])
    b = None if a["bias"] is None else ctx.value(a["bias"])

    def at(i: Indices) -> Expr:
        row = (i[0], i[1])
        channel = (ctx.simplify(i[1] * per + i[2]),)
        e = (grouped.at(i) - mean.at(row)) * rstd.at(row)
        e = e if w is None else e * w.at(channel)
        return e if b is None else e + b.at(channel)

    y = reshaped(ctx, ctx.map(grouped.shape, dtype, at), shape)
    return y, mean, rstd


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten._softmax.default: softmax,
    aten._safe_softmax.default: safe_softmax,
    aten._log_softmax.default: log_softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten.native_layer_norm.default: layer_norm,
    aten._fused_rms_norm.default: rms_norm,
    aten.native_group_norm.default: group_norm,
}
