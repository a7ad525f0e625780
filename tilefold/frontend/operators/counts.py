"""Counting, as routing does it: histograms with a bin for each whole number, and running sums and products of few
integers (a running product of truths says how many hold from the first on); on a GPU also running sums of few floats
(decays within a chunk).

    histc   out[b] = sum over i of (x[i] == min + b)
    cumsum  out[.., k, ..] = sum over j of x[.., j, ..] where j <= k
    cumprod the same of products

All read each element once for every bin or place, so they are reductions only where those are few. Integers come to
the same in any order. A running sum of floats is added in an order of its own for each place, in float32 at least, as a
GPU's scan does; of a CPU, and of products, they keep eager's, and are left to others: where a scan is left, the program
is cut in two, and what is around it is written.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, meta_of, weave
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.tensor.index_simplify import const, is_one
from tilefold.tensor.sizes import estimate

aten = torch.ops.aten
#: Bins of a histogram, and places of a running sum, at most.
MOST_BINS, MOST_PLACES = 256, 64
#: Terms that running sums of floats have, at most: some microseconds of a GPU's vector units, as a kernel more takes.
MOST_TERMS = 1 << 24


def histc(ctx: Context, node: torch.fx.Node) -> Value:
    """Of whole numbers, also as floats, with as many bins as there are between `min` and `max`: each has its own."""
    a = attrs(node)
    x, (shape, dtype) = ctx.value(a["self"]), meta_of(node)
    bins, least, most = ctx.static_int(a["bins"], "bins of histc"), float(a["min"]), float(a["max"])  # type: ignore[arg-type]
    if not (_is_whole(a["self"]) and least.is_integer() and most - least == bins - 1 > 0 and bins <= MOST_BINS):
        raise UnsupportedError(f"{ctx.origin} of other than whole numbers with a bin for each, {MOST_BINS} at most")

    def at(i: Indices, r: Indices) -> Expr:
        found = call("eq", Cast(x.at(r), DType.I64), call("add", i[0], const(int(least))))
        return call("where", found, Const(1, DType.I64), Const(0, DType.I64))

    counted = ctx.reduce("sum", shape, x.shape, DType.I64, at, f"{ctx.base}_count")
    return ctx.map(shape, dtype, counted.at)


def _is_whole(x: object) -> bool:
    """Whether a tensor has integers, or floats that were integers."""
    while isinstance(x, torch.fx.Node) and x.meta["val"].dtype.is_floating_point and x.target is aten._to_copy.default:
        x = x.args[0]
    if not isinstance(x, torch.fx.Node):
        return False
    dtype = x.meta["val"].dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def running(fold: Literal["sum", "prod"]) -> Lowerer:
    """Running sums, or products."""
    return lambda ctx, node: _running(ctx, node, fold)


def _running(ctx: Context, node: torch.fx.Node, fold: Literal["sum", "prod"]) -> Value:
    a = attrs(node)
    x, (shape, dtype) = ctx.value(a["self"]), meta_of(node)
    floats = dtype.is_float
    if not shape or (floats and (fold != "sum" or node.meta["val"].device.type != "cuda")):
        raise UnsupportedError(f"{ctx.origin} is covered for integers only")  # elements are converted first
    axis = int(a["dim"]) % len(shape)  # type: ignore[call-overload]
    extent = shape[axis]
    if not isinstance(extent, Const) or int(extent.value) > MOST_PLACES:
        raise UnsupportedError(f"{ctx.origin} over more than {MOST_PLACES} places, or a number that is not known")
    if floats and math.prod(map(estimate, (*shape, extent))) > MOST_TERMS:
        raise UnsupportedError(f"{ctx.origin} of floats with more than {MOST_TERMS} terms")
    kind = dtype.compute if floats else DType.I64
    neutral = Const(float(fold == "prod") if floats else int(fold == "prod"), kind)
    if is_one(extent):
        return ctx.map(shape, dtype, lambda i: Cast(x.at(i), kind))

    def at(i: Indices, r: Indices) -> Expr:
        before = weave((axis,), (*i[:axis], *i[axis + 1 :]), r)
        return call("where", call("le", r[0], i[axis]), Cast(x.at(before), kind), neutral)

    folded = ctx.reduce(fold, shape, (extent,), kind, at, f"{ctx.base}_{fold}")
    return ctx.map(shape, dtype, folded.at)


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.histc.default: histc,
    aten.cumsum.default: running("sum"),
    aten.cumprod.default: running("prod"),
}
