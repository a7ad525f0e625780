"""Reductions. Means divide by `size(dim)`, so that the algebra sees a mean and not a constant;
variances are centred (the mean first, then the sum of squared distances), never E[x^2] - E[x]^2."""

from __future__ import annotations

import math

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, Index, Load, Size, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, keep_axes, meta_of, reduced, weave
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.tensor.index_simplify import const, is_one

aten = torch.ops.aten


def axes_of(a: object) -> list[int] | None:
    """The `dim` argument of a reduction as a list, None for all axes."""
    if a is None:
        return None
    return [a] if isinstance(a, int) else [int(n) for n in a] or None  # type: ignore[attr-defined]


def reduce_value(
    ctx: Context,
    reducer: str,
    x: Value,
    axes: list[int] | None,
    dtype: DType,
    *,
    body: object = None,
    name: str = "",
) -> Value:
    """Reduce over axes (removed from the result); `body` maps an element and its indices."""
    gone, kept, over = reduced(axes, x.shape)

    def at(i: Indices, r: Indices) -> Expr:
        where = weave(gone, i, r)
        return x.at(where) if body is None else body(x.at(where), where)  # type: ignore[operator]

    return ctx.reduce(reducer, kept, over, dtype, at, name)


def simple(reducer: str) -> Lowerer:
    """sum, prod, amax, amin: one reduction."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        a = attrs(node)
        x = ctx.value(a["self"])
        shape, dtype = meta_of(node)
        axes = axes_of(a.get("dim"))
        gone, _, _ = reduced(axes, x.shape)

        def body(e: Expr, _: Indices) -> Expr:
            return _as_sum_type(ctx, e, dtype) if reducer in ("sum", "prod") else e

        out = reduce_value(ctx, reducer, x, axes, dtype, body=body)
        return keep_axes(out, gone, len(shape) != len(x.shape) - len(gone))

    return lower


def _as_sum_type(ctx: Context, e: Expr, dtype: DType) -> Expr:
    """An element in the type it is summed in (`dtype=` of sum and prod)."""
    want = dtype.compute if dtype.is_float else DType.I64
    return e if ctx.type_of(e) is want else Cast(e, want)


def count_of(dims: tuple[str, ...]) -> Expr:
    """Number of elements reduced: the product of `size(dim)`; 1 where nothing is reduced."""
    out: Expr | None = None
    for d in dims:
        out = Size(d) if out is None else call("mul", out, Size(d))
    return const(1) if out is None else out


def total(ctx: Context, x: Value, axes: list[int] | None, dtype: DType, name: str) -> tuple[Value, Expr]:
    """Sum over axes, and the count of elements as an expression over the dims it was reduced over."""
    out = reduce_value(ctx, "sum", x, axes, dtype, body=lambda e, _: _as_sum_type(ctx, e, dtype), name=name)
    _, _, over = reduced(axes, x.shape)
    if all(is_one(s) for s in over):
        return out, const(1)
    return out, count_of(ctx.body[-1].rdims)


def mean_value(ctx: Context, x: Value, axes: list[int] | None, dtype: DType, name: str = "") -> Value:
    """sum / count."""
    base = name or ctx.base
    s, n = total(ctx, x, axes, dtype.compute, f"{base}_sum")
    if n == const(1):
        return s
    return ctx.map(s.shape, dtype, lambda i: call("div", s.at(i), n), base)


def mean(ctx: Context, node: torch.fx.Node) -> Value:
    a = attrs(node)
    x = ctx.value(a["self"])
    shape, dtype = meta_of(node)
    axes = axes_of(a.get("dim"))
    gone, _, _ = reduced(axes, x.shape)
    return keep_axes(mean_value(ctx, x, axes, dtype), gone, len(shape) != len(x.shape) - len(gone))


def centred(ctx: Context, x: Value, axes: list[int] | None, mean: Value, name: str) -> tuple[Value, Expr]:
    """Sum of squared distances from a mean that lacks the reduced axes, and the count.

    sum (x - m)^2 - (sum (x - m))^2 / n: the second term is what m's own rounding adds (Chan, Golub, LeVeque 1983,
    eq. 1.7), a part in 10^5 where values are 10^5 times their spread. Values of 16 bits never are: they go without.
    """
    gone, _, over = reduced(axes, x.shape)

    def distance(e: Expr, where: Indices) -> Expr:
        return e - mean.at(tuple(i for n, i in enumerate(where) if n not in gone))

    def square(e: Expr, where: Indices) -> Expr:
        d = distance(e, where)
        return d * d

    dtype, alone = mean.dtype, all(is_one(s) for s in over)
    narrow = alone or x.dtype.nbytes < DType.F32.nbytes
    rest = None if narrow else reduce_value(ctx, "sum", x, axes, dtype, body=distance, name=f"{name}_rest")
    out = reduce_value(ctx, "sum", x, axes, dtype, body=square, name=name)
    n = const(1) if alone else count_of(ctx.body[-1].rdims)
    if rest is None:
        return out, n

    def settled(i: Indices) -> Expr:
        r = rest.at(i)
        added = call("div", r * r, n)
        return call("maximum", call("where", call("lt", added, math.inf), out.at(i) - added, out.at(i)), 0.0)

    return ctx.map(out.shape, dtype, settled, f"{name}_settled"), n


def variance_parts(ctx: Context, node: torch.fx.Node) -> tuple[Value, Value, tuple[int, ...], bool]:
    """(variance, mean), both without the reduced axes and in arithmetic type; reduced axes; keepdim."""
    a = attrs(node)
    x = ctx.value(a["self"])
    axes = axes_of(a.get("dim"))
    gone, _, over = reduced(axes, x.shape)
    ct = x.dtype.compute
    mean = mean_value(ctx, x, axes, ct, f"{ctx.base}_mean")
    squares, n = centred(ctx, x, axes, mean, f"{ctx.base}_squares")
    correction = 1 if a.get("correction") is None else a["correction"]
    if not isinstance(correction, int | float):
        raise UnsupportedError(f"{ctx.origin}: the correction must be a number")
    count = _corrected(n, over, correction)
    var = ctx.map(squares.shape, ct, lambda i: call("div", squares.at(i), count), f"{ctx.base}_var")
    return var, mean, gone, bool(a.get("keepdim", False))


def _corrected(n: Expr, over: tuple[Expr, ...], correction: int | float) -> Expr:
    """max(0, count - correction), without the max where it cannot matter."""
    if correction == 0:
        return n
    e = n - (int(correction) if float(correction).is_integer() else float(correction))
    known = [s.value for s in over if isinstance(s, Const)]
    if len(known) == len(over) and math.prod(known) > correction:
        return e
    return call("maximum", e, 0)


def var(ctx: Context, node: torch.fx.Node) -> Value:
    v, _, gone, keepdim = variance_parts(ctx, node)
    return keep_axes(_as(ctx, v, meta_of(node)[1]), gone, keepdim)


def std(ctx: Context, node: torch.fx.Node) -> Value:
    v, _, gone, keepdim = variance_parts(ctx, node)
    dtype = meta_of(node)[1]
    return keep_axes(ctx.map(v.shape, dtype, lambda i: call("sqrt", v.at(i))), gone, keepdim)


def var_mean(ctx: Context, node: torch.fx.Node) -> tuple[Value, ...]:
    v, m, gone, keepdim = variance_parts(ctx, node)
    dtype = meta_of(node, 0)[1]
    return tuple(keep_axes(_as(ctx, part, dtype), gone, keepdim) for part in (v, m))


def _as(ctx: Context, v: Value, dtype: DType) -> Value:
    """A value in another dtype."""
    return v if v.dtype is dtype else ctx.map(v.shape, dtype, v.at)


def any_all(reducer: str) -> Lowerer:
    """any, all: of `x != 0`."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        a = attrs(node)
        x = ctx.value(a["self"])
        shape, dtype = meta_of(node)
        axes = axes_of(a.get("dim", a.get("dims")))
        gone, _, _ = reduced(axes, x.shape)

        def body(e: Expr, _: Indices) -> Expr:
            return e if x.dtype is DType.BOOL else call("ne", e, 0)

        out = reduce_value(ctx, reducer, x, axes, dtype, body=body)
        return keep_axes(out, gone, len(shape) != len(x.shape) - len(gone))

    return lower


def extreme(reducer: str) -> Lowerer:
    """max and min: of everything, or along an axis with the index."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value | tuple[Value, ...]:
        a = attrs(node)
        x = ctx.value(a["self"])
        if a.get("dim") is None:
            return reduce_value(ctx, reducer, x, None, meta_of(node)[1])
        axes = axes_of(a["dim"])
        gone, _, _ = reduced(axes, x.shape)
        keep = bool(a["keepdim"])
        best = reduce_value(ctx, reducer, x, axes, meta_of(node, 0)[1], name=f"{ctx.base}_values")
        at = reduce_value(ctx, f"arg{reducer}", _numbers(x), axes, DType.I64, name=f"{ctx.base}_indices")
        return keep_axes(best, gone, keep), keep_axes(at, gone, keep)

    return lower


def _numbers(x: Value) -> Value:
    """Truth values as integers: no back end orders them."""
    return Value(x.shape, DType.I64, lambda i: Cast(x.at(i), DType.I64)) if x.dtype is DType.BOOL else x


def arg_extreme(reducer: str) -> Lowerer:
    """argmax, argmin: ties to the lowest index, NaN wins; over all axes the flat index."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        a = attrs(node)
        x = ctx.value(a["self"])
        axes = axes_of(a["dim"])
        gone, _, _ = reduced(axes, x.shape)
        out = reduce_value(ctx, reducer, _numbers(x), axes, DType.I64)
        return keep_axes(out, gone, bool(a["keepdim"]))

    return lower


def vector_norm(ctx: Context, node: torch.fx.Node) -> Value:
    """(sum |x|^p)^(1/p), its limits for p = 0, inf and -inf, and sqrt(sum x^2) for p = 2."""
    a = attrs(node)
    x = ctx.value(a["self"])
    shape, dtype = meta_of(node)
    order = a["ord"] if "ord" in a else a["p"]
    p = 2.0 if order is None else float(order)  # type: ignore[arg-type]
    axes = axes_of(a.get("dim"))
    gone, _, _ = reduced(axes, x.shape)
    ct = dtype.compute
    reducer = {math.inf: "max", -math.inf: "min"}.get(p, "sum")

    def body(e: Expr, _: Indices) -> Expr:
        e = e if ctx.type_of(e) is ct else Cast(e, ct)
        if p == 2:
            return e * e
        if p == 0:
            return call("where", call("ne", e, 0), 1.0, 0.0)
        size = call("abs", e)
        return size if p in (1.0, math.inf, -math.inf) else call("pow", size, p)

    plain = p in (0.0, 1.0, math.inf, -math.inf)
    s = reduce_value(ctx, reducer, x, axes, dtype if plain else ct, body=body, name="" if plain else f"{ctx.base}_sum")
    if not plain:
        total = s

        def root(i: Indices) -> Expr:
            return call("sqrt", total.at(i)) if p == 2 else call("pow", total.at(i), 1 / p)

        s = ctx.map(total.shape, dtype, root)
    return keep_axes(s, gone, len(shape) != len(x.shape) - len(gone))


def logsumexp(ctx: Context, node: torch.fx.Node) -> Value:
    """log(sum exp(x - m)) + m with m = max, 0 where that is infinite (as torch does)."""
    a = attrs(node)
    x = ctx.value(a["self"])
    shape, dtype = meta_of(node)
    axes = axes_of(a["dim"])
    gone, _, _ = reduced(axes, x.shape)
    ct = dtype.compute
    top = reduce_value(ctx, "max", x, axes, ct, name=f"{ctx.base}_max")

    def shift(i: Indices) -> Expr:
        m = top.at(i)
        return call("where", call("eq", call("abs", m), math.inf), 0.0, m)

    def body(e: Expr, where: Indices) -> Expr:
        return call("exp", e - shift(tuple(i for n, i in enumerate(where) if n not in gone)))

    s = reduce_value(ctx, "sum", x, axes, ct, body=body, name=f"{ctx.base}_sum")
    out = ctx.map(s.shape, dtype, lambda i: call("log", s.at(i)) + shift(i))
    return keep_axes(out, gone, len(shape) != len(x.shape) - len(gone))


def topk(ctx: Context, node: torch.fx.Node) -> tuple[Value, ...]:
    """Values and indices, best first. The smallest are the largest negated; NaN counts as largest."""
    a = attrs(node)
    x = ctx.value(a["self"])
    k = ctx.static_int(a["k"], "k of topk")
    axis = int(a["dim"]) % max(1, len(x.shape))  # type: ignore[call-overload]
    shape, dtype = meta_of(node, 0)
    largest = bool(a["largest"])
    if not x.shape or is_one(x.shape[axis]) or k == 0:
        raise UnsupportedError("topk of a scalar, of an axis of extent 1 or of no elements")
    kept = (*x.shape[:axis], *x.shape[axis + 1 :])
    dims, idx = ctx.indices(kept)
    rdim, slot = ctx.dim(x.shape[axis]), ctx.dim(const(k))
    e = x.at((*idx[:axis], Index(rdim), *idx[axis:]))
    key = e if largest else _descending(dtype, e)
    values, indices = ctx.emit_topk((*dims, slot), dtype, key, rdim)

    def stored(name: str, t: DType) -> Value:
        held = [n for n, extent in enumerate(kept) if not is_one(extent)]

        def rows(i: Indices) -> Expr:
            rest = (*i[:axis], *i[axis + 1 :])
            return Load(name, tuple(ctx.simplify(e) for e in (*(rest[n] for n in held), i[axis])))

        return Value(shape, t, rows)

    at = stored(indices, DType.I64)
    if largest:
        return stored(values, dtype), at
    picked = ctx.map(shape, dtype, lambda i: x.at((*i[:axis], at.at(i), *i[axis + 1 :])), f"{ctx.base}_values")
    return picked, at


def _descending(dtype: DType, e: Expr) -> Expr:
    return call("where", call("isnan", e), -math.inf, -e) if dtype.is_float else -e


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.sum.default: simple("sum"),
    aten.sum.dim_IntList: simple("sum"),
    aten.prod.default: simple("prod"),
    aten.prod.dim_int: simple("prod"),
    aten.amax.default: simple("max"),
    aten.amin.default: simple("min"),
    aten.mean.default: mean,
    aten.mean.dim: mean,
    aten.var.correction: var,
    aten.std.correction: std,
    aten.var_mean.correction: var_mean,
    aten.any.default: any_all("any"),
    aten.any.dim: any_all("any"),
    aten.any.dims: any_all("any"),
    aten.all.default: any_all("all"),
    aten.all.dim: any_all("all"),
    aten.all.dims: any_all("all"),
    aten.max.default: extreme("max"),
    aten.max.dim: extreme("max"),
    aten.min.default: extreme("min"),
    aten.min.dim: extreme("min"),
    aten.argmax.default: arg_extreme("argmax"),
    aten.argmin.default: arg_extreme("argmin"),
    aten.linalg_vector_norm.default: vector_norm,
    aten.norm.ScalarOpt_dim: vector_norm,
    aten.norm.Scalar: vector_norm,
    aten.logsumexp.default: logsumexp,
    aten.topk.default: topk,
}
