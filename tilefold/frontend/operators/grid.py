"""Images that are read at the places of a grid: what `grid_sample` computes, in two dimensions.

    out[n, c, h, w] = sum over i, j of wy[i] wx[j] x[n, c, iy + i, ix + j]        ix, iy: whole parts of the places

Of the nearest element, or of two along each axis. An element outside of the image counts as 0, or
is the nearest or the mirrored one of the image. Every position is brought into the image before it is read, so that
none is checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, call, lit
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, meta_of
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.tensor.index_simplify import const, simplify

aten = torch.ops.aten
_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of the image, and how what lies outside of it is read. size: the extent as a float."""

    extent: Expr
    size: Expr
    padding: int
    corners: bool

    @property
    def last(self) -> Expr:
        return simplify(self.extent - 1, {})

    def place(self, g: Expr) -> Expr:
        """Where -1 .. 1 of the grid is, in elements: the centre of the first is at 0."""
        if self.corners:
            return (g + 1.0) * ((self.size - 1.0) * 0.5)
        return (g + 1.0) * (self.size * 0.5) - 0.5

    def inside(self, x: Expr) -> Expr:
        """The place of the image that stands for one: itself where elements outside are 0. That of NaN is the first."""
        if self.padding == _ZEROS:
            return x
        if self.padding == _REFLECTION:
            x = self._mirrored(x)
        return call("where", call("gt", x, 0.0), call("minimum", x, self.size - 1.0), 0.0)

    def _mirrored(self, x: Expr) -> Expr:
        """By the centres of the first and the last element, or by their outer borders: 0 .. n .. 0, n the span."""
        low = 0.0 if self.corners else -0.5
        span = call("maximum", self.size - 1.0, 1.0) if self.corners else self.size
        away = call("abs", x - low)
        turn = away - call("floor", away / (span * 2.0)) * (span * 2.0)
        return call("minimum", turn, span * 2.0 - turn) + low

    def element(self, whole: Expr) -> tuple[Expr, Expr]:
        """The position of an element that exists, and whether it is the one of that whole number."""
        near = call("maximum", call("minimum", whole, self.size - 1.0), 0.0)  # of 32 bits, where it is a number
        position = call("minimum", call("maximum", Cast(near, DType.I64), const(0)), self.last)
        return position, call("and", call("ge", whole, 0.0), call("lt", whole, self.size))


def _taps(axis: _Axis, g: Expr, mode: int) -> list[tuple[Expr, Expr, Expr]]:
    """What is read along an axis: positions, whether each counts, weights."""
    x = axis.place(g)
    x = axis.inside(x)
    if mode == _NEAREST:
        return [(*axis.element(call("round", x)), lit(1.0))]
    first = call("floor", x)
    return [(*axis.element(first), first + 1.0 - x), (*axis.element(first + 1.0), x - first)]


def grid_sampler_2d(ctx: Context, node: torch.fx.Node) -> Value:
    """x [N, C, H, W] at grid [N, h, w, 2], whose pairs are along W and along H."""
    a, (shape, dtype) = attrs(node), meta_of(node)
    x, grid = ctx.value(a["input"]), ctx.value(a["grid"])
    mode, padding = (int(a[k]) for k in ("interpolation_mode", "padding_mode"))  # type: ignore[call-overload]
    ct = dtype.compute
    if node.meta["val"].device.type == "cuda":
        # every channel reads sectors of its own at places without order: 480 us by forecast, of a call of torch's 280
        raise UnsupportedError(f"{ctx.origin} on a GPU: a kernel of PyTorch's reads a channel's plane from a cache")
    if mode == _BICUBIC:
        raise UnsupportedError(f"{ctx.origin} of 16 elements, each with bounds of its own")

    def axis(n: int) -> _Axis:
        extent = x.shape[n]
        size = lit(float(extent.value)) if isinstance(extent, Const) else Cast(extent, ct)
        return _Axis(extent, size, padding, bool(a["align_corners"]))

    width, height = axis(3), axis(2)

    def at(i: Indices) -> Expr:
        n, c, h, w = i
        along, down = (
            _taps(s, ctx.operand(grid, (n, h, w, const(k)), ct), mode) for k, s in enumerate((width, height))
        )
        total: Expr | None = None
        for iy, is_row, wy in down:
            for ix, is_column, wx in along:
                e, counts = ctx.operand(x, (n, c, iy, ix), ct), call("and", is_row, is_column)
                e = call("where", counts, e, 0.0)
                e = e if mode == _NEAREST else e * (wx * wy)
                total = e if total is None else total + e
        assert total is not None
        return total

    return ctx.map(shape, dtype, at)


TABLE: dict[torch._ops.OpOverload, Lowerer] = {aten.grid_sampler_2d.default: grid_sampler_2d}
