"""Indexing by tensors: gather, index, embedding, and the label selection of cross entropy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilefold import config
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, broadcast, meta_of, normal_axis
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.frontend.operators.reduce import reduce_value

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2
#: An index that data chose and the extent of its axis, to the index that is read.
Check = Callable[[Expr, Expr], Expr]


def unchecked(e: Expr, extent: Expr) -> Expr:
    """The index as it is: back ends clamp what they cannot prove to be inside."""
    return e


def checked(e: Expr, extent: Expr) -> Expr:
    """The index, an error where it does not exist, as eager's."""
    return call("within", e, extent)


def checker() -> Check:
    """`checked`, unless the user left it out."""
    return checked if config.load().index_checks else unchecked


def embedding(ctx: Context, node: torch.fx.Node) -> Value:
    """weight[ids, :]."""
    a = attrs(node)
    w, ids = ctx.value(a["weight"]), ctx.value(a["indices"])
    shape, dtype = meta_of(node)
    check = checker()
    return ctx.map(shape, dtype, lambda i: w.at((check(ids.at(i[:-1]), w.shape[0]), i[-1])))


def gather(ctx: Context, node: torch.fx.Node) -> Value:
    """x[.., index[i], ..] along one axis."""
    a = attrs(node)
    x, index = ctx.value(a["self"]), ctx.value(a["index"])
    shape, dtype = meta_of(node)
    check = checker()
    if not shape:
        return ctx.map(shape, dtype, lambda i: x.at(()) if not x.shape else x.at((check(index.at(()), x.shape[0]),)))
    axis = normal_axis(int(a["dim"]), len(shape))  # type: ignore[call-overload]
    return ctx.map(shape, dtype, lambda i: x.at((*i[:axis], check(index.at(i), x.shape[axis]), *i[axis + 1 :])))


def index_select(ctx: Context, node: torch.fx.Node) -> Value:
    """Rows of an axis picked by a vector."""
    a = attrs(node)
    x, index = ctx.value(a["self"]), ctx.value(a["index"])
    shape, dtype = meta_of(node)
    if not shape:
        return x
    axis = normal_axis(int(a["dim"]), len(shape))  # type: ignore[call-overload]
    check = checker()

    def at(i: Indices) -> Expr:
        pick = index.at((i[axis],)) if index.shape else index.at(())
        return x.at((*i[:axis], check(pick, x.shape[axis]), *i[axis + 1 :]))

    return ctx.map(shape, dtype, at)


def index(ctx: Context, node: torch.fx.Node) -> Value:
    """Advanced indexing by integer tensors: their broadcast axes go where the first stands, or in front
    where they are not adjacent. Negative indices wrap."""
    a = attrs(node)
    x = ctx.value(a["self"])
    given = a["indices"]
    assert isinstance(given, list | tuple)
    picks = {n: ctx.value(v) for n, v in enumerate(given) if v is not None}
    if any(p.dtype is DType.BOOL or p.dtype is DType.U8 for p in picks.values()):
        raise UnsupportedError("indexing by a mask has a data-dependent shape")
    shape, dtype = meta_of(node)
    rank = max(len(p.shape) for p in picks.values())
    axes = sorted(picks)
    adjacent = axes == list(range(axes[0], axes[0] + len(axes)))
    first = axes[0] if adjacent else 0
    check = checker()

    def at(i: Indices) -> Expr:
        chosen = i[first : first + rank]
        rest = list((*i[:first], *i[first + rank :]))
        where = [
            check(wrapped(broadcast(picks[n], chosen), s), s) if n in picks else rest.pop(0)
            for n, s in enumerate(x.shape)
        ]
        return x.at(tuple(where))

    return ctx.map(shape, dtype, at)


def wrapped(e: Expr, extent: Expr) -> Expr:
    """A negative index counts from the end."""
    return call("where", call("lt", e, 0), e + extent, e)


def nll_loss(ctx: Context, node: torch.fx.Node) -> tuple[Value, ...]:
    """-w[t] x[t] for labels t that are not ignored, and the total weight (torch's second result)."""
    a = attrs(node)
    x, target = ctx.value(a["self"]), ctx.value(a["target"])
    w = None if a["weight"] is None else ctx.value(a["weight"])
    ignore, reduction = ctx.static_int(a["ignore_index"], "ignore_index"), ctx.static_int(a["reduction"], "reduction")
    dtype = meta_of(node, 0)[1]
    ct = dtype.compute

    check = checker()

    def kept(i: Indices) -> Expr:
        return call("ne", target.at(i), ignore)

    def label(i: Indices) -> Expr:
        t = target.at(i)
        return t if check is unchecked else check(call("where", kept(i), t, 0), x.shape[-1])

    def weight(i: Indices) -> Expr:
        return call("where", kept(i), 1.0 if w is None else w.at((label(i),)), 0.0)

    def loss(i: Indices) -> Expr:
        e = -x.at((*i, label(i)))
        e = e if w is None else e * w.at((label(i),))
        return call("where", kept(i), e, 0.0)

    if reduction == _NONE:
        zero = ctx.constant(0, dtype)
        return ctx.map(target.shape, dtype, loss), Value((), dtype, lambda _: zero)
    losses = Value(target.shape, ct, loss)
    weights = Value(target.shape, ct, weight)
    total = reduce_value(ctx, "sum", losses, None, ct, name=f"{ctx.base}_sum")
    count = reduce_value(ctx, "sum", weights, None, ct, name=f"{ctx.base}_weight")
    out = total if reduction == _SUM else ctx.map((), dtype, lambda _: total.at(()) / count.at(()))
    return _narrow(ctx, out, dtype), _narrow(ctx, count, dtype)


def _narrow(ctx: Context, v: Value, dtype: DType) -> Value:
    return v if v.dtype is dtype else ctx.map(v.shape, dtype, v.at)


def nll_loss_backward(ctx: Context, node: torch.fx.Node) -> Value:
    """-w[t] g at the label, 0 elsewhere and for ignored rows; g over the total weight for the mean."""
    a = attrs(node)
    g, target = ctx.value(a["grad_output"]), ctx.value(a["target"])
    w = None if a["weight"] is None else ctx.value(a["weight"])
    total = ctx.value(a["total_weight"])
    ignore, reduction = ctx.static_int(a["ignore_index"], "ignore_index"), ctx.static_int(a["reduction"], "reduction")
    shape, dtype = meta_of(node)

    def at(i: Indices) -> Expr:
        t = target.at(i[:-1])
        e = g.at(i[:-1]) if reduction == _NONE else g.at(())
        e = e / total.at(()) if reduction == _MEAN else e
        e = e if w is None else e * w.at((t,))
        hit = call("and", call("eq", i[-1], t), call("ne", t, ignore))
        return call("where", hit, -e, 0.0)

    return ctx.map(shape, dtype, at)


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.embedding.default: embedding,
    aten.gather.default: gather,
    aten.index_select.default: index_select,
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: index,
    aten.nll_loss_forward.default: nll_loss,
    aten.nll_loss_backward.default: nll_loss_backward,
}
