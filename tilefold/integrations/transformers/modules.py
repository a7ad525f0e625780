"""Which modules of a model are compiled whole: found by their structure, run by their own `forward`.

A *norm* is a leaf with parameters of one axis (or none, and a name that says so). A *block* is made of linear layers,
activations, norms and dropout and nothing else: feed-forward parts, and projections with residuals and norms. The
outermost block is taken. An *attention* is a module whose `forward` asks transformers' interface for an
implementation; the rotary function that it calls is a function of its file, compiled as that.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tilefold.integrations.transformers.rows import Row
from tilefold.integrations.transformers.swap import Attempts, free

INTERFACE, ROTARY = "ALL_ATTENTION_FUNCTIONS", "apply_rotary_pos_emb"
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
#: Modules that are one operator of PyTorch's: nothing to fuse in them alone.
LIBRARY = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def forward_of(module: nn.Module) -> types.FunctionType | None:
    """The `forward` that a module's class defines, as it was written; None where something stands in for it."""
    found = getattr(type(module), "forward", None)
    return found if isinstance(found, types.FunctionType) and "forward" not in module.__dict__ else None


def _leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def is_norm(module: nn.Module) -> bool:
    """A leaf that normalises: parameters of one axis, or none, and a name that says so."""
    if not _leaf(module) or isinstance(module, nn.modules.batchnorm._NormBase):
        return False
    return "norm" in type(module).__name__.lower() and all(p.ndim == 1 for p in module.parameters(recurse=False))


def is_linear(module: nn.Module) -> bool:
    """A matrix and perhaps a bias: `nn.Linear`, or GPT-2's `Conv1D`."""
    matrix = getattr(module, "weight", None)
    found = _leaf(module) and isinstance(matrix, torch.Tensor) and matrix.ndim == 2
    return found and not isinstance(module, nn.Embedding)


def is_activation(module: nn.Module) -> bool:
    """A leaf of no parameters that is neither dropout nor a norm."""
    return _leaf(module) and not any(True for _ in module.parameters()) and not isinstance(module, DROPOUTS)


def is_attention(module: nn.Module) -> bool:
    """Whether a module asks transformers for an implementation of attention."""
    found = inspect.unwrap(getattr(type(module), "forward", None) or is_attention)
    return INTERFACE in getattr(getattr(found, "__code__", None), "co_names", ())


def is_block(module: nn.Module, never: frozenset[nn.Module]) -> bool:
    """Linear layers and activations or norms, alone; `never`: modules that must stay apart (the output head)."""
    if _leaf(module) or isinstance(module, nn.ModuleList | nn.ModuleDict) or not _simple(module):
        return False
    inner = [m for m in module.modules() if m is not module]
    leaves = [m for m in inner if _leaf(m)]
    if never.intersection(inner) or any(not (_leaf(m) or _simple(m)) for m in inner):
        return False
    known = all(is_linear(m) or is_norm(m) or is_activation(m) or isinstance(m, DROPOUTS) for m in leaves)
    joined = any(is_norm(m) or is_activation(m) for m in leaves) or _calls_function(module)
    return known and any(is_linear(m) for m in leaves) and joined and not list(module.parameters(recurse=False))


def _calls_function(module: nn.Module) -> bool:
    """An activation that is a function, not a module (`ACT2FN` has both)."""
    return any(callable(v) for name, v in vars(module).items() if "act" in name)


def _simple(module: nn.Module) -> bool:
    """Takes one or two tensors and has a `forward` of its own."""
    fn = forward_of(module)
    if fn is None or is_attention(module):
        return False
    taken = list(inspect.signature(fn).parameters.values())[1:]
    return 1 <= len(taken) <= 2 and all(p.kind == p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in taken)


def parts(model: nn.Module, never: frozenset[nn.Module]) -> Iterator[tuple[str, nn.Module, str]]:
    """Path, module and kind ("attention", "block", "norm") of all that is compiled; of blocks the outermost."""
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside or module in never:
            continue
        if is_attention(module):
            yield path, module, "attention"
        elif is_block(module, never):
            inside.update(module.modules())
            yield path, module, "block"
        elif is_norm(module):
            yield path, module, "norm"


def compiled_forward(module: nn.Module, row: Row, runner: str) -> Callable[..., Any] | None:
    """What stands in for the `forward` of a norm or a block; None, with the reason in the row, where nothing can."""
    fn = forward_of(module)
    if fn is None:
        row.state, row.why = "left", "its forward is replaced already"
        return None
    if type(module) in LIBRARY:
        row.state, row.why = "left", "one operator of PyTorch already"
        return None
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    key, tried = (fn, type(module), shapes), Attempts(row, runner)
    drops = [m for m in module.modules() if isinstance(m, DROPOUTS) and m.p > 0]
    if drops:
        row.why = "in training, dropout's numbers are PyTorch's"

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor):
                free(x, *range(x.ndim - 1))
        strict = not (self.training and drops)
        situation = (self.training, torch.is_grad_enabled())
        run = tried.fused(key, lambda: fn, strict=strict)
        return tried.run(situation, lambda: run(self, *args, **kwargs), lambda: fn(self, *args, **kwargs))

    forward.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
    return forward


def rotary_forward(module: nn.Module, row: Row, runner: str) -> Callable[..., Any] | None:
    """An attention's `forward` with its rotary function compiled; None where it cannot be copied."""
    fn = forward_of(module)
    rotary: Any = inspect.unwrap(fn).__globals__.get(ROTARY) if fn is not None else None
    tried = Attempts(row, runner)

    def rotated(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        key = (rotary, q.ndim, q.shape[-1], k.shape[-1], cos.shape[-1], args, tuple(kwargs.items()))

        def compiled() -> Any:
            for x in (q, k):
                free(x, 0, 2)
            for x in (cos, sin):
                free(x, 0, 1)
            return tried.fused(key, lambda: rotary)(q, k, cos, sin, *args, **kwargs)

        situation = torch.is_grad_enabled()
        return tried.run(situation, compiled, lambda: rotary(q, k, cos, sin, *args, **kwargs))

    copied = _reading(fn, ROTARY, rotated) if fn is not None and rotary is not None else None
    if copied is None:
        row.state, row.why = "left", "its forward is replaced already"
    return copied


def _reading(fn: types.FunctionType, name: str, value: object) -> types.FunctionType | None:
    """A copy of a function to which a global name means `value`, in copies of its decorators (as `functools.wraps`
    makes them). None: it does not read the name, or a decorator keeps the function elsewhere than in its closure."""
    scope, closure, inner = fn.__globals__, fn.__closure__ or (), vars(fn).get("__wrapped__")
    copied = None
    if name in fn.__code__.co_names:
        scope = {**scope, name: value}
    else:
        copied = _reading(inner, name, value) if isinstance(inner, types.FunctionType) else None
        if copied is None or not any(c.cell_contents is inner for c in closure):
            return None
        closure = tuple(types.CellType(copied) if c.cell_contents is inner else c for c in closure)
    made = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, closure)
    made.__kwdefaults__ = fn.__kwdefaults__
    vars(made).update(vars(fn) if copied is None else {**vars(fn), "__wrapped__": copied})
    return made
