"""Contractions: sums of products over shared dims, and convolution as one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, broadcast, meta_of
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.frontend.operators.view import padded
from tilefold.tensor.index_simplify import const, is_one, same

aten = torch.ops.aten


def matmul(ctx: Context, a: Value, b: Value, dtype: DType, name: str = "") -> Value:
    """[..., M, K] x [..., K, N] with equal leading axes, accumulated in arithmetic type."""
    shape = (*a.shape[:-1], b.shape[-1])

    def body(i: Indices, r: Indices) -> Expr:
        return a.at((*i[:-1], r[0])) * b.at((*i[:-2], r[0], i[-1]))

    return ctx.reduce("sum", shape, (a.shape[-1],), dtype, body, name)


def mm(ctx: Context, node: torch.fx.Node) -> Value:
    """mm and bmm."""
    return matmul(ctx, ctx.value(node.args[0]), ctx.value(node.args[1]), meta_of(node)[1])


def addmm(ctx: Context, node: torch.fx.Node) -> Value:
    """beta * self + alpha * (a @ b); beta = 0 ignores self. Of integers, both factors are cut to integers."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    names = list(a)
    bias, left, right = (ctx.value(a[n]) for n in names[:3])
    scales = a["alpha"], a["beta"]
    alpha, beta = (int(s) if isinstance(s, float) and not dtype.is_float else s for s in scales)
    product = matmul(ctx, left, right, dtype, f"{ctx.base}_mm")

    def at(i: Indices) -> Expr:
        e = product.at(i)
        if alpha != 1:
            e = e * ctx.operand(ctx.value(alpha), (), dtype)
        if beta == 0:
            return e
        b = broadcast(bias, i)
        return e + (b if beta == 1 else b * ctx.operand(ctx.value(beta), (), dtype))

    return ctx.map(shape, dtype, at)


def linear(ctx: Context, node: torch.fx.Node) -> Value:
    """x @ w^T + bias."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    x, w = ctx.value(a["input"]), ctx.value(a["weight"])
    if len(w.shape) != 2:
        raise UnsupportedError("linear with a weight that is not a matrix")
    name = "" if a["bias"] is None else f"{ctx.base}_mm"
    out = ctx.reduce("sum", shape, (x.shape[-1],), dtype, lambda i, r: x.at((*i[:-1], *r)) * w.at((i[-1], *r)), name)
    if a["bias"] is None:
        return out
    bias = ctx.value(a["bias"])
    return ctx.map(shape, dtype, lambda i: out.at(i) + bias.at((i[-1],)))


def scaled_mm(ctx: Context, node: torch.fx.Node) -> Value:
    """(scale_a * scale_b) * (a @ b) + bias, for fp8 operands with one scale a tensor or one a row and column."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    left, right, scale_a, scale_b = (ctx.value(a[n]) for n in ("self", "mat2", "scale_a", "scale_b"))
    if a["scale_result"] is not None:
        raise UnsupportedError("a scaled product with a scale for its result")
    for scale, wanted in ((scale_a, (shape[0], const(1))), (scale_b, (const(1), shape[1]))):
        if not all(is_one(n) for n in scale.shape) and scale.shape != wanted:
            raise UnsupportedError("a scaled product with scales that are not one a tensor, or one a row and column")
    product = matmul(ctx, left, right, DType.F32, f"{ctx.base}_mm")
    bias = None if a["bias"] is None else ctx.value(a["bias"])

    def at(i: Indices) -> Expr:
        e = product.at(i) * broadcast(scale_a, i) * broadcast(scale_b, i)
        return e if bias is None else e + bias.at((i[1],))

    return ctx.map(shape, dtype, at)


def vectors(a_axes: int, b_axes: int) -> Lowerer:
    """dot (1, 1) and mv (2, 1)."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        a, b = ctx.value(node.args[0]), ctx.value(node.args[1])
        assert (len(a.shape), len(b.shape)) == (a_axes, b_axes)
        shape, dtype = meta_of(node)
        return ctx.reduce("sum", shape, (b.shape[0],), dtype, lambda i, r: a.at((*i, *r)) * b.at(r))

    return lower


def convolution(ctx: Context, node: torch.fx.Node) -> Value:
    """out[n, o, y..] = sum over c, k.. of x[n, g c, stride y + dilation k - padding ..] w[o, c, k..] (+ bias).

    g is the group of o. Padding is a `where`: reads out of range are discarded.
    """
    a = attrs(node)
    if a["transposed"]:
        return _blocks(ctx, node)
    x, w = (ctx.tensor(ctx.value(a[k]), f"{ctx.base}_{k}") for k in ("input", "weight"))
    shape, dtype = meta_of(node)
    rank = len(x.shape) - 2
    if rank < 1:
        raise UnsupportedError("convolution without spatial axes")
    stride, padding, dilation = (_per_axis(ctx, a[k], rank) for k in ("stride", "padding", "dilation"))
    groups = ctx.static_int(a["groups"], "the number of groups")
    per_group = ctx.simplify(call("floordiv", w.shape[0], const(groups)))
    zero = ctx.constant(0, x.dtype)
    before: dict[int, Expr] = {2 + n: const(p) for n, p in enumerate(padding) if p}
    read: Callable[[Indices], Expr] = padded(ctx, x, before, zero) if before else x.at

    def body(i: Indices, r: Indices) -> Expr:
        channel: Expr = r[0]
        if groups > 1:
            channel = ctx.simplify(call("floordiv", i[1], per_group) * w.shape[1] + r[0])
        # `padded` subtracts the padding, so the position here is in the padded image
        at = [ctx.simplify(y * s + k * d) for y, k, s, d in zip(i[2:], r[1:], stride, dilation, strict=True)]
        return read((i[0], channel, *at)) * w.at((i[1], *r))

    name = "" if a["bias"] is None else f"{ctx.base}_conv"
    out = ctx.reduce("sum", shape, w.shape[1:], dtype, body, name)
    if a["bias"] is None:
        return out
    bias = ctx.value(a["bias"])
    return ctx.map(shape, dtype, lambda i: out.at(i) + bias.at((i[1],)))


def _blocks(ctx: Context, node: torch.fx.Node) -> Value:
    """A transposed convolution whose windows touch, without overlap: out[n, o, s y + k ..] = sum over c of
    x[n, c, y ..] w[c, o, k ..] (+ bias), a product of matrices whose columns are blocks of s places."""
    a = attrs(node)
    x, w = ctx.value(a["input"]), ctx.value(a["weight"])
    shape, dtype = meta_of(node)
    rank = len(x.shape) - 2
    stride, padding, dilation, more = (
        _per_axis(ctx, a[k], rank) for k in ("stride", "padding", "dilation", "output_padding")
    )
    touching = all(same(n, const(s)) for n, s in zip(w.shape[2:], stride, strict=True)) and set(dilation) <= {1}
    if rank < 1 or not touching or any(padding) or any(more) or a["groups"] != 1:
        raise UnsupportedError("transposed convolution")

    # of rows of channels a product, rows then columns; of planes one an image, and what then writes the blocks stays
    # inside of a channel's image
    image = node.args[0]
    assert isinstance(image, torch.fx.Node)
    planes = image.meta["val"].stride(1) != 1
    blocks, columns = x.shape[2:], w.shape[1:]
    made = (x.shape[0], *columns, *blocks) if planes else (x.shape[0], *blocks, *columns)

    def body(i: Indices, r: Indices) -> Expr:
        block, column = (i[2 + rank :], i[1 : 2 + rank]) if planes else (i[1 : 1 + rank], i[1 + rank :])
        return x.at((i[0], *r, *block)) * w.at((*r, *column))

    product = ctx.reduce("sum", made, (x.shape[1],), dtype, body, f"{ctx.base}_blocks")
    bias = None if a["bias"] is None else ctx.value(a["bias"])

    def at(i: Indices) -> Expr:
        block = tuple(ctx.simplify(call("floordiv", y, const(s))) for y, s in zip(i[2:], stride, strict=True))
        inside = tuple(ctx.simplify(call("mod", y, const(s))) for y, s in zip(i[2:], stride, strict=True))
        e = product.at((i[0], i[1], *inside, *block) if planes else (i[0], *block, i[1], *inside))
        return e if bias is None else e + bias.at((i[1],))

    return ctx.map(shape, dtype, at)


def _per_axis(ctx: Context, values: object, rank: int) -> list[int]:
    assert isinstance(values, list | tuple)
    out = [ctx.static_int(v, "a convolution parameter") for v in values]
    return out * rank if len(out) == 1 else out


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.mm.default: mm,
    aten.bmm.default: mm,
    aten.addmm.default: addmm,
    aten.baddbmm.default: addmm,
    aten.linear.default: linear,
    aten._scaled_mm.default: scaled_mm,
    aten.dot.default: vectors(1, 1),
    aten.mv.default: vectors(2, 1),
    aten.convolution.default: convolution,
}
