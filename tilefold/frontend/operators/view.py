"""Views and rearrangements: index arithmetic only, no statement is emitted.

`cat` is a chain of `where` over its pieces; a piece is read out of range only where the
chain discards it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilefold.algebra.expr import Const, Expr, call
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators import sizes as fx_sizes
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, broadcast, meta_of, normal_axis
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.tensor.index_simplify import const, divide, is_one, nonnegative, poly, product, same

aten = torch.ops.aten
prims = torch.ops.prims


def alias(ctx: Context, node: torch.fx.Node) -> Value:
    """The same elements: clone, contiguous, detach, alias."""
    return ctx.value(node.args[0])


def as_strided(ctx: Context, node: torch.fx.Node) -> Value:
    """Elements by their place in memory: the same under other strides of axes of extent 1 (an image of one place, said
    to be channels-last), or any of a tensor whose memory they are, row after row (Longformer's overlapping chunks).

    out[i, j, ..] = x[divided by its extents: offset + i * strides[0] + j * strides[1] + ..]
    """
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    size, strides = node.args[1], node.args[2]
    offset = node.args[3] if len(node.args) > 3 else None
    moving = [n for n, e in enumerate(fx_sizes.shape(x.shape)) if not is_one(e)]
    same_place = offset is None or offset == x.storage_offset()
    if same_place and list(size) == list(x.shape) and all(strides[n] == x.stride(n) for n in moving):  # type: ignore
        return ctx.value(node.args[0])
    if not _whole_memory(x):
        raise UnsupportedError("a view by strides, of memory that is not the tensor's own or in other order")
    given = ctx.value(node.args[0])
    flat = reshaped(ctx, given, (product(list(given.shape)),))
    steps = [ctx.int_arg(s) for s in strides]  # type: ignore[union-attr]
    first = const(0) if offset is None else ctx.int_arg(offset)

    def at(i: Indices) -> Expr:
        place = first
        for e, step in zip(i, steps, strict=True):
            place = place + e * step
        return flat.at((ctx.simplify(place),))

    return Value(meta_of(node)[0], given.dtype, at)


def _whole_memory(x: torch.Tensor) -> bool:
    """Whether a tensor's elements are all that is in its memory, in order: a place in one is a place in the other."""
    bytes_of_all = x.numel() * x.element_size()
    return x.is_contiguous() and x.storage_offset() == 0 and x.untyped_storage().nbytes() == bytes_of_all


def reshape(ctx: Context, node: torch.fx.Node) -> Value:
    """Same elements in row-major order; the new shape is read off the node's metadata."""
    shape, _ = meta_of(node)
    return reshaped(ctx, ctx.value(node.args[0]), shape)


def reshaped(ctx: Context, x: Value, shape: tuple[Expr, ...]) -> Value:
    """Row-major reshape, group by group of axes with equal products."""
    groups = _groups(x.shape, shape)

    def at(i: Indices) -> Expr:
        out: list[Expr] = [const(0)] * len(x.shape)
        for old, new in groups:
            for axis, e in zip(
                old, _relate(ctx, [x.shape[n] for n in old], [(shape[n], i[n]) for n in new]), strict=True
            ):
                out[axis] = e
        return x.at(tuple(out))

    return Value(shape, x.dtype, at)


def _groups(old: tuple[Expr, ...], new: tuple[Expr, ...]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of axes whose extents have equal products; axes of extent 1 belong to none."""
    a = [n for n, s in enumerate(old) if not is_one(s)]
    b = [n for n, s in enumerate(new) if not is_one(s)]
    out: list[tuple[list[int], list[int]]] = []
    while a and b:
        left, right = [a.pop(0)], [b.pop(0)]
        while not same(product([old[n] for n in left]), product([new[n] for n in right])):
            p, q = poly(product([old[n] for n in left]), {}), poly(product([new[n] for n in right]), {})
            if b and (not a or not divide(p, q)[1]):
                right.append(b.pop(0))
            elif a and (not b or not divide(q, p)[1]):
                left.append(a.pop(0))
            else:
                left, right, a, b = left + a, right + b, [], []
                break
        out.append((left, right))
    if out and (a or b):
        out[-1] = (out[-1][0] + a, out[-1][1] + b)
    return out


def _relate(ctx: Context, old: list[Expr], new: list[tuple[Expr, Expr]]) -> list[Expr]:
    """Indices of the old axes from (extent, index) of the new ones."""
    flat: Expr = const(0)
    for extent, i in new:
        flat = flat * extent + i
    out: list[Expr] = []
    stride: Expr = const(1)
    for n, extent in reversed(list(enumerate(old))):
        e = flat if is_one(stride) else call("floordiv", flat, stride)
        out.append(ctx.simplify(e if n == 0 else call("mod", e, extent)))
        stride = product([stride, extent])
    return out[::-1]


def permuted(x: Value, order: list[int]) -> Value:
    """Axes reordered: axis n of the result is axis order[n] of x."""
    back = [order.index(n) for n in range(len(order))]
    return Value(tuple(x.shape[n] for n in order), x.dtype, lambda i: x.at(tuple(i[n] for n in back)))


def permute(ctx: Context, node: torch.fx.Node) -> Value:
    x = ctx.value(node.args[0])
    dims = attrs(node)["dims"]
    assert isinstance(dims, list | tuple)
    return permuted(x, [normal_axis(int(d), len(x.shape)) for d in dims])


def transpose(ctx: Context, node: torch.fx.Node) -> Value:
    """Two axes swapped; `t` swaps the axes of a matrix."""
    x = ctx.value(node.args[0])
    order = list(range(len(x.shape)))
    a, b = (int(d) for d in node.args[1:]) if len(node.args) > 1 else (0, len(order) - 1)  # type: ignore[arg-type]
    if order:
        a, b = normal_axis(a, len(order)), normal_axis(b, len(order))
        order[a], order[b] = order[b], order[a]
    return permuted(x, order)


def expand(ctx: Context, node: torch.fx.Node) -> Value:
    """Broadcasting to a larger shape."""
    shape, dtype = meta_of(node)
    x = ctx.value(node.args[0])
    return Value(shape, dtype, lambda i: broadcast(x, i))


def repeat(ctx: Context, node: torch.fx.Node) -> Value:
    """Tiling: index modulo the extent."""
    shape, dtype = meta_of(node)
    x = ctx.value(node.args[0])

    def at(i: Indices) -> Expr:
        tail = i[len(i) - len(x.shape) :]
        return x.at(tuple(ctx.simplify(call("mod", e, s)) for e, s in zip(tail, x.shape, strict=True)))

    return Value(shape, dtype, at)


def unit_axes(ctx: Context, node: torch.fx.Node) -> Value:
    """squeeze and unsqueeze in all their forms: only axes of extent 1 come and go."""
    shape, dtype = meta_of(node)
    x = ctx.value(node.args[0])
    kept = [n for n, s in enumerate(shape) if not is_one(s)]
    source = [n for n, s in enumerate(x.shape) if not is_one(s)]

    def at(i: Indices) -> Expr:
        out: list[Expr] = [const(0)] * len(x.shape)
        for old, new in zip(source, kept, strict=True):
            out[old] = i[new]
        return x.at(tuple(out))

    return Value(shape, dtype, at)


def shifted(ctx: Context, x: Value, axis: int, start: Expr, step: int, extent: Expr) -> Value:
    """x[start : start + step * extent : step] along an axis."""
    shape = (*x.shape[:axis], extent, *x.shape[axis + 1 :])

    def at(i: Indices) -> Expr:
        return x.at((*i[:axis], ctx.simplify(i[axis] * step + start), *i[axis + 1 :]))

    return Value(shape, x.dtype, at)


def slice_(ctx: Context, node: torch.fx.Node) -> Value:
    """A slice with torch's treatment of negative and too large bounds."""
    a = attrs(node)
    x = ctx.value(a["self"])
    axis = normal_axis(int(a["dim"]), len(x.shape))  # type: ignore[call-overload]
    shape, _ = meta_of(node)
    step = ctx.static_int(a["step"], "a slice step")
    start = _clamped_start(ctx, a["start"], x.shape[axis])
    return shifted(ctx, x, axis, start, step, shape[axis])


def _clamped_start(ctx: Context, start: object, extent: Expr) -> Expr:
    if start is None:
        return const(0)
    e = ctx.int_arg(start)
    if _negative(start, e):
        e = ctx.simplify(extent + e)
        return e if nonnegative(poly(e, {})) else call("maximum", const(0), e)
    # a start beyond the end leaves nothing to index
    return e


def _negative(given: object, e: Expr) -> bool:
    """Whether an index counts from the end; of a symbolic one the sign is asked for, and guarded."""
    v = given.meta["val"] if isinstance(given, torch.fx.Node) else given
    return bool(v < 0) if isinstance(v, torch.SymInt) else isinstance(e, Const) and e.value < 0


def select(ctx: Context, node: torch.fx.Node) -> Value:
    """One index of an axis."""
    a = attrs(node)
    x = ctx.value(a["self"])
    axis = normal_axis(int(a["dim"]), len(x.shape))  # type: ignore[call-overload]
    index = ctx.int_arg(a["index"])
    return selected(ctx, x, axis, ctx.simplify(x.shape[axis] + index) if _negative(a["index"], index) else index)


def selected(ctx: Context, x: Value, axis: int, index: Expr) -> Value:
    """x at one (possibly negative) index of an axis."""
    if isinstance(index, Const) and index.value < 0:
        index = ctx.simplify(x.shape[axis] + index)
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return Value(shape, x.dtype, lambda i: x.at((*i[:axis], index, *i[axis:])))


def split(ctx: Context, node: torch.fx.Node) -> tuple[Value, ...]:
    """split and split_with_sizes (chunk arrives as one of them)."""
    a = attrs(node)
    x = ctx.value(a["self"])
    axis = normal_axis(int(a["dim"]), len(x.shape))  # type: ignore[call-overload]
    parts = []
    start: Expr = const(0)
    for n in range(len(node.meta["val"])):
        extent = meta_of(node, n)[0][axis]
        parts.append(shifted(ctx, x, axis, start, 1, extent))
        start = ctx.simplify(start + extent)
    return tuple(parts)


def unbind(ctx: Context, node: torch.fx.Node) -> tuple[Value, ...]:
    """One value an index of an axis."""
    a = attrs(node)
    x = ctx.value(a["self"])
    axis = normal_axis(int(a["dim"]), len(x.shape))  # type: ignore[call-overload]
    return tuple(selected(ctx, x, axis, const(n)) for n in range(len(node.meta["val"])))


def cat(ctx: Context, node: torch.fx.Node) -> Value:
    """Concatenation; 1-d empty tensors are skipped, as torch does."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    tensors = a["tensors"]
    assert isinstance(tensors, list | tuple)
    parts = [v for v in map(ctx.value, tensors) if len(v.shape) == len(shape)]
    axis = normal_axis(int(a["dim"]), len(shape))  # type: ignore[call-overload]
    return _piecewise(ctx, parts, axis, shape, dtype)


def _piecewise(ctx: Context, parts: list[Value], axis: int, shape: tuple[Expr, ...], dtype: object) -> Value:
    """One after the other. Neighbours that are the same expression are one piece: zeros beside zeros, slices of a
    tensor that lie side by side in it."""
    ends: list[Expr] = []
    for p in parts:
        ends.append(ctx.simplify((ends[-1] if ends else const(0)) + p.shape[axis]))
    out_dtype = parts[0].dtype if dtype is None else dtype

    def at(i: Indices) -> Expr:
        out: Expr | None = None
        after: Expr | None = None
        for n in reversed(range(len(parts))):
            start = ends[n - 1] if n else const(0)
            e = parts[n].at((*i[:axis], ctx.simplify(i[axis] - start), *i[axis + 1 :]))
            e = ctx.typed(e, out_dtype)  # type: ignore[arg-type]
            if out is None or e != after:
                out = e if out is None else call("where", call("lt", i[axis], ends[n]), e, out)
            after = e
        assert out is not None
        return out

    return ctx.map(shape, out_dtype, at)  # type: ignore[arg-type]


def stack(ctx: Context, node: torch.fx.Node) -> Value:
    """Concatenation along a new axis."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    tensors = a["tensors"]
    assert isinstance(tensors, list | tuple)
    axis = normal_axis(int(a["dim"]), len(shape))  # type: ignore[call-overload]
    return _piecewise(ctx, [_with_axis(ctx.value(t), axis) for t in tensors], axis, shape, dtype)


def _with_axis(v: Value, axis: int) -> Value:
    """A new axis of extent 1."""
    shape = (*v.shape[:axis], const(1), *v.shape[axis:])
    return Value(shape, v.dtype, lambda i: v.at((*i[:axis], *i[axis + 1 :])))


def flip(ctx: Context, node: torch.fx.Node) -> Value:
    """Axes reversed."""
    a = attrs(node)
    x = ctx.value(a["self"])
    dims = a["dims"]
    assert isinstance(dims, list | tuple)
    axes = {normal_axis(int(d), len(x.shape)) for d in dims}

    def at(i: Indices) -> Expr:
        return x.at(tuple(ctx.simplify(x.shape[n] - 1 - e) if n in axes else e for n, e in enumerate(i)))

    return Value(x.shape, x.dtype, at)


def roll(ctx: Context, node: torch.fx.Node) -> Value:
    """Cyclic shift: element i comes from (i - shift) modulo the extent."""
    a = attrs(node)
    x = ctx.value(a["self"])
    shifts, dims = a["shifts"], a["dims"]
    assert isinstance(shifts, list | tuple) and isinstance(dims, list | tuple)
    if not dims:
        flat = reshaped(ctx, x, (product(x.shape),))
        return reshaped(ctx, _rolled(ctx, flat, 0, ctx.int_arg(shifts[0])), x.shape)
    for s, d in zip(shifts, dims, strict=True):
        x = _rolled(ctx, x, normal_axis(int(d), len(x.shape)), ctx.int_arg(s))
    return x


def _rolled(ctx: Context, x: Value, axis: int, shift: Expr) -> Value:
    def at(i: Indices) -> Expr:
        e = ctx.simplify(call("mod", i[axis] - shift, x.shape[axis]))
        return x.at((*i[:axis], e, *i[axis + 1 :]))

    return Value(x.shape, x.dtype, at)


def diagonal(ctx: Context, node: torch.fx.Node) -> Value:
    """The (offset) diagonal of two axes, as a new last axis."""
    a = attrs(node)
    x = ctx.value(a["self"])
    shape, _ = meta_of(node)
    first, second = (normal_axis(int(a[k]), len(x.shape)) for k in ("dim1", "dim2"))  # type: ignore[call-overload]
    offset = ctx.static_int(a["offset"], "the diagonal's offset")
    rest = [n for n in range(len(x.shape)) if n not in (first, second)]

    def at(i: Indices) -> Expr:
        out: list[Expr] = [const(0)] * len(x.shape)
        for n, axis in enumerate(rest):
            out[axis] = i[n]
        out[first] = ctx.simplify(i[-1] + max(0, -offset))
        out[second] = ctx.simplify(i[-1] + max(0, offset))
        return x.at(tuple(out))

    return Value(shape, x.dtype, at)


def unfold(ctx: Context, node: torch.fx.Node) -> Value:
    """Sliding windows of an axis, the window as a new last axis."""
    a = attrs(node)
    x = ctx.value(a["self"])
    shape, _ = meta_of(node)
    axis = normal_axis(int(a["dimension"]), len(x.shape))  # type: ignore[call-overload]
    step = ctx.static_int(a["step"], "the window step")

    def at(i: Indices) -> Expr:
        return x.at((*i[:axis], ctx.simplify(i[axis] * step + i[-1]), *i[axis + 1 : -1]))

    return Value(shape, x.dtype, at)


def pad(ctx: Context, node: torch.fx.Node) -> Value:
    """Constant padding (negative: cropping): out of range reads are discarded by the `where`."""
    a = attrs(node)
    x = ctx.value(a["self"])
    shape, dtype = meta_of(node)
    widths = a["pad"]
    assert isinstance(widths, list | tuple)
    fill = ctx.typed(ctx.value(a["value"]).at(()), dtype)
    before = {len(shape) - 1 - n: ctx.int_arg(widths[2 * n]) for n in range(len(widths) // 2)}
    return ctx.map(shape, dtype, padded(ctx, x, before, fill))


def padded(ctx: Context, x: Value, before: dict[int, Expr], fill: Expr) -> Callable[[Indices], Expr]:
    """Element function of x with `before[axis]` fill elements in front of an axis (and any behind)."""

    def at(i: Indices) -> Expr:
        source = [ctx.simplify(e - before[n]) if n in before else e for n, e in enumerate(i)]
        e = x.at(tuple(source))
        for n in before:
            inside = call("and", call("ge", source[n], 0), call("lt", source[n], x.shape[n]))
            e = call("where", inside, e, fill)
        return e

    return at


def slice_scatter(ctx: Context, node: torch.fx.Node) -> Value:
    """`self` with a slice replaced by `src`: with a step, every step'th place from its start."""
    a = attrs(node)
    x, src = ctx.value(a["self"]), ctx.value(a["src"])
    shape, dtype = meta_of(node)
    axis = normal_axis(int(a["dim"]), len(shape))  # type: ignore[call-overload]
    step = ctx.static_int(a["step"], "a slice step")
    start = _clamped_start(ctx, a["start"], x.shape[axis])

    def at(i: Indices) -> Expr:
        place = ctx.simplify(i[axis] - start)
        source = place if step == 1 else ctx.simplify(call("floordiv", place, const(step)))
        inside = call("and", call("ge", place, 0), call("lt", source, src.shape[axis]))
        if step > 1:
            inside = call("and", inside, call("eq", ctx.simplify(call("mod", place, const(step))), const(0)))
        return call("where", inside, src.at((*i[:axis], source, *i[axis + 1 :])), x.at(i))

    return ctx.map(shape, dtype, at)


def diagonal_scatter(ctx: Context, node: torch.fx.Node) -> Value:
    """`self` with a diagonal replaced by `src`, whose last axis runs along it."""
    a = attrs(node)
    x, src = ctx.value(a["self"]), ctx.value(a["src"])
    shape, dtype = meta_of(node)
    offset = ctx.static_int(a["offset"], "the diagonal")
    first, second = (normal_axis(int(a[d]), len(shape)) for d in ("dim1", "dim2"))  # type: ignore[call-overload]

    def at(i: Indices) -> Expr:
        along = ctx.simplify(i[first] - max(0, -offset))
        on = call("eq", ctx.simplify(i[second] - i[first]), const(offset))
        rest = tuple(e for n, e in enumerate(i) if n not in (first, second))
        return call("where", on, src.at((*rest, along)), x.at(i))

    return ctx.map(shape, dtype, at)


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.clone.default: alias,
    aten.contiguous.default: alias,
    aten.detach.default: alias,
    aten.alias.default: alias,
    aten.as_strided.default: as_strided,
    aten.lift_fresh_copy.default: alias,
    aten.view.default: reshape,
    aten.reshape.default: reshape,
    aten._unsafe_view.default: reshape,
    aten._reshape_alias.default: reshape,
    aten.permute.default: permute,
    aten.transpose.int: transpose,
    aten.t.default: transpose,
    aten.expand.default: expand,
    aten.repeat.default: repeat,
    aten.squeeze.default: unit_axes,
    aten.squeeze.dim: unit_axes,
    aten.squeeze.dims: unit_axes,
    aten.unsqueeze.default: unit_axes,
    aten.slice.Tensor: slice_,
    aten.select.int: select,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split,
    aten.unbind.int: unbind,
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.flip.default: flip,
    aten.roll.default: roll,
    aten.diagonal.default: diagonal,
    aten.unfold.default: unfold,
    aten.constant_pad_nd.default: pad,
    aten.slice_scatter.default: slice_scatter,
    aten.diagonal_scatter.default: diagonal_scatter,
}
