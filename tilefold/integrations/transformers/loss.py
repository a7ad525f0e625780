"""Cross-entropy behind a linear head, in one function that need not write the logits.

A model computes logits, perhaps caps them, and gives them to `cross_entropy`, each in its own words. So the head
gives `Deferred` logits instead, a tensor that remembers how it is made: `cross_entropy` of them is one compiled
function of the hidden states, the head and the labels; whatever else is done with them makes them first. Nothing is
missing for the user: `output.logits` is there, computed when somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from tilefold.integrations.transformers.swap import Attempts, free

#: What tries the loss of the model that is running, where logits are to be deferred.
deferring: ContextVar[Attempts | None] = ContextVar("deferring", default=None)
#: One step after the head: a name of `_STEPS` and a number.
Step = tuple[str, float]


def _step(x: torch.Tensor, step: Step) -> torch.Tensor:
    """One step between the head and the loss."""
    name, number = step
    match name:
        case "float":
            return x.float()
        case "divide":
            return x / number
        case "multiply":
            return x * number
        case _:
            return torch.tanh(x)


@dataclass(frozen=True, slots=True)
class Made:
    """How logits are made: `steps` of `hidden @ weight.T + bias`.

    hidden: [..., C], weight: [V, C], bias: [V] or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    tried: Attempts
    steps: tuple[Step, ...] = ()

    def logits(self) -> torch.Tensor:
        """[..., V]."""
        y = functional.linear(self.hidden, self.weight, self.bias)
        for step in self.steps:
            y = _step(y, step)
        return y

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if ("float", 0.0) in self.steps else self.hidden.dtype


class Deferred(torch.Tensor):
    """Logits that are computed when something but cross-entropy asks for them."""

    made: Made
    held: torch.Tensor | None

    @staticmethod
    def of(made: Made) -> Deferred:
        """Logits of a description."""
        shape = (*made.hidden.shape[:-1], made.weight.shape[0])
        wrapper: Any = torch.Tensor._make_wrapper_subclass
        x = wrapper(Deferred, shape, dtype=made.dtype, device=made.hidden.device)
        x.made, x.held = made, None
        return x  # type: ignore[no-any-return]

    def compute(self) -> torch.Tensor:
        """The logits as a plain tensor."""
        if self.held is None:
            self.held = self.made.logits()
        return self.held

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Deferred):
            if func in _PLAIN:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is functional.cross_entropy:
                return cross_entropy(*args, **kwargs)
            made = _next(first, func, args[1:], kwargs)
            if made is not None:
                return Deferred.of(made)
        args, kwargs = tree_map(_plain, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map(_plain, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def _plain(x: Any) -> Any:
    return x.compute() if isinstance(x, Deferred) else x


#: Questions that need no values.
_PLAIN: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")]
    + [torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point]
)
_NUMBERED = {
    torch.Tensor.div: "divide", torch.Tensor.__truediv__: "divide", torch.div: "divide",
    torch.Tensor.mul: "multiply", torch.Tensor.__mul__: "multiply", torch.mul: "multiply",
}  # fmt: skip


def _next(x: Deferred, func: Callable[..., Any], rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Made | None:
    """How the result of one more operator is made, if that can wait; None if it cannot."""
    made, v = x.made, x.made.weight.shape[0]
    number = rest[0] if len(rest) == 1 and not kwargs else None
    if func in (torch.Tensor.float, torch.Tensor.to) and (func is torch.Tensor.float or number is torch.float32):
        return replace(made, steps=(*made.steps, ("float", 0.0)))
    if func in (torch.tanh, torch.Tensor.tanh) and not rest and not kwargs:
        return replace(made, steps=(*made.steps, ("tanh", 0.0)))
    if func in _NUMBERED and isinstance(number, int | float) and not isinstance(number, bool):
        return replace(made, steps=(*made.steps, (_NUMBERED[func], float(number))))
    if func is torch.Tensor.contiguous and not rest and not kwargs:
        return made
    if func in (torch.Tensor.view, torch.Tensor.reshape) and not kwargs and _flat(rest, made, v):
        return replace(made, hidden=made.hidden.reshape(-1, made.hidden.shape[-1]))
    return None


def _flat(rest: Sequence[Any], made: Made, v: int) -> bool:
    shape = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], Sequence) else tuple(rest)
    rows = made.hidden.numel() // max(1, made.hidden.shape[-1])
    return shape in ((-1, v), (rows, v))


def cross_entropy(
    input: Deferred,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of logits [N, V] that are not there yet."""
    made = input.made
    rule = (ignore_index, reduction, label_smoothing)

    def original() -> torch.Tensor:
        return functional.cross_entropy(
            input.compute(), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )

    if isinstance(target, Deferred) or weight is not None or size_average is not None or reduce is not None:
        return original()
    if made.hidden.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        return original()

    def compiled() -> torch.Tensor:
        free(made.hidden, 0)
        free(target, 0)
        key = (tuple(made.weight.shape), made.weight.dtype, made.hidden.dtype, made.bias is None, made.steps, rule)
        run = made.tried.fused(("loss", key), lambda: _function(made.steps, *rule))
        return run(made.hidden, made.weight, made.bias, target)  # type: ignore[no-any-return]

    return made.tried.run((torch.is_grad_enabled(), made.steps, rule), compiled, original)  # type: ignore[no-any-return]


def _function(steps: tuple[Step, ...], ignored: int, reduction: str, smoothing: float) -> Callable[..., torch.Tensor]:
    def loss(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
    ) -> torch.Tensor:
        y = functional.linear(hidden, weight, bias)
        for step in steps:
            y = _step(y, step)
        return functional.cross_entropy(y, target, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)

    return loss
