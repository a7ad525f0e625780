"""Pooling: a maximum or a mean over windows.

    out[n, c, y..] = max over k.. of x[n, c, s y + d k - p ..]

A window of few elements is written out, element by element: a map, whose neighbours read the same memory at nearly
the same time. Larger ones are reductions. What lies outside of x does not count: -inf for a maximum, 0 for a sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, meta_of
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.tensor.index_simplify import const

aten = torch.ops.aten
#: Windows of at most this many elements are written out (3 x 3 x 3).
WRITTEN_OUT = 27


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a result's index along one axis of x: `count` elements from `start`, `step` apart, those in
    [0, extent) only, and only below `stop`, if that is given."""

    extent: Expr
    count: int
    step: int
    start: Callable[[Expr], Expr]
    stop: Callable[[Expr], Expr] | None = None
    low: bool = True
    high: bool = True

    def at(self, ctx: Context, i: Expr, k: Expr) -> tuple[Expr, list[Expr]]:
        """Position of element k, and the conditions under which it counts."""
        place = ctx.simplify(self.start(i) + k * self.step)
        inside = [call("ge", place, 0)] if self.low else []
        inside += [call("lt", place, self.extent)] if self.high else []
        if self.stop is not None:
            inside.append(call("lt", place, ctx.simplify(self.stop(i))))
        return place, inside


def regular(ctx: Context, a: object, x: Value, rank: int, kernel: Sequence[int]) -> list[Window]:
    """Windows of `stride`, `padding` and `dilation`, as a node's arguments `a` have them."""
    get = a.get  # type: ignore[attr-defined]
    stride = per_axis(ctx, get("stride") or kernel, rank)
    padding, dilation = per_axis(ctx, get("padding") or 0, rank), per_axis(ctx, get("dilation") or 1, rank)
    out = []
    for n, (k, s, p, d) in enumerate(zip(kernel, stride, padding, dilation, strict=True)):
        extent = x.shape[len(x.shape) - rank + n]

        def start(i: Expr, s: int = s, p: int = p) -> Expr:
            return i * s - p

        out.append(Window(extent, k, d, start, low=p > 0, high=p > 0 or bool(get("ceil_mode"))))
    return out


def _elements(ctx: Context, x: Value, windows: Sequence[Window], outside: float) -> Callable[[Indices, Indices], Expr]:
    """Element k of the window of result i, by (i, k); `outside` where it does not count."""
    if not x.dtype.is_float:
        raise UnsupportedError(f"pooling of {x.dtype.value}")
    rank, fill = len(windows), Const(outside, x.dtype.compute)

    def element(i: Indices, k: Indices) -> Expr:
        places, inside = zip(*(w.at(ctx, j, n) for w, j, n in zip(windows, i[-rank:], k, strict=True)), strict=True)
        e = x.at((*i[:-rank], *places))
        for condition in itertools.chain(*inside):
            e = call("where", condition, e, fill)
        return e

    return element


def _pooled(
    ctx: Context, x: Value, windows: Sequence[Window], shape: tuple[Expr, ...], dtype: DType, reducer: str, name: str
) -> Value:
    """The reducer (max or sum) over the windows of x's last axes."""
    element = _elements(ctx, x, windows, -math.inf if reducer == "max" else 0.0)
    if math.prod(w.count for w in windows) > WRITTEN_OUT:
        return ctx.reduce(reducer, shape, tuple(const(w.count) for w in windows), dtype, element, name)

    def at(i: Indices) -> Expr:
        found: Expr | None = None
        for k in itertools.product(*(range(w.count) for w in windows)):
            e = element(i, tuple(map(const, k)))
            found = e if found is None else call("maximum" if reducer == "max" else "add", found, e)
        assert found is not None
        return found

    return ctx.map(shape, dtype, at, name)


def max_pool(ctx: Context, node: torch.fx.Node) -> tuple[Value, ...]:
    """Values, and the flat positions of the maxima among the places of x."""
    a = attrs(node)
    x = ctx.value(a["self"])
    rank = axes_of(node)
    return _maxima(ctx, node, x, regular(ctx, a, x, rank, per_axis(ctx, a["kernel_size"], rank)))


def adaptive_max_pool(ctx: Context, node: torch.fx.Node) -> tuple[Value, ...]:
    """The same over windows that differ in length (`adaptive_avg_pool`)."""
    x = ctx.value(attrs(node)["self"])
    return _maxima(ctx, node, x, adaptive(x, meta_of(node, 0)[0], axes_of(node)))


def _maxima(ctx: Context, node: torch.fx.Node, x: Value, windows: Sequence[Window]) -> tuple[Value, ...]:
    """The maxima over windows of the last axes, and their flat positions there."""
    (shape, dtype), (_, position) = meta_of(node, 0), meta_of(node, 1)
    rank, kernel = len(windows), [w.count for w in windows]
    element = _elements(ctx, x, windows, -math.inf)
    asked = not node.users or any(u.args[1:] != (0,) for u in node.users)
    if math.prod(kernel) > WRITTEN_OUT or not asked:
        values = _pooled(ctx, x, windows, shape, dtype, "max", ctx.base)
        over = tuple(const(n) for n in kernel)
        best = ctx.reduce("argmax", shape, over, DType.I64, element, f"{ctx.base}_best")
    else:
        values, best = _first_of_largest(ctx, element, windows, shape, dtype)

    def flat(i: Indices) -> Expr:
        rest, taps = best.at(i), []
        for n in reversed(kernel):
            taps.append(call("mod", rest, const(n)))
            rest = call("floordiv", rest, const(n))
        e: Expr = const(0)
        for w, j, k in zip(windows, i[-rank:], reversed(taps), strict=True):
            e = e * w.extent + (w.start(j) + k * w.step)
        return e

    return values, ctx.map(shape, position, flat, f"{ctx.base}_at")


def _first_of_largest(
    ctx: Context,
    element: Callable[[Indices, Indices], Expr],
    windows: Sequence[Window],
    shape: tuple[Expr, ...],
    dtype: DType,
) -> tuple[Value, Value]:
    """The maxima and which elements of their windows they are, written out; of equal ones the first, of NaN the last,
    of windows without anything larger than -inf the first element that counts, as torch has it."""
    rank, strides = len(windows), [math.prod(w.count for w in windows[n + 1 :]) for n in range(len(windows))]

    def start(i: Indices) -> Expr:
        e: Expr = const(0)
        for w, j, by in zip(windows, i[-rank:], strides, strict=True):
            before = call("floordiv", const(w.step - 1) - w.start(j), const(w.step))  # elements in front of x
            e = e + (call("maximum", before, const(0)) if w.low else const(0)) * by
        return e

    first, *rest = [tuple(map(const, k)) for k in itertools.product(*(range(w.count) for w in windows))]
    top, best = Value(shape, dtype.compute, lambda i: element(i, first)), Value(shape, DType.I64, start)
    for n, k in enumerate(rest, 1):

        def larger(i: Indices, k: Indices = k, top: Value = top) -> Expr:
            e = element(i, k)
            return call("or", call("gt", e, top.at(i)), call("ne", e, e))

        def chosen(i: Indices, n: int = n, best: Value = best, larger: Callable[..., Expr] = larger) -> Expr:
            return call("where", larger(i), const(n), best.at(i))

        def maximum(i: Indices, k: Indices = k, top: Value = top) -> Expr:
            return call("maximum", top.at(i), element(i, k))

        best = ctx.map(shape, DType.I64, chosen, f"{ctx.base}_best")
        last = n == len(rest)
        top = ctx.map(shape, dtype if last else dtype.compute, maximum, ctx.base if last else f"{ctx.base}_top")
    return top, best


def avg_pool(ctx: Context, node: torch.fx.Node) -> Value:
    """Means over windows; padding counts where `count_include_pad` says so, what ceil_mode adds never does."""
    a = attrs(node)
    x = ctx.value(a["self"])
    shape, dtype = meta_of(node)
    rank = axes_of(node)
    windows = regular(ctx, a, x, rank, per_axis(ctx, a["kernel_size"], rank))
    total = _pooled(ctx, x, windows, shape, dtype.compute, "sum", f"{ctx.base}_sum")
    divisor = divisors(ctx, a, windows)

    def at(i: Indices) -> Expr:
        return call("div", total.at(i), as_float(divisor(i), total.dtype.compute))

    return ctx.map(shape, dtype, at)


def divisors(ctx: Context, a: Mapping[str, object], windows: Sequence[Window]) -> Callable[[Indices], Expr]:
    """What the sum over the window of a result is divided by, as a node's arguments `a` have it."""
    kernel = [w.count for w in windows]
    padding = per_axis(ctx, a["padding"] or 0, len(windows))
    whole, given = bool(a["count_include_pad"]), a.get("divisor_override")
    plain = not a["ceil_mode"] and (whole or not any(padding))

    def divisor(i: Indices) -> Expr:
        if given is not None or plain:
            return const(math.prod(kernel) if given is None else ctx.static_int(given, "a divisor"))
        count: Expr = const(1)
        for w, j, k, p in zip(windows, i[-len(windows) :], kernel, padding, strict=True):
            first = w.start(j)
            last = call("minimum", first + k, w.extent + (p if whole else 0))
            count = count * (last - (first if whole else call("maximum", first, const(0))))
        return count

    return divisor


def as_float(n: Expr, dtype: DType) -> Expr:
    """A number of elements as a divisor."""
    return Const(float(n.value), dtype) if isinstance(n, Const) else Cast(n, dtype)


def adaptive_avg_pool(ctx: Context, node: torch.fx.Node) -> Value:
    """Means over windows [i H // O, ((i + 1) H + O - 1) // O), which differ in length where O does not divide H."""
    x = ctx.value(attrs(node)["self"])
    shape, dtype = meta_of(node)
    windows = adaptive(x, shape, axes_of(node))
    total = _pooled(ctx, x, windows, shape, dtype.compute, "sum", f"{ctx.base}_sum")

    def at(i: Indices) -> Expr:
        return call("div", total.at(i), as_float(lengths(ctx, windows, i), total.dtype.compute))

    return ctx.map(shape, dtype, at)


def lengths(ctx: Context, windows: Sequence[Window], i: Indices) -> Expr:
    """How many elements the window of result i has in adaptive pooling."""
    count: Expr = const(1)
    for w, j in zip(windows, i[-len(windows) :], strict=True):
        count = ctx.simplify(count * (const(w.count) if w.stop is None else w.stop(j) - w.start(j)))
    return count


def adaptive(x: Value, shape: tuple[Expr, ...], rank: int) -> list[Window]:
    """The windows of adaptive pooling to the last `rank` extents of `shape`."""
    windows = []
    for n in range(len(shape) - rank, len(shape)):
        have, want = x.shape[n], shape[n]
        if not isinstance(have, Const) or not isinstance(want, Const):
            raise UnsupportedError("adaptive pooling of symbolic extents")
        extent, made = int(have.value), int(want.value)
        most = max((-(-(i + 1) * extent // made) - i * extent // made for i in range(made)), default=1)
        even = extent % made == 0 if made else True

        def start(i: Expr, extent: int = extent, made: int = made, even: bool = even) -> Expr:
            return i * (extent // made) if even else call("floordiv", i * extent, const(made))

        def stop(i: Expr, extent: int = extent, made: int = made) -> Expr:
            return call("floordiv", i * extent + (extent + made - 1), const(made))

        windows.append(Window(x.shape[n], most, 1, start, None if even else stop, low=False, high=False))
    return windows


def axes_of(node: torch.fx.Node) -> int:
    """How many axes of an image such an operator (`max_pool2d`, `upsample_linear1d_backward`) is of."""
    return next(n for n in (1, 2, 3) if f"{n}d" in str(node.target))


def per_axis(ctx: Context, values: object, rank: int) -> list[int]:
    out = [ctx.static_int(v, "a pooling parameter") for v in (values if isinstance(values, list | tuple) else [values])]
    return out * rank if len(out) == 1 else out


#: With the places of the maxima.
MAXIMA: dict[torch._ops.OpOverload, Lowerer] = {
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool3d_with_indices.default: max_pool,
    aten.adaptive_max_pool2d.default: adaptive_max_pool,
    aten.adaptive_max_pool3d.default: adaptive_max_pool,
}
TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    **MAXIMA,
    aten.avg_pool1d.default: avg_pool,
    aten.avg_pool2d.default: avg_pool,
    aten.avg_pool3d.default: avg_pool,
    aten._adaptive_avg_pool2d.default: adaptive_avg_pool,
    aten._adaptive_avg_pool3d.default: adaptive_avg_pool,
}
