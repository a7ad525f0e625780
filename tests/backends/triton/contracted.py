"""Triton's interpreter as its compiler rounds: a product that a sum reads is not rounded, as in a multiply-add.

`a * b + c` of floats becomes one instruction wherever the compiler finds it, through broadcasts and changes of shape.
What the interpreter rounds twice is then rounded once, so that `a * b - round(a * b)` is not 0: for large numbers it is
large. Results of `exp2` that are no normal numbers are 0, as those of the device's instruction are. Of a sum of two
products one stays rounded: which one, the compiler decides, so that both are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

#: Methods of the builder that change shapes alone.
_SHAPES = ("create_expand_dims", "create_broadcast", "create_splat", "create_unsplat", "create_reshape", "create_trans")
#: Where the exact product is kept, by handle.
_EXACT = "exact product"


def _product(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle) -> TensorHandle:
    out = builder.binary_op(a, b, np.multiply)
    if out.data.dtype == np.float32:
        with np.errstate(all="ignore"):
            out.set_attr(_EXACT, a.data.astype(np.float64) * b.data.astype(np.float64))
    return out


def _sum(sign: float, first: Literal["left", "right"]) -> Callable[..., TensorHandle]:
    def add(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle) -> TensorHandle:
        x, y = a.attr.get(_EXACT), b.attr.get(_EXACT)
        if x is not None and (y is None or first == "left"):
            y = b.data
        elif y is not None:
            x = a.data
        else:
            return builder.binary_op(a, b, np.add if sign > 0 else np.subtract)
        with np.errstate(all="ignore"):
            return TensorHandle((x + sign * y).astype(a.data.dtype), a.dtype.scalar)

    return add


def _fused(builder: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    with np.errstate(all="ignore"):
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


def _power(builder: InterpreterBuilder, x: TensorHandle) -> TensorHandle:
    with np.errstate(all="ignore"):
        out = np.exp2(x.data)
    return TensorHandle(np.where(np.abs(out) < np.finfo(out.dtype).tiny, out.dtype.type(0), out), x.dtype.scalar)


def _kept(change: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """A change of shape, made of the exact product too."""

    def method(builder: InterpreterBuilder, *args: Any) -> TensorHandle:
        out = change(builder, *args)
        at = next(n for n, x in enumerate(args) if isinstance(x, TensorHandle))
        exact = args[at].attr.get(_EXACT)
        if exact is not None:
            out.set_attr(_EXACT, _float64(change, builder, args, at, exact))
        return out

    return method


def _float64(
    change: Callable[..., TensorHandle], builder: InterpreterBuilder, args: tuple[Any, ...], at: int, x: np.ndarray
) -> np.ndarray:
    """The change of shape of numbers of float64, found by where it takes each element."""
    places = np.arange(x.size, dtype=np.int32).reshape(x.shape).view(np.float32)
    moved = change(builder, *args[:at], TensorHandle(places, args[at].dtype), *args[at + 1 :]).data
    return x.reshape(-1)[np.ascontiguousarray(moved).view(np.int32)]


@contextmanager
def contracted(first: Literal["left", "right"] = "left") -> Iterator[None]:
    """Kernels round as compiled ones; of two products in a sum the `first` is not rounded."""
    made = {n: _kept(getattr(InterpreterBuilder, n)) for n in _SHAPES}
    made |= {"create_fmul": _product, "create_fma": _fused, "create_exp2": _power}
    made |= {"create_fadd": _sum(1.0, first), "create_fsub": _sum(-1.0, first)}
    with patch.multiple(InterpreterBuilder, **made):
        yield
