"""Bits of integers: with constants they are arithmetic, which the scalar language has.

Laws, for whole numbers in two's complement, // and mod towards minus infinity:

    x >> n = x // 2^n            x << n = x 2^n                  ~x = -x - 1
    x & c = sum over the runs of ones of c, from bit a, of length b: ((x // 2^a) mod 2^b) 2^a          (c >= 0)
    x & c = x - (x & ~c)                                                                               (c < 0)
    x | c = x + c - (x & c)      x ^ c = x + c - 2 (x & c)

Of two tensors there is no such law, but an operator; booleans have their own operators. What is shifted by all its bits
or more, or by less than none, is as PyTorch has it: nothing is left of it but its sign, on the way down.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Cast, Const, Expr, call, lit
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.context import Context, Value, attrs, broadcast, meta_of

aten = torch.ops.aten
Lowerer = Callable[[Context, torch.fx.Node], Value]


def masked(x: Expr, c: int) -> Expr:
    """x & c."""
    if c < 0:
        return x if c == -1 else x - masked(x, ~c)
    found: Expr | None = None
    at = 0
    while c >> at:
        if (c >> at) & 1:
            length = ((c >> at) + 1 & -((c >> at) + 1)).bit_length() - 1
            low = call("floordiv", x, 1 << at) if at else x
            part = call("mod", low, 1 << length)
            part = part * (1 << at) if at else part
            found = part if found is None else found + part
            at += length
        else:
            at += 1
    return lit(0) if found is None else found


def _either(x: Expr, c: int) -> Expr:
    return x + c - masked(x, c)


def _differing(x: Expr, c: int) -> Expr:
    return x + c - masked(x, c) * 2


_OF_INTEGERS = {"and": masked, "or": _either, "xor": _differing}
_OF_BOOLEANS = {"and": "and", "or": "or", "xor": "ne"}


def bitwise(op: str) -> Lowerer:
    """and, or, xor: of booleans or of integers."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        shape, dtype = meta_of(node)
        given = list(attrs(node).values())
        operands = [ctx.value(v) for v in given]
        if all(o.dtype is DType.BOOL for o in operands):
            return ctx.map(shape, dtype, lambda i: call(_OF_BOOLEANS[op], *(broadcast(o, i) for o in operands)))
        constants = [_constant(ctx, o) for o in operands]
        if constants == [None, None]:
            whole = [lambda i, o=o: _whole(o, i) for o in operands]
            return ctx.map(shape, dtype, lambda i: call(f"bits_{op}", *(at(i) for at in whole)))
        n = 0 if constants[0] is None else 1
        x, c = operands[n], constants[1 - n]
        assert c is not None
        return ctx.map(shape, dtype, lambda i: _narrowed(_OF_INTEGERS[op](_whole(x, i), c), dtype))

    return lower


def inverted(ctx: Context, node: torch.fx.Node) -> Value:
    """~x."""
    shape, dtype = meta_of(node)
    (x,) = (ctx.value(v) for v in attrs(node).values())
    if dtype is DType.BOOL:
        return ctx.map(shape, dtype, lambda i: call("not", broadcast(x, i)))
    return ctx.map(shape, dtype, lambda i: _narrowed(-broadcast(x, i) - 1, dtype))


def shifted(left: bool) -> Lowerer:
    """x << n or x >> n."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        shape, dtype = meta_of(node)
        x, by = (ctx.value(v) for v in attrs(node).values())
        n = _constant(ctx, by)
        if not dtype.is_int or not by.dtype.is_int:
            raise UnsupportedError("a shift of what is no integer, or by none")
        if n is None or not 0 <= n < 8 * dtype.nbytes - 1:
            return ctx.map(shape, dtype, lambda i: _by(broadcast(x, i), broadcast(by, i), dtype, left=left))
        if left:
            return ctx.map(shape, dtype, lambda i: _narrowed(broadcast(x, i) * (1 << n), dtype))
        return ctx.map(shape, dtype, lambda i: call("floordiv", broadcast(x, i), 1 << n))

    return lower


def _by(x: Expr, by: Expr, dtype: DType, *, left: bool) -> Expr:
    """x shifted by a number of bits that data say, in 64 bits."""
    bits = 8 * dtype.nbytes
    whole = bits if dtype is DType.U8 else bits - 1  # shifts of which a sign is left
    inside = call("and", call("ge", by, 0), call("lt", by, whole + left))
    wide, n = Cast(x, DType.I64), Cast(by, DType.I64)
    if left:
        return _narrowed(call("where", inside, call("bits_up", wide, call("where", inside, n, 0)), 0), dtype)
    return _narrowed(call("bits_down", wide, call("where", inside, n, whole)), dtype)


def _constant(ctx: Context, v: Value) -> int | None:
    """The whole number that a value is everywhere; None: it is not, or not known."""
    e = v.at(ctx.indices(v.shape)[1])
    while isinstance(e, Cast):
        e = e.arg
    return int(e.value) if isinstance(e, Const) and float(e.value).is_integer() else None


def _whole(v: Value, i: tuple[Expr, ...]) -> Expr:
    e = broadcast(v, i)
    return Cast(e, DType.I64) if v.dtype is DType.BOOL else e


def _narrowed(e: Expr, dtype: DType) -> Expr:
    """What overflows wraps."""
    return e if dtype is DType.I64 else Cast(e, dtype)


def _overloads(*names: str) -> list[torch._ops.OpOverload]:
    packets = [getattr(aten, n) for n in names]
    unwanted = ("out", "Scalar_out", "Tensor_out")
    return [getattr(p, o) for p in packets for o in p.overloads() if o not in unwanted and not o.endswith("_out")]


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    **{o: bitwise(op) for op in ("and", "or", "xor") for o in _overloads(f"bitwise_{op}", f"__{op}__")},
    **{o: shifted(True) for o in _overloads("bitwise_left_shift", "__lshift__")},
    **{o: shifted(False) for o in _overloads("bitwise_right_shift", "__rshift__")},
    aten.bitwise_not.default: inverted,
}
