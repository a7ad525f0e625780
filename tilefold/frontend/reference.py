"""A function's float64 reference: the same program with every precision cast made a no-op.

Under `double_precision` all floating-point arithmetic runs in float64, whatever dtypes the
program asks for: operands of narrower floats are widened where an operator meets them, and
float32, float16 and bfloat16 given as a `dtype` become float64. Casts to float8 are kept: they
are quantisation, part of what the program computes (see `DType.rounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _widen(x: object) -> object:
    if isinstance(x, torch.Tensor) and x.dtype in _NARROW:
        return x.to(torch.float64)
    return torch.float64 if isinstance(x, torch.dtype) and x in _NARROW else x


class _Double(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(_widen, tuple(args)), **tree_map(_widen, dict(kwargs or {})))


@contextmanager
def double_precision() -> Iterator[None]:
    """Run what is inside in float64. The default dtype is restored on leaving."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(before)


def reference(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`fn(*args)` in float64, without gradients. The arguments are not changed."""
    wide = tree_map(_widen, tuple(args))
    with torch.no_grad(), double_precision():
        return fn(*wide)
