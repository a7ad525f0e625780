"""A function's float64 reference: the same program with every precision cast made a no-op.

Under `double_precision` all floating-point arithmetic runs in float64, whatever dtypes the
program asks for: operands of narrower floats are widened where an operator meets them, and
float32, float16 and bfloat16 given as a `dtype` become float64. Casts to float8 are kept: they
are quantisation, part of what the program computes (see `DType.rounds`). Products that torch has
for float8 operands only are computed from their definition.

Selections (argmax, topk, ...) are recorded with the values that they chose from: two elements that
differ by less than a rounding error may be chosen in either order, so an index is judged by
what it points at.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.attention.flex_attention as torchs_flex
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tilefold.frontend.capture.flex import flex_attention, flex_operator

_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_TO_NARROW = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


def _widen(x: object) -> object:
    if isinstance(x, torch.Tensor) and x.dtype in _NARROW:
        return x.to(torch.float64)
    return torch.float64 if isinstance(x, torch.dtype) and x in _NARROW else x


@dataclass(frozen=True, slots=True)
class Selection:
    """`index` are positions along `dim` of `values` (float64), chosen by an order.

    `first`: torch promises the first of equal values (argmax, argmin, max, min; not topk and sort).
    """

    index: torch.Tensor
    values: torch.Tensor
    dim: int
    first: bool

    def of(self, result: torch.Tensor) -> bool:
        """Whether `result` is this index, or a view of all of it."""
        same = result.untyped_storage().data_ptr() == self.index.untyped_storage().data_ptr()
        return same and result.numel() == self.index.numel() and result.numel() > 0


def _selection(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Selection | None:
    """What was chosen from what, where `func` is a selection."""
    place = _SELECTORS.get(func)
    if place is None:
        return None
    position, default, first = place
    x = args[0]
    dim = kwargs.get("dim", args[position] if len(args) > position else default)
    index = out[1] if isinstance(out, tuple) else out
    if dim is None or x.ndim == 0:
        return Selection(index.reshape(1), x.reshape(-1), 0, first)
    dim %= x.ndim
    return Selection(index if index.ndim == x.ndim else index.unsqueeze(dim), x, dim, first)


_ATEN = torch.ops.aten
#: operator -> position of its `dim` argument, the default of that, whether the first of equals is promised
_SELECTORS: dict[Any, tuple[int, int | None, bool]] = {
    _ATEN.argmax.default: (1, None, True),
    _ATEN.argmin.default: (1, None, True),
    _ATEN.max.dim: (1, None, True),
    _ATEN.min.dim: (1, None, True),
    _ATEN.topk.default: (2, -1, False),
    _ATEN.sort.default: (1, -1, False),
}


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """aten._scaled_mm in float64: the scales are one a tensor, or one a row [M, 1] and one a column [1, N]."""
    out = a.to(torch.float64) @ b.to(torch.float64) * scale_a * scale_b
    return out if bias is None else out + bias


#: operator -> what it computes in float64, where torch's own does not take float64 operands
_DEFINITIONS: dict[Any, Callable[..., Any]] = {_ATEN._scaled_mm.default: _scaled_mm, flex_operator: flex_attention}


class _Double(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, selections: list[Selection]):
        super().__init__()
        self.selections = selections

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        wide, named = tree_map(_widen, tuple(args)), tree_map(_widen, dict(kwargs or {}))
        out = _DEFINITIONS.get(func, func)(*wide, **named)
        chosen = _selection(func, wide, named, out)
        if chosen is not None:
            self.selections.append(chosen)
        return out


@contextmanager
def double_precision() -> Iterator[list[Selection]]:
    """Run what is inside in float64; gives its selections. The default dtype is restored on leaving."""
    selections: list[Selection] = []
    before, debug = torch.get_default_dtype(), "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    compiled = getattr(torchs_flex, debug, False)
    torch.set_default_dtype(torch.float64)
    setattr(torchs_flex, debug, True)  # what torch compiles in eager mode, Dynamo refuses under a mode
    try:
        with _Double(selections):
            yield selections
    finally:
        torch.set_default_dtype(before)
        setattr(torchs_flex, debug, compiled)


class _Casts(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        cast_to = torch.Tensor.double if func in _TO_NARROW else func
        return cast_to(*tree_map(_widen, tuple(args)), **tree_map(_widen, dict(kwargs or {})))


@contextmanager
def double_gradients() -> Iterator[None]:
    """Run what is inside, of arguments and parameters in float64, and its backward in float64: casts and dtypes that
    the program itself asks for are made no-ops where it does so (a dispatch mode would not see gradients)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Casts():
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, slots=True)
class Exact:
    """A float64 run: what the function returned, the selections made on the way, and its arguments afterwards."""

    result: Any
    selections: tuple[Selection, ...] = field(repr=False)
    arguments: tuple[Any, ...] = field(default=(), repr=False)


def reference(fn: Callable[..., Any], args: Sequence[Any]) -> Exact:
    """`fn(*args)` in float64, without gradients. The arguments are not changed."""
    wide = tree_map(_widen, own(args, lambda x: x.dtype not in _NARROW))  # widened ones are copies
    with torch.no_grad(), double_precision() as selections:
        result = fn(*wide)
    return Exact(result, tuple(selections), wide)


def own(args: Sequence[Any], which: Callable[[torch.Tensor], bool] = lambda x: True) -> tuple[Any, ...]:
    """The arguments in memory of their own, with the strides that they had and what was marked on them (sizes that
    change); what shares memory still does.

    which: of the tensors; those of other layouts and classes than torch's plain one are given as they are.
    """
    copies: dict[int, Any] = {}
    memo: dict[int, Any] = {}

    def copied(x: Any) -> Any:
        if not (plain_tensor(x) and which(x)):
            return x
        if id(x) not in copies:
            made = copy.deepcopy(x.detach(), memo).requires_grad_(x.requires_grad)
            vars(made).update(vars(x))
            copies[id(x)] = made
        return copies[id(x)]

    owned: tuple[Any, ...] = tree_map(copied, tuple(args))
    return owned


def plain_tensor(x: object) -> bool:
    """Whether it is a tensor of torch's own class, with strides."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and cast(torch.Tensor, x).layout is torch.strided
