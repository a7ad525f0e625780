"""Scatters that are comparisons: along an axis of which the index has one element.

    out[.., j, ..] = src[..] if j = index[..] else x[.., j, ..]

So are the gradients of a maximum, minimum or median of an axis, and of a loss at labels: every place asks whether it is
the one, nothing is written at indices, and the result is a map that its readers take in. Others are left.
"""

from __future__ import annotations

import torch

from tilefold.algebra.expr import Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, meta_of, normal_axis
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.frontend.operators.index import checker
from tilefold.frontend.operators.keyed_sums import scatter_add
from tilefold.tensor.index_simplify import const, is_one

aten = torch.ops.aten


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
    if not is_one(index.shape[axis]) or any(n != m for n, m in others):
        raise UnsupportedError("a scatter of more than one element a row")
    given = ctx.value(a["src"] if "src" in a else a["value"])
    check, added = checker(), node.target is aten.scatter_add.default

    def at(i: Indices) -> Expr:
        one = (*i[:axis], const(0), *i[axis + 1 :])
        hit = call("eq", i[axis], check(index.at(one), shape[axis]))
        e = ctx.operand(Value((), given.dtype, lambda _: given.at(one if given.shape else ())), (), dtype)
        own = ctx.operand(Value((), x.dtype, lambda _: x.at(i)), (), dtype)
        return call("where", hit, call("add", own, e) if added else e, own)

    return ctx.map(shape, dtype, at)


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter_add.default: scatter,
}
