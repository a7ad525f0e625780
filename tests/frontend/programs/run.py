"""Run a program eagerly and compiled, and say how they differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

Program = Callable[..., object]


def difference(program: Program, args: Sequence[object], *, backward: bool, tol: float = 1e-4, **how: object) -> str:
    """What a compiled program does otherwise than eager: its error, or the first result that differs; else nothing.

    Results, what became of the arguments and of the module's buffers are compared, and with `backward` the gradients
    of arguments and parameters. how: for torch.compile. What eager raises has to be raised too.
    """
    backward = backward and _can(program, args)
    torch._dynamo.reset()
    try:
        want: list[object] | Exception = outcome(program, args, None, backward)
    except Exception as err:  # eager's own: compiled code must raise as well
        want = err
    try:
        got = outcome(program, args, how, backward)
    except Exception as err:  # any at all is what this function is to find
        return "" if isinstance(want, Exception) else f"{type(err).__name__}: {str(err)[:400]}"
    if isinstance(want, Exception):
        return f"does not raise eager's {type(want).__name__}"
    if len(got) != len(want):
        return f"{len(got)} results, not {len(want)}"
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        if isinstance(a, _Gradient) and isinstance(b, _Gradient):
            a, b = a.value, b.value if a.value.stride() != a.strides else b.relaid()
        if wrong := _differ(a, b, tol):
            return f"result {k}: {wrong}"
    return ""


def outcome(program: Program, args: Sequence[object], how: dict[str, object] | None, backward: bool) -> list[object]:
    """Results, arguments afterwards, buffers and gradients, of copies of the program and its arguments."""
    program, args = copy.deepcopy((program, tuple(args)))
    floats = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    for a in floats if backward else ():
        a.requires_grad_()
    torch.manual_seed(0)
    run = program if how is None else torch.compile(program, **how)  # type: ignore[call-overload]
    made = tree_leaves(run(*args))
    found = [*made, *(a for a in tree_leaves(args) if isinstance(a, torch.Tensor))]
    modules = [m for m in (program, *args) if isinstance(m, torch.nn.Module)]
    found += [b for m in modules for b in m.buffers()]
    if backward:
        wanted = [r for r in made if isinstance(r, torch.Tensor) and r.requires_grad]
        leaves = [*floats, *(p for m in modules for p in m.parameters())]
        weights = [torch.arange(1.0, r.numel() + 1, dtype=r.dtype).reshape(r.shape).cos() for r in wanted]
        grads = torch.autograd.grad(wanted, leaves, weights, allow_unused=True)
        found += [g if g is None else _Gradient(g, _kept(x)) for g, x in zip(grads, leaves, strict=True)]
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in found]


@dataclass(frozen=True)
class _Gradient:
    """strides: those of a gradient that autograd keeps as it comes, which a backward may give in place of eager's."""

    value: torch.Tensor
    strides: tuple[int, ...]

    def relaid(self) -> torch.Tensor:
        return torch.empty_strided(self.value.shape, self.strides, dtype=self.value.dtype).copy_(self.value)


def _kept(x: torch.Tensor) -> tuple[int, ...]:
    """Strides of a gradient of x that autograd does not copy: x's own, or a contiguous tensor's where x has gaps."""
    dense = torch.empty_like(x).stride() == x.stride()
    return x.stride() if dense else torch.empty(x.shape).stride()


def _can(program: Program, args: Sequence[object]) -> bool:
    """Whether eager has gradients here."""
    try:
        outcome(program, args, None, True)
    except Exception:  # an argument changed in place, integers, no gradient: then forward alone is compared
        return False
    return True


def _differ(got: object, want: object, tol: float) -> str:
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        same = type(got) is type(want) and (got == want or not isinstance(want, int | float | str))
        return "" if same else f"{got!r}, not {want!r}"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    if want.numel() > 1 and want.stride() != got.stride() and 1 not in want.shape and 0 not in want.stride():
        return f"strides {got.stride()}, not {want.stride()}"
    tol = max(tol, 2e-2) if want.dtype in (torch.float16, torch.bfloat16) else tol
    try:
        torch.testing.assert_close(got, want, rtol=tol, atol=tol, equal_nan=True)
    except AssertionError as err:
        return " ".join(str(err).split())[:200]
    return ""
