"""Operators that make tensors from nothing (always lazy), and index masks such as tril."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, call
from tilefold.frontend.operators.context import Context, Indices, Value, attrs, dtype_of, meta_of
from tilefold.frontend.operators.elementwise import Lowerer
from tilefold.tensor.index_simplify import const

aten = torch.ops.aten
prims = torch.ops.prims


def filled(value: float | int | None) -> Lowerer:
    """A tensor of one value; None: the node's `fill_value`."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        shape, dtype = meta_of(node)
        fill = attrs(node)["fill_value"] if value is None else value
        e = ctx.typed(ctx.value(fill).at(()), dtype)
        return Value(shape, dtype, lambda _: e)

    return lower


def scalar_tensor(ctx: Context, node: torch.fx.Node) -> Value:
    """A Python or symbolic number as a 0-d tensor."""
    shape, dtype = meta_of(node)
    e = ctx.typed(ctx.value(node.args[0]).at(()), dtype)
    return Value(shape, dtype, lambda _: e)


def arange(ctx: Context, node: torch.fx.Node) -> Value:
    """start + step i; integers exactly, floats computed in the result's arithmetic type."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    start = ctx.value(a.get("start", 0)).at(())
    step = ctx.value(a.get("step", 1)).at(())
    return _affine(ctx, shape, dtype, start, step)


def iota(ctx: Context, node: torch.fx.Node) -> Value:
    """prims.iota(length, start, step)."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    return _affine(ctx, shape, dtype, ctx.int_arg(a["start"]), ctx.int_arg(a["step"]))


def _affine(ctx: Context, shape: tuple[Expr, ...], dtype: DType, start: Expr, step: Expr) -> Value:
    whole = ctx.type_of(start) is DType.I64 and ctx.type_of(step) is DType.I64

    def at(i: Indices) -> Expr:
        if whole:
            return ctx.typed(ctx.simplify(i[0] * step + start), dtype)
        e = call("mul", i[0], step) + start
        return ctx.typed(ctx.exact_literals(e), dtype)

    return Value(shape, dtype, at)


def eye(ctx: Context, node: torch.fx.Node) -> Value:
    """1 on the diagonal."""
    shape, dtype = meta_of(node)
    one, zero = ctx.constant(1, dtype), ctx.constant(0, dtype)
    return Value(shape, dtype, lambda i: call("where", call("eq", i[0], i[1]), one, zero))


def triangle(op: str) -> Lowerer:
    """tril: keep column <= row + diagonal; triu: keep column >= row + diagonal."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        a = attrs(node)
        shape, dtype = meta_of(node)
        x, shift = ctx.value(a["self"]), ctx.int_arg(a["diagonal"])
        zero = ctx.constant(0, dtype)

        def at(i: Indices) -> Expr:
            row = ctx.simplify(i[-2] + shift)
            return call("where", call(op, i[-1], row), x.at(i), zero)

        return ctx.map(shape, dtype, at)

    return lower


def linspace(ctx: Context, node: torch.fx.Node) -> Value:
    """Evenly spaced values, from both ends as torch does it (the halves meet in the middle)."""
    a = attrs(node)
    shape, dtype = meta_of(node)
    n = ctx.static_int(a["steps"], "the number of steps")
    start, end = ctx.value(a["start"]).at(()), ctx.value(a["end"]).at(())
    if n <= 1:
        first = ctx.typed(start, dtype)
        return Value(shape, dtype, lambda _: first)
    step = (end - start) / float(n - 1)

    def at(i: Indices) -> Expr:
        low = start + call("mul", step, i[0])
        high = end - call("mul", step, const(n - 1) - i[0])
        return ctx.typed(ctx.exact_literals(call("where", call("lt", i[0], n // 2), low, high)), dtype)

    return ctx.map(shape, dtype, at)


def as_constant(ctx: Context, value: torch.Tensor) -> Value | None:
    """A real 0-d CPU tensor as a literal; None for anything else."""
    if value.ndim or value.device.type != "cpu":
        return None
    dtype = dtype_of(value.dtype)
    with _disable_current_modes():  # the graph's own numbers are real, also under AOTAutograd's fake mode
        literal = Const(value.item(), dtype.compute)
    return Value((), dtype, lambda _: literal)


#: What is made of the sizes of its tensor alone.
OF_SIZES = frozenset(
    (
        *(aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default),
        *(aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default),
    )
)

TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.full.default: filled(None),
    aten.full_like.default: filled(None),
    aten.new_full.default: filled(None),
    aten.zeros.default: filled(0),
    aten.zeros_like.default: filled(0),
    aten.new_zeros.default: filled(0),
    aten.ones.default: filled(1),
    aten.ones_like.default: filled(1),
    aten.new_ones.default: filled(1),
    aten.empty.memory_format: filled(0),
    aten.empty_like.default: filled(0),
    aten.new_empty.default: filled(0),
    aten.scalar_tensor.default: scalar_tensor,
    aten.arange.default: arange,
    aten.arange.start: arange,
    aten.arange.start_step: arange,
    prims.iota.default: iota,
    aten.linspace.default: linspace,
    aten.eye.default: eye,
    aten.eye.m: eye,
    aten.tril.default: triangle("le"),
    aten.triu.default: triangle("ge"),
}
