"""Gradients of images that are resized, or padded by their edges: what each place gets from the few that read it.

    dx[n, c, h..] = sum over y.. of prod over axes of w(y, h) dy[n, c, y..]

    w(y, h) = max(1 - |s(y) - h|, 0)      s(y) = min(max((y + 1/2) r - 1/2, 0), H - 1)       linear
                                          s(y) = y r                                         linear, by corners
    w(y, h) = sum of K(s(y) - k) over k that are h once they are kept inside             cubic: s(y) is not
    w(y, h) = 1 if i(y) = h else 0        i(y) = int((y + o) r)                              nearest
                                          i(y) = min(max(y - p, 0), H - 1)                   edges

Positions are those of the forward, in its type. The y of place h are in a window (a h + b) // c + [0, T) whose a, b, c
and T are found by looking at all of them, so extents are known. Few taps are summed at once, more an axis at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, meta_of
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.frontend.operators.pool import WRITTEN_OUT, axes_of
from tilefold.tensor.index_simplify import const

aten = torch.ops.aten
#: Taps along one axis that are written out. Along the one that is contiguous in memory fewer: neighbours, which are
#: lanes of a GPU, would read places far apart, and the elements of a reduction read next to each other.
FAR, NEAR = 32, 8
#: Of the cubic kernel, as torch has it.
CUBIC = -0.75
#: Of a result's index y and a place h: an expression.
Of = Callable[[Expr, Expr], Expr]


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis: extents of the image and of what it became, the first and the last y of each place (none: the last is
    before the first), the weight of a tap, if it is not 1, and when one counts."""

    extent: int
    made: int
    first: Sequence[int]
    last: Sequence[int]
    weight: Of | None = None
    counts: Of | None = None
    shift: bool = False


@dataclass(frozen=True, slots=True)
class _Window:
    """count places from (a h + b) // c on. exact: it ends where that of h + 1 begins."""

    a: int
    b: int
    c: int
    count: int
    exact: bool

    def start(self, h: Expr) -> Expr:
        return call("floordiv", h * self.a + self.b, const(self.c))

    def starts(self, extent: int) -> list[int]:
        return [(self.a * h + self.b) // self.c for h in range(extent)]


def _window(x: _Axis) -> _Window:
    """The smallest among those whose step is the ratio of the extents, or of what lies between their corners."""
    read = [h for h in range(x.extent) if x.last[h] >= x.first[h]]
    steps = [(1, 1)] if x.shift else [(x.made, x.extent), (x.made - 1, x.extent - 1)]
    found = [_of_step(x, read, a // math.gcd(a, c), c // math.gcd(a, c)) for a, c in steps if c > 0]
    return min(found, key=lambda w: (w.count, not w.exact))


def _of_step(x: _Axis, read: Sequence[int], a: int, c: int) -> _Window:
    """The window with the largest b that no place is in front of, or one that begins at the first of each place."""
    b, exact = min(c * x.first[h] + c - 1 - a * h for h in read), False
    if x.weight is None:
        begins = [c * f - a * h for h, f in enumerate([*x.first, x.made])]
        exact = max(begins) <= min(begins) + c - 1
        b = max(begins) if exact else b
    count = max(x.last[h] - (a * h + b) // c for h in read) + 1
    return _Window(a, b, c, count, exact)


def _tap(ctx: Context, x: _Axis, w: _Window, h: Expr, n: Expr) -> tuple[Expr, list[Expr]]:
    """The n-th y of place h, and the conditions under which it counts that do not always hold."""
    y = ctx.simplify(w.start(h) + n)
    taps = range(w.count) if not isinstance(n, Const) else [int(n.value)]
    starts, ends = w.starts(x.extent), w.starts(x.extent + 1)[1:]
    conditions = []
    if min(starts) + taps[0] < 0:
        conditions.append(call("ge", y, 0))
    if max(starts) + taps[-1] >= x.made:
        conditions.append(call("lt", y, const(x.made)))
    if w.exact:
        if any(s + taps[-1] >= e for s, e in zip(starts, ends, strict=True)):
            conditions.append(call("lt", y, ctx.simplify(w.start(h + 1))))
    elif x.counts is not None:
        conditions.append(x.counts(y, h))
    return y, conditions


def _gathered(ctx: Context, node: torch.fx.Node, dy: Value, axes: Sequence[_Axis]) -> Value:
    """The sum over the windows of the last axes, at once or an axis at a time."""
    shape, dtype = meta_of(node)
    windows, rank = [_window(x) for x in axes], len(axes)
    if math.prod(w.count for w in windows) <= WRITTEN_OUT:
        return ctx.map(shape, dtype, lambda i: _sum(ctx, dy, i[:-rank], i[-rank:], axes, windows))
    extents = list(dy.shape)
    for n in range(rank):
        at = len(extents) - rank + n
        extents[at] = shape[at]
        last = n == rank - 1
        dy = _along(ctx, dy, at, tuple(extents), dtype if last else dtype.compute, axes[n], windows[n])
    return dy


def _sum(
    ctx: Context, dy: Value, before: Indices, h: Indices, axes: Sequence[_Axis], windows: Sequence[_Window]
) -> Expr:
    """All taps of place h, written out, the last axis innermost."""
    zero = Const(0.0, dy.dtype.compute)
    taps = [[_tap(ctx, x, w, p, const(n)) for n in range(w.count)] for x, w, p in zip(axes, windows, h, strict=True)]

    def inner(axis: int, y: Indices, conditions: Sequence[Expr]) -> Expr:
        if axis == len(axes):
            e = dy.at((*before, *y))
            for c in reversed(conditions):
                e = call("where", c, e, zero)
            return e
        terms = []
        for at, own in taps[axis]:
            e = inner(axis + 1, (*y, at), (*conditions, *own))
            weight = axes[axis].weight
            terms.append(e if weight is None else call("mul", e, weight(at, h[axis])))
        return _added(terms)

    return inner(0, (), ())


def _added(terms: Sequence[Expr]) -> Expr:
    first, *rest = terms
    for e in rest:
        first = call("add", first, e)
    return first


def _along(ctx: Context, dy: Value, axis: int, shape: tuple[Expr, ...], dtype: DType, x: _Axis, w: _Window) -> Value:
    """One axis alone."""
    zero = Const(0.0, dy.dtype.compute)

    def element(i: Indices, n: Expr) -> Expr:
        y, conditions = _tap(ctx, x, w, i[axis], n)
        e = dy.at((*i[:axis], y, *i[axis + 1 :]))
        for c in conditions:
            e = call("where", c, e, zero)
        return e if x.weight is None else call("mul", e, x.weight(y, i[axis]))

    name, contiguous = f"{ctx.base}_along{axis}", (ctx.order or range(len(shape)))[-1]
    if w.count > (NEAR if axis == contiguous else FAR):
        return ctx.reduce("sum", shape, (const(w.count),), dtype, lambda i, n: element(i, n[0]), name)
    return ctx.map(shape, dtype, lambda i: _added([element(i, const(n)) for n in range(w.count)]), name)


@dataclass(frozen=True, slots=True)
class _Positions:
    """s(y) of an axis that is made of another's places, in a type; `all` of them, or an expression."""

    ratio: float
    corners: bool
    wide: DType

    def all(self, made: int) -> torch.Tensor:
        y = torch.arange(made).to(self.wide.torch_dtype)
        return self.ratio * y if self.corners else self.ratio * (y + 0.5) - 0.5

    def at(self, y: Expr) -> Expr:
        at, ratio, half = Cast(y, self.wide), self.number(self.ratio), self.number(0.5)
        return at * ratio if self.corners else (at + half) * ratio - half

    def number(self, x: float) -> Const:
        return Const(x, self.wide)


def _positions(extent: int, made: int, corners: bool, scale: float | None, dtype: DType) -> _Positions:
    if corners:
        ratio = (extent - 1.0) / (made - 1.0) if made > 1 else 0.0
    else:
        ratio = 1.0 / scale if scale is not None and scale > 0 else extent / made
    return _Positions(ratio, corners, dtype.compute)


def _weighted(extent: int, low: torch.Tensor, high: torch.Tensor, weight: Of) -> _Axis:
    """An axis whose y-th element is made of places `low[y]` to `high[y]`, neither of which ever falls."""
    places = torch.arange(extent)
    first, last = torch.searchsorted(high, places), torch.searchsorted(low, places, right=True) - 1
    return _Axis(extent, len(low), first.tolist(), last.tolist(), weight)


def _linear(extent: int, made: int, p: _Positions) -> _Axis:
    s = p.all(made).clamp(0.0, extent - 1.0)
    low = s.to(torch.int64)
    high = (low + (s > low)).clamp(max=extent - 1)  # the last that has a weight

    def weight(y: Expr, h: Expr) -> Expr:
        s = call("minimum", call("maximum", p.at(y), p.number(0.0)), p.number(extent - 1.0))
        away = call("abs", s - Cast(h, p.wide))
        return call("maximum", p.number(1.0) - away, p.number(0.0))

    return _weighted(extent, low, high, weight)


def _cubic(extent: int, made: int, p: _Positions) -> _Axis:
    """Four places around s(y); the first and the last stand for those outside."""
    low = p.all(made).floor().to(torch.int64) - 1
    high = low + 3
    outside = [(0, k) for k in range(int(low.min()), 0)]
    outside += [(extent - 1, k) for k in range(extent, int(high.max()) + 1)]

    def weight(y: Expr, h: Expr) -> Expr:
        s = p.at(y)
        found = _kernel(s - Cast(h, p.wide), p)
        for edge, k in outside:
            own = _kernel(s - p.number(k), p)
            found = found + call("where", call("eq", h, const(edge)), own, p.number(0.0))
        return found

    return _weighted(extent, low.clamp(0, extent - 1), high.clamp(0, extent - 1), weight)


def _kernel(away: Expr, p: _Positions) -> Expr:
    """K: (a + 2) d^3 - (a + 3) d^2 + 1 up to 1, a (d^3 - 5 d^2 + 8 d - 4) up to 2."""
    d = call("abs", away)
    near = (p.number(CUBIC + 2) * d - p.number(CUBIC + 3)) * d * d + p.number(1.0)
    far = ((d - p.number(5.0)) * d + p.number(8.0)) * d - p.number(4.0)
    outer = call("where", call("lt", d, p.number(2.0)), p.number(CUBIC) * far, p.number(0.0))
    return call("where", call("le", d, p.number(1.0)), near, outer)


def _by_place(extent: int, at: torch.Tensor, counts: Of, *, shift: bool = False) -> _Axis:
    """An axis whose y-th element is a copy of `at[y]`, which never falls."""
    places = torch.arange(extent)
    first, last = torch.searchsorted(at, places), torch.searchsorted(at, places, right=True) - 1
    return _Axis(extent, len(at), first.tolist(), last.tolist(), None, counts, shift)


def _nearest(extent: int, made: int, scale: float | None, exact: bool) -> _Axis:
    ratio = extent / (extent * scale) if scale is not None and scale > 0 else extent / made
    offset = 0.5 if exact else 0.0
    at = ((torch.arange(made, dtype=torch.float32) + offset) * ratio).to(torch.int64)

    def counts(y: Expr, h: Expr) -> Expr:
        s = (Cast(y, DType.F32) + Const(offset, DType.F32)) * Const(ratio, DType.F32)
        return call("eq", Cast(s, DType.I64), h)

    return _by_place(extent, at, counts)


def _edges(extent: int, made: int, before: int) -> _Axis:
    at = (torch.arange(made) - before).clamp(0, extent - 1)

    def counts(y: Expr, h: Expr) -> Expr:
        return call("eq", call("minimum", call("maximum", y - before, const(0)), const(extent - 1)), h)

    return _by_place(extent, at, counts, shift=True)


def _extents(ctx: Context, node: torch.fx.Node, dy: Value, rank: int) -> list[tuple[int, int]]:
    """Of the image and of what it became, an axis a pair. UnsupportedError where one is not known."""
    found = [(a, b) for a, b in zip(meta_of(node)[0][-rank:], dy.shape[-rank:], strict=True)]
    if not all(isinstance(x, Const) and x.value > 0 for pair in found for x in pair):
        raise UnsupportedError(f"{ctx.origin}: resizing of symbolic extents")
    return [(int(a.value), int(b.value)) for a, b in found]  # type: ignore[attr-defined] # constants


def _scales(a: object, rank: int) -> list[float | None]:
    get = a.get  # type: ignore[attr-defined]
    return [get("scales")] if rank == 1 else [get(f"scales_{n}") for n in "dhw"[-rank:]]


def weighted_backward(ctx: Context, node: torch.fx.Node) -> Value:
    """Of linear, bilinear, trilinear and bicubic interpolation."""
    a, rank = attrs(node), axes_of(node)
    axis = _cubic if "cubic" in str(node.target) else _linear
    dy, corners = ctx.value(a["grad_output"]), bool(a["align_corners"])
    extents = _extents(ctx, node, dy, rank)
    with _disable_current_modes():  # positions are looked at: not under AOT's fake mode
        given = zip(extents, _scales(a, rank), strict=True)
        axes = [axis(*e, _positions(*e, corners, s, dy.dtype)) for e, s in given]
    return _gathered(ctx, node, dy, axes)


def nearest_backward(ctx: Context, node: torch.fx.Node) -> Value:
    """Of the nearest place's copy, by either rule."""
    a, rank = attrs(node), axes_of(node)
    dy, exact = ctx.value(a["grad_output"]), "exact" in str(node.target)
    extents = _extents(ctx, node, dy, rank)
    with _disable_current_modes():
        axes = [_nearest(*e, s, exact) for e, s in zip(extents, _scales(a, rank), strict=True)]
    return _gathered(ctx, node, dy, axes)


def replication_pad_backward(ctx: Context, node: torch.fx.Node) -> Value:
    """Of padding by edges; padding: of the last axis first, before and after."""
    a, rank = attrs(node), axes_of(node)
    dy, padding = ctx.value(a["grad_output"]), a["padding"]
    assert isinstance(padding, list | tuple)
    before = [ctx.static_int(p, "padding") for p in padding[::2]][::-1]
    extents = _extents(ctx, node, dy, rank)
    with _disable_current_modes():
        axes = [_edges(*e, p) for e, p in zip(extents, before, strict=True)]
    return _gathered(ctx, node, dy, axes)


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.upsample_linear1d_backward.default: weighted_backward,
    aten.upsample_bilinear2d_backward.default: weighted_backward,
    aten.upsample_trilinear3d_backward.default: weighted_backward,
    aten.upsample_bicubic2d_backward.default: weighted_backward,
    aten.upsample_nearest1d_backward.default: nearest_backward,
    aten.upsample_nearest2d_backward.default: nearest_backward,
    aten.upsample_nearest3d_backward.default: nearest_backward,
    aten._upsample_nearest_exact1d_backward.default: nearest_backward,
    aten._upsample_nearest_exact2d_backward.default: nearest_backward,
    aten._upsample_nearest_exact3d_backward.default: nearest_backward,
    aten.replication_pad1d_backward.default: replication_pad_backward,
    aten.replication_pad2d_backward.default: replication_pad_backward,
    aten.replication_pad3d_backward.default: replication_pad_backward,
}
