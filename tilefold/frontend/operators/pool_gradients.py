"""Gradients of pooling, and of unfolding: what each place of the image gets from the windows that it is in.

    dx[n, c, h..] = sum over the windows y.. that have h of dy[n, c, y..] / (their length)               means
    dx[n, c, h..] = sum over the windows y.. that have h of dy[n, c, y..], where h is their maximum's place
    dx[n, c, h..] = sum over the windows y.. that have h of dy[n, (c, which element of y.. h is), y..]      `fold`

Windows that do not overlap give one term. Nothing is scattered: places read, as in torch's kernels without atomics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tilefold.algebra.expr import Const, Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, meta_of
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.frontend.operators.pool import (
    WRITTEN_OUT,
    adaptive,
    as_float,
    axes_of,
    divisors,
    lengths,
    per_axis,
    regular,
)
from tilefold.tensor.index_simplify import const

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Windows:
    """Those that have a place of the image, along one axis: at most `count`. at: the n-th of place h, and the
    conditions under which it is one. element: which of its elements h then is (of windows of one length)."""

    count: int
    at: Callable[[Expr, Expr], tuple[Expr, list[Expr]]]
    element: Callable[[Expr, Expr], Expr] = field(default=lambda h, n: n)


def _of_stride(ctx: Context, made: Expr, kernel: int, stride: int, padding: int, dilation: int) -> _Windows:
    """Windows s y - p + d k, of `made` results y. Without dilation neighbours: (h + p) // s - n, as long as they
    reach h; else those of each element k that s divides."""

    def near(h: Expr, n: Expr) -> tuple[Expr, list[Expr]]:
        y = ctx.simplify(call("floordiv", h + padding, const(stride)) - n)
        reach = [call("lt", ctx.simplify(h + padding - y * stride), const(kernel))] if kernel % stride else []
        return y, [call("ge", y, 0), call("lt", y, made), *reach]

    def far(h: Expr, k: Expr) -> tuple[Expr, list[Expr]]:
        place = ctx.simplify(h + padding - k * dilation)
        y = ctx.simplify(call("floordiv", place, const(stride)))
        whole = [call("eq", call("mod", place, const(stride)), const(0))] if stride > 1 else []
        return y, [call("ge", place, 0), call("lt", y, made), *whole]

    def element(h: Expr, n: Expr) -> Expr:
        return ctx.simplify(call("mod", h + padding, const(stride)) + n * stride)

    return _Windows(-(-kernel // stride), near, element) if dilation == 1 else _Windows(kernel, far)


def _of_adaptive(ctx: Context, made: Expr, extent: Expr) -> _Windows:
    """Windows [y H // O, ((y + 1) H + O - 1) // O): from h O // H on, below ((h + 1) O + H - 1) // H."""
    if not isinstance(made, Const) or not isinstance(extent, Const):
        raise UnsupportedError("adaptive pooling of symbolic extents")
    o, size = int(made.value), int(extent.value)
    most = max((-(-(h + 1) * o // size) - h * o // size for h in range(size)), default=1)

    def at(h: Expr, n: Expr) -> tuple[Expr, list[Expr]]:
        y = ctx.simplify(call("floordiv", h * o, const(size)) + n)
        below = call("floordiv", h * o + (o + size - 1), const(size))
        return y, [] if most == 1 else [call("lt", y, ctx.simplify(below))]

    return _Windows(most, at)


def _gathered(
    ctx: Context, node: torch.fx.Node, windows: Sequence[_Windows], term: Callable[[Indices, Indices, Indices], Expr]
) -> Value:
    """The sum of `term(h.., y.., k..)` over the windows y of which place h of the last axes is element k."""
    shape, dtype = meta_of(node)
    rank, zero = len(windows), Const(0.0, dtype.compute)

    def element(i: Indices, n: Indices) -> Expr:
        found = [w.at(h, k) for w, h, k in zip(windows, i[-rank:], n, strict=True)]
        elements = (w.element(h, k) for w, h, k in zip(windows, i[-rank:], n, strict=True))
        e = term(i, (*i[:-rank], *(y for y, _ in found)), tuple(elements))
        for condition in itertools.chain(*(c for _, c in found)):
            e = call("where", condition, e, zero)
        return e

    counts = [w.count for w in windows]
    if math.prod(counts) > WRITTEN_OUT:
        return ctx.reduce("sum", shape, tuple(map(const, counts)), dtype, element, ctx.base)

    def at(i: Indices) -> Expr:
        first, *rest = [element(i, tuple(map(const, n))) for n in itertools.product(*map(range, counts))]
        for e in rest:
            first = call("add", first, e)
        return first

    return ctx.map(shape, dtype, at)


def max_pool_backward(ctx: Context, node: torch.fx.Node) -> Value:
    """From `indices`, the flat places of the maxima."""
    a = attrs(node)
    dy, x, best = ctx.value(a["grad_output"]), ctx.value(a["self"]), ctx.value(a["indices"])
    made, extents, rank = dy.shape, x.shape, axes_of(node)
    if "kernel_size" in a:
        kernel = per_axis(ctx, a["kernel_size"], rank)
        given = [per_axis(ctx, a[k] or kernel, rank) for k in ("stride", "padding", "dilation")]
        axes = zip(made[-rank:], kernel, *given, strict=True)
        windows = [_of_stride(ctx, *one) for one in axes]
    else:
        windows = [_of_adaptive(ctx, o, n) for o, n in zip(made[-rank:], extents[-rank:], strict=True)]

    def term(i: Indices, y: Indices, _: Indices) -> Expr:
        place: Expr = const(0)
        for h, extent in zip(i[-rank:], extents[-rank:], strict=True):
            place = place * extent + h
        return call("where", call("eq", best.at(y), ctx.simplify(place)), dy.at(y), Const(0.0, dy.dtype.compute))

    return _gathered(ctx, node, windows, term)


def avg_pool_backward(ctx: Context, node: torch.fx.Node) -> Value:
    """Each window hands its gradient, divided as its sum was, to all of its places."""
    a = attrs(node)
    dy, x = ctx.value(a["grad_output"]), ctx.value(a["self"])
    rank = axes_of(node)
    kernel = per_axis(ctx, a["kernel_size"], rank)
    divisor = divisors(ctx, a, regular(ctx, a, x, rank, kernel))
    stride, padding = per_axis(ctx, a["stride"] or kernel, rank), per_axis(ctx, a["padding"] or 0, rank)
    axes = zip(dy.shape[-rank:], kernel, stride, padding, strict=True)
    windows = [_of_stride(ctx, o, k, s, p, 1) for o, k, s, p in axes]
    return _gathered(ctx, node, windows, lambda i, y, _: _share(dy, y, divisor(y)))


def adaptive_avg_pool_backward(ctx: Context, node: torch.fx.Node) -> Value:
    """The same, of windows that differ in length."""
    a = attrs(node)
    dy, x = ctx.value(a["grad_output"]), ctx.value(a["self"])
    rank = axes_of(node)
    windows = [_of_adaptive(ctx, o, n) for o, n in zip(dy.shape[-rank:], x.shape[-rank:], strict=True)]
    forward = adaptive(x, dy.shape, rank)
    return _gathered(ctx, node, windows, lambda i, y, _: _share(dy, y, lengths(ctx, forward, y)))


def fold(ctx: Context, node: torch.fx.Node) -> Value:
    """Windows' elements, which the channels and the last axis have flattened, added up where they lie."""
    a = attrs(node)
    x, shape = ctx.value(a["self"]), meta_of(node)[0]
    names = ("kernel_size", "dilation", "padding", "stride")
    kernel, dilation, padding, stride = (per_axis(ctx, a[k], 2) for k in names)
    sides = [
        ctx.simplify(call("floordiv", o + (2 * p - d * (k - 1) - 1), const(s)) + 1)
        for o, k, d, p, s in zip(shape[-2:], kernel, dilation, padding, stride, strict=True)
    ]
    windows = [_of_stride(ctx, *one) for one in zip(sides, kernel, stride, padding, dilation, strict=True)]

    def term(i: Indices, y: Indices, element: Indices) -> Expr:
        channel: Expr = i[-3]
        place: Expr = const(0)
        for n in range(2):
            channel, place = channel * kernel[n] + element[n], place * sides[n] + y[n - 2]
        return x.at((*i[:-3], ctx.simplify(channel), ctx.simplify(place)))

    return _gathered(ctx, node, windows, term)


def _share(dy: Value, y: Indices, among: Expr) -> Expr:
    return call("div", dy.at(y), as_float(among, dy.dtype.compute))


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.col2im.default: fold,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    aten.max_pool3d_with_indices_backward.default: max_pool_backward,
    aten.adaptive_max_pool2d_backward.default: max_pool_backward,
    aten.adaptive_max_pool3d_backward.default: max_pool_backward,
    aten.avg_pool2d_backward.default: avg_pool_backward,
    aten.avg_pool3d_backward.default: avg_pool_backward,
    aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool_backward,
    aten._adaptive_avg_pool3d_backward.default: adaptive_avg_pool_backward,
}
