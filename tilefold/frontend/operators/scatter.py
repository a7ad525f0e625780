"""Scatters that are comparisons: along an axis of which the index has few elements.

    out[.., j, ..] = src[.., 0, ..] if j = index[.., 0, ..] else x[.., j, ..]

So are the gradients of a maximum, minimum or median of an axis, and of a loss at labels, and what the best two of a row
of experts are marked with: every place asks whether it is one, nothing is written at indices, and the result is a map
that its readers take in. Of elements at the same place the last stands, as in eager on a CPU (on a GPU one of them).
Others are left, but for one number at so many places that a GPU compares all sooner than another kernel begins.
"""

from __future__ import annotations

from functools import reduce
from math import prod

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, meta_of, normal_axis
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.frontend.operators.index import checker
from tilefold.frontend.operators.keyed_sums import scatter_add
from tilefold.plan.keyed import LOOKED
from tilefold.tensor.index_simplify import const, is_one

aten = torch.ops.aten
#: Elements a row that are compared one after the other.
FEW = 8
#: Seconds that two more kernels take: a copy of what is written to, and the writes.
BEGUN = 4e-6


def scatter(ctx: Context, node: torch.fx.Node) -> Value:
    """`src` (or `value`) at the index, x elsewhere; for `scatter_add` their sum there."""
    a = attrs(node)
    x, index = ctx.value(a["self"]), ctx.value(a["index"])
    shape, dtype = meta_of(node)
    if not shape:
        raise UnsupportedError("a scatter into a number")
    axis = normal_axis(int(a["dim"]), len(shape))  # type: ignore[call-overload]
    others = zip(index.shape[:axis] + index.shape[axis + 1 :], shape[:axis] + shape[axis + 1 :], strict=True)
    if not is_one(index.shape[axis]) and node.target is aten.scatter_add.default:
        return scatter_add(ctx, node)
    if any(n != m for n, m in others):
        raise UnsupportedError("a scatter to a part of a tensor")
    several = index.shape[axis]
    count = int(several.value) if isinstance(several, Const) else 0
    few = 0 < count <= FEW
    if not few and ("src" in a or not _soon(node, count)):
        raise UnsupportedError("a scatter of many elements a row")
    given, check = ctx.value(a["src"] if "src" in a else a["value"]), checker()

    def hit(i: Indices, k: Expr) -> Expr:
        return call("eq", i[axis], check(index.at((*i[:axis], k, *i[axis + 1 :])), shape[axis]))

    def operand(v: Value, i: Indices) -> Expr:
        return ctx.operand(Value((), v.dtype, lambda _: v.at(i)), (), dtype)

    def values(i: Indices) -> Expr:
        e = operand(x, i)
        for k in map(const, range(count)):
            v = operand(given, (*i[:axis], k, *i[axis + 1 :]))
            e = call("where", hit(i, k), call("add", e, v) if node.target is aten.scatter_add.default else v, e)
        return e

    def number(i: Indices) -> Expr:
        each = (hit(i, const(k)) for k in range(count))
        here = marked.at(i) if marked else reduce(lambda p, q: call("or", p, q), each)
        return call("where", here, operand(given, ()), operand(x, i))

    if "src" in a:
        return ctx.map(shape, dtype, values)
    marked = None if few else ctx.reduce("any", shape, (several,), DType.BOOL, lambda i, k: hit(i, k[0]))
    return ctx.map(shape, dtype, number)


def _soon(node: torch.fx.Node, count: int) -> bool:
    """Whether a GPU compares every place with all that its row names in less time than others take to begin."""
    val = node.meta["val"]
    known = count > 0 and all(isinstance(n, int) for n in val.shape)
    return known and val.device.type == "cuda" and prod(val.shape) * count < LOOKED * BEGUN


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter_add.default: scatter,
}
