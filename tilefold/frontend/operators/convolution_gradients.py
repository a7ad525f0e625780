"""Gradients of convolutions: of the image, of the weight, of the bias (`tensor.convolution_gradients`)."""

from __future__ import annotations

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, meta_of
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.frontend.operators.images import has_channels_last
from tilefold.tensor.index_simplify import const
from tilefold.tensor.sizes import estimate

aten = torch.ops.aten


def covered_gradients(channels: float, outs: float, groups: object, *, transposed: bool) -> bool:
    """Whether gradients of such a convolution are: of one group, or of one channel and output a group."""
    return not transposed and (groups == 1 or channels == outs == groups)


def convolution_backward(ctx: Context, node: torch.fx.Node) -> tuple[Value, ...]:
    """The gradients of image, weight and bias that the mask asks for and somebody reads; zeros for the others.

    Of one group, or of one channel a group with as many outputs; extents are known.
    """
    a = attrs(node)
    dy, x, w = (ctx.value(a[k]) for k in ("grad_output", "input", "weight"))
    rank = len(x.shape) - 2
    groups = ctx.static_int(a["groups"], "the number of groups")
    if not all(isinstance(n, Const) and n.value for n in (*dy.shape[1:], *x.shape[1:], *w.shape)):
        raise UnsupportedError("gradients of a convolution of symbolic extents")
    channels, outs = (estimate(n) for n in (x.shape[1], w.shape[0]))
    if rank < 1 or not covered_gradients(channels, outs, groups, transposed=bool(a["transposed"])):
        raise UnsupportedError("gradients of a convolution of this form")
    axes = zip(dy.shape[2:], x.shape[2:], w.shape[2:], strict=True)
    if any(k != const(1) and const(1) in (y, h) for y, h, k in axes):  # of one place: nothing that windows share
        raise UnsupportedError("gradients of a convolution with windows of one place")
    one_each = groups > 1
    settings = [_per_axis(ctx, a[k], rank) for k in ("stride", "padding", "dilation")]
    read = {u.args[1] for u in node.users} if node.users else {0, 1, 2}
    ctx.order = _order(node.args[0].meta["val"]) if isinstance(node.args[0], torch.fx.Node) else None
    dy = ctx.tensor(dy, f"{ctx.base}_dy")
    made: list[Value] = []
    for k, (wanted, of) in enumerate(zip(a["output_mask"], (_image, _weight, _bias), strict=True)):  # type: ignore[call-overload]
        if not wanted or k not in read:
            made.append(ctx.scalar_value(0))
            continue
        ctx.order = _order(node.meta["val"][k])
        made.append(of(ctx, (dy, x, w), settings, one_each, meta_of(node, k)))
    return tuple(made)


def _image(
    ctx: Context, given: tuple[Value, Value, Value], settings: list[list[int]], one_each: bool, meta: _Meta
) -> Value:
    """dx[n, c, h..] = sum over o, k.. of dy[n, o, (h + p - d k) / s ..] w[o, c, k..], where s divides it."""
    dy, w = given[0], ctx.tensor(given[2], f"{ctx.base}_w")
    shape, dtype = meta
    strides, padding, _ = settings
    if not one_each and max(strides) > 1 and not any(padding) and all(k == const(1) for k in w.shape[2:]):
        return _spread_image(ctx, dy, w, strides, meta)
    zero = ctx.constant(0, dy.dtype)

    def body(i: Indices, r: Indices) -> Expr:
        out, taps = (i[1], r) if one_each else (r[0], r[1:])
        at: list[Expr] = []
        conditions: list[Expr] = []
        for n, (h, k, s, p, d) in enumerate(zip(i[2:], taps, *settings, strict=True)):
            place = ctx.simplify(h + p - k * d)
            if s > 1:
                conditions.append(call("eq", call("mod", place, const(s)), const(0)))
            at.append(ctx.simplify(call("floordiv", place, const(s))) if s > 1 else place)
            if not _never_outside(given, n, s, p, d):
                conditions.append(call("and", call("ge", place, 0), call("lt", at[-1], dy.shape[2 + n])))
        e = dy.at((i[0], out, *at))
        for condition in conditions:
            e = call("where", condition, e, zero)
        return e * w.at((out, const(0) if one_each else i[1], *taps))

    over = w.shape[2:] if one_each else (w.shape[0], *w.shape[2:])
    return ctx.reduce("sum", shape, over, dtype, body, f"{ctx.base}_image")


def _spread_image(ctx: Context, dy: Value, w: Value, strides: list[int], meta: _Meta) -> Value:
    """The same of single taps: a product for each place of dy, and zeros between these places."""
    shape, dtype = meta
    one = [const(0)] * len(strides)

    def product(i: Indices, r: Indices) -> Expr:
        return dy.at((i[0], r[0], *i[2:])) * w.at((r[0], i[1], *one))

    made = ctx.reduce("sum", (*shape[:2], *dy.shape[2:]), (w.shape[0],), dtype, product, f"{ctx.base}_taps")

    def body(i: Indices) -> Expr:
        e = made.at(
            (*i[:2], *(ctx.simplify(call("floordiv", h, const(s))) for h, s in zip(i[2:], strides, strict=True)))
        )
        for h, s in zip(i[2:], strides, strict=True):
            if s > 1:
                e = call("where", call("eq", ctx.simplify(call("mod", h, const(s))), const(0)), e, 0.0)
        return e

    return ctx.map(shape, dtype, body, f"{ctx.base}_image")


def _never_outside(given: tuple[Value, Value, Value], n: int, s: int, p: int, d: int) -> bool:
    """Whether every tap of every place of the image is a place of the result."""
    made, image, taps = (int(v.shape[2 + n].value) for v in given)  # type: ignore[attr-defined]
    return p - d * (taps - 1) >= 0 and (image - 1 + p) // s < made


def _weight(
    ctx: Context, given: tuple[Value, Value, Value], settings: list[list[int]], one_each: bool, meta: _Meta
) -> Value:
    """dw[o, c, k..] = sum over n, y.. of x[n, c, s y + d k - p ..] dy[n, o, y..]."""
    dy, x = given[0], ctx.tensor(given[1], f"{ctx.base}_x")
    shape, dtype = meta
    zero = ctx.constant(0, x.dtype)

    def body(i: Indices, r: Indices) -> Expr:
        at = [ctx.simplify(y * s + k * d - p) for y, k, s, p, d in zip(r[1:], i[2:], *settings, strict=True)]
        e = x.at((r[0], i[0] if one_each else i[1], *at))
        for place, p, extent in zip(at, settings[1], x.shape[2:], strict=True):
            if p:
                e = call("where", call("and", call("ge", place, 0), call("lt", place, extent)), e, zero)
        return e * dy.at((r[0], i[0], *r[1:]))

    return ctx.reduce("sum", shape, (dy.shape[0], *dy.shape[2:]), dtype, body, f"{ctx.base}_weight")


def _bias(
    ctx: Context, given: tuple[Value, Value, Value], settings: list[list[int]], one_each: bool, meta: _Meta
) -> Value:
    """db[o] = sum over n, y.. of dy[n, o, y..]."""
    dy = given[0]
    shape, dtype = meta
    over = (dy.shape[0], *dy.shape[2:])
    return ctx.reduce("sum", shape, over, dtype, lambda i, r: dy.at((r[0], i[0], *r[1:])), f"{ctx.base}_bias")


_Meta = tuple[tuple[Expr, ...], DType]


def _order(fake: torch.Tensor) -> tuple[int, ...] | None:
    """The axes of a result in memory order, where channels (axis 1) are contiguous."""
    if not has_channels_last(fake):
        return None
    return (0, *range(2, fake.dim()), 1)


def _per_axis(ctx: Context, values: object, rank: int) -> list[int]:
    assert isinstance(values, list | tuple)
    out = [ctx.static_int(v, "a convolution parameter") for v in values]
    return out * rank if len(out) == 1 else out


TABLE: dict[torch._ops.OpOverload, Lowerer] = {aten.convolution_backward.default: convolution_backward}
