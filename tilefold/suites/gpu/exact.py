"""A row in float64, beside eager's own results: what errors are measured against, and by.

The largest error of a result is a statistic of its elements; of one element (the mean loss of a batch) it is a matter
of luck. Two evaluations of equal quality have independent errors, say normal ones: the second's is more than twice the
first's in 30 of 100 cases, where a thousand elements leave none. So a result of at most FEW elements that is less right
than eager is judged again by the largest of eager's errors on several draws of arguments and of a module's random
parameters (in training often all that is random), each against float64: an error is more than twice the largest of
1 + DRAWS others in one of 100 cases. So is one whose elements have their error in common, that of a number which all
of them have as a factor (gradients of the square of a loss in which rewards cancel). Other results of more elements are
judged by their own draw alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tilefold.frontend.hostile import Args
from tilefold.frontend.reference import Exact, double_gradients, reference
from tilefold.frontend.verify import own_error
from tilefold.suites.gpu.case import GpuCase, Part

#: Elements of a result whose largest error is a matter of luck; draws of arguments that eager is tried on beside.
FEW, DRAWS = 16, 7
#: Part of an error's square that one factor of all elements explains, from which it is one number's.
COMMON = 0.9


@dataclass(frozen=True, slots=True)
class Reference:
    """A part's results in float64 and those of eager in the row's dtype."""

    part: Part
    exact: Exact
    eager: tuple[Any, ...]


def references(case: GpuCase, args: Args) -> tuple[Reference, ...]:
    """Of all parts of a row."""
    found = []
    for part in case.parts(args):
        own = tree_leaves(called(case, case.fn)(*part.args))
        found.append(Reference(part, _exact(case, part), tuple(own)))
    return tuple(found)


@dataclass(slots=True)
class Draws:
    """Eager's errors on other arguments and parameters, found when they are first asked for. `case`: before it is
    placed. `seed`: of the row's own arguments.

    Of a training step the loss is drawn without a backward, and its gradients only where one is asked for.
    """

    case: GpuCase
    device: str
    seed: int
    _found: dict[bool, list[list[tuple[float, float]]]] = field(default_factory=dict)

    def luck(self, part: int, leaf: int) -> tuple[float, float]:
        """The largest of eager's errors of a result (largest element's, root mean square; relative)."""
        gradients = self.case.train and leaf > 0
        if gradients not in self._found:
            self._found[gradients] = self._drawn(gradients)
        return self._found[gradients][part][leaf]

    def _drawn(self, gradients: bool) -> list[list[tuple[float, float]]]:
        found: list[list[tuple[float, float]]] = []
        for seed in range(self.seed + 1, self.seed + 1 + DRAWS):
            case = self.case.placed(self.device, seed)
            errors = [_own_errors(case, part, gradients) for part in case.parts(case.args(self.device, seed))]
            found = [list(map(_larger, *pair)) for pair in zip(found or errors, errors, strict=True)]
        return found


def _own_errors(case: GpuCase, part: Part, gradients: bool) -> list[tuple[float, float]]:
    """Eager's, of results of floats; of others 0. Without `gradients` of a training step's loss alone."""
    loss = case.train and not gradients
    own = tree_leaves((case.fn if loss else called(case, case.fn))(*part.args))
    exact = tree_leaves(_trained(in_float64(case), part) if loss else _exact(case, part).result)
    return [own_error(y, e) if _is_float(y) else (0.0, 0.0) for y, e in zip(own, exact, strict=True)]


def by_luck(y: Any, exact: Any) -> bool:
    """Whether the error of a result is a matter of luck: that of few elements, or of one factor of all of them."""
    return _is_float(y) and (y.numel() <= FEW or _of_one_factor(y, exact))


def _of_one_factor(y: torch.Tensor, exact: Any) -> bool:
    if not isinstance(exact, torch.Tensor) or y.shape != exact.shape:
        return False
    e = exact.to(torch.float64)
    error = y.to(torch.float64) - e
    together, squares = (error * e).sum() ** 2, (error * error).sum() * (e * e).sum()
    return bool((squares > 0) & squares.isfinite() & (together >= COMMON * squares))


def _is_float(y: Any) -> bool:
    return isinstance(y, torch.Tensor) and y.dtype.is_floating_point


def _larger(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return max(a[0], b[0]), max(a[1], b[1])


def _exact(case: GpuCase, part: Part) -> Exact:
    """The part in float64."""
    if not isinstance(case.fn, nn.Module):
        return reference(case.fn, part.args)
    module = in_float64(case)
    if not case.train:
        return reference(module, part.args)
    return Exact(_trained(called(case, module), part), ())


def _trained(fn: Callable[..., Any], part: Part) -> Any:
    """What a function of parameters in float64 gives for a part: training, or its loss alone."""
    with double_gradients():
        return fn(*_wide(part.args))


def in_float64(case: GpuCase) -> nn.Module:
    """A copy of a row's module in float64: operators that check their operands' dtypes against each other want
    parameters widened beforehand."""
    assert isinstance(case.fn, nn.Module)
    module = copy.deepcopy(case.fn).double()
    if case.exact is not None:
        case.exact(module)
    return module


def _wide(args: Sequence[Any]) -> list[Any]:
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


def called(case: GpuCase, fn: Callable[..., Any]) -> Callable[..., Any]:
    """What a row's call is where `fn` is its function, or a copy of it."""
    return training_step(fn, fn) if case.train else fn


def training_step(run: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Calls `run`, which gives a loss of the module's parameters, and its backward; gives both."""
    parameters = tuple(module.parameters())

    def step(*args: Any) -> tuple[torch.Tensor, ...]:
        for p in parameters:
            p.grad = None
        with torch.enable_grad():
            loss = run(*args)
            loss.backward()
        return loss.detach(), *(p.grad for p in parameters if p.grad is not None)

    return step
