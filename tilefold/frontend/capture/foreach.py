"""Operators over lists of tensors (`torch._foreach_add`, hand-written optimisers) as operators of tensors.

    foreach f (xs, ys, s) = [f (x, y, s) | x, y in xs, ys]      f elementwise; s: a number, or a list of numbers

PyTorch's launch few kernels for many tensors; here f of each tensor is fused with what else is computed of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

aten = torch.ops.aten
_ONE = (
    *("abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "neg", "reciprocal", "round", "rsqrt"),
    *("sigmoid", "sign", "sin", "sqrt", "tanh", "trunc"),
)
_TWO = ("add", "sub", "mul", "div", "pow", "lerp", "clamp_max", "clamp_min", "copy")
#: Their last argument is a keyword of the operator on tensors.
_THREE = ("addcdiv", "addcmul")


def decompositions() -> Iterator[tuple[torch._ops.OpOverload, Callable[..., object]]]:
    """For AOTAutograd; what this version of torch has of them."""
    for name in (*_ONE, *_TWO, *_THREE):
        packet = getattr(aten, f"_foreach_{name}", None)
        for overload in () if packet is None else packet.overloads():
            if not overload.endswith("out") and not (name in _THREE and overload == "Tensor"):
                yield getattr(packet, overload), _each(name)
    for name, instead in (("maximum", "clamp_min"), ("minimum", "clamp_max")):
        packet = getattr(aten, f"_foreach_{name}")
        yield packet.List, _each(name)
        yield packet.Scalar, _each(instead)


def _each(name: str) -> Callable[..., list[torch.Tensor]]:
    one = getattr(aten, name)

    def call(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        count = next(len(a) for a in args if isinstance(a, list | tuple))
        named = {"value": args[3], **kwargs} if name in _THREE and len(args) > 3 else kwargs
        named = {"value" if name in _THREE else k: v for k, v in named.items()}
        plain = args[:3] if name in _THREE else args
        return [one(*[_nth(a, n) for a in plain], **{k: _nth(v, n) for k, v in named.items()}) for n in range(count)]

    return call


def _nth(given: Any, n: int) -> Any:
    return given[n] if isinstance(given, list | tuple) else given
