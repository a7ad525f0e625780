"""`tilefold::fused`: the call of a fused function as an operator of torch, and its gradient.

The name is `module:function`, by which another process imports the function; the call is JSON: which arguments are
tensors, and the values of all others. The operator has no kernel of its own: it calls the compiled function. Its
gradient is the function's (`torch.func.vjp`), captured and compiled as any other function, so that the forward values
are computed again rather than kept.

`tilefold.with_torch` loads this module wherever torch is loaded, since a saved program may call the operator: it
imports nothing that is slow to import.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.utils._pytree import tree_leaves

from tilefold.errors import TilefoldError, UnsupportedError


class Compiled(Protocol):
    """What a graph may name: the function, the function compiled, and its gradient compiled for a call."""

    fn: Callable[..., Any]

    def run(self, *args: Any, **kwargs: Any) -> Any: ...

    def gradient(self, call: str, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]: ...


_named: WeakValueDictionary[str, Any] = WeakValueDictionary()
#: Those that a graph names live as long as the process.
_in_graphs: dict[str, Compiled] = {}
#: How results are put together: the position of a tensor, or a kind and its parts.
Structure = int | tuple[str, tuple[Any, ...]]
#: Of the results of a function's last call.
structures: dict[str, Structure] = {}


def named(compiled: Compiled) -> str:
    """A name for a compiled function that no other of this process has: where it is defined, if that is free."""
    fn = compiled.fn
    base = f"{getattr(fn, '__module__', None)}:{getattr(fn, '__qualname__', type(fn).__name__)}"
    name, n = base, 1
    while name in _named or name in _in_graphs:
        n += 1
        name = f"{base}#{n}"
    _named[name] = compiled
    return name


def find(name: str) -> Compiled:
    """The compiled function of a name; TilefoldError where neither this process nor a module has one."""
    found = _in_graphs.get(name) or _named.get(name)
    if found is None:
        try:
            found = _imported(name)
        except (ImportError, AttributeError, ValueError) as err:
            hint = "define it at the top of a module that can be imported"
            raise TilefoldError(f"the graph calls {name}, which is not to be found: {err}", hint=hint) from None
        if not hasattr(found, "gradient"):
            raise TilefoldError(f"{name} is not fused", hint="decorate it with tilefold.fuse")
    _in_graphs[name] = found
    return found


def importable(name: str) -> bool:
    """Whether another process finds the function of this name by importing its module."""
    try:
        return not name.startswith("__main__:") and _imported(name) is find(name)
    except (ImportError, AttributeError, ValueError):
        return False


def _imported(name: str) -> Any:
    module, _, path = name.partition(":")
    found = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def flat(name: str, results: Any) -> list[torch.Tensor]:
    """The tensors of results; how they are put together is remembered."""
    found: list[torch.Tensor] = []

    def shape(x: Any) -> Structure:
        if isinstance(x, torch.Tensor):
            found.append(x)
            return len(found) - 1
        if type(x) in (tuple, list):
            return type(x).__name__, tuple(shape(y) for y in x)
        if type(x) is dict and all(isinstance(k, str) for k in x):
            return "dict", tuple((k, shape(y)) for k, y in x.items())
        hint = "return tensors, or tuples, lists and dictionaries of tensors"
        raise UnsupportedError(f"{name} returns {type(x).__name__}, which no operator can", hint=hint)

    structures[name] = shape(results)
    return found


def _results(name: str, call: str, tensors: Sequence[torch.Tensor], run: Callable[..., Any]) -> list[torch.Tensor]:
    """Flat results of a call, none of which shares memory with another or with an argument."""
    results = flat(name, _called(run, json.loads(call), tensors))
    return _apart(results, tensors)


def _apart(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    seen = {x.untyped_storage()._cdata for x in others}
    out = []
    for y in results:
        y = y.clone() if y.untyped_storage()._cdata in seen else y
        seen.add(y.untyped_storage()._cdata)
        out.append(y)
    return out


@torch.library.custom_op("tilefold::fused", mutates_args=())
def fused(name: str, call: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The call of a compiled function, flat."""
    return _results(name, call, tensors, find(name).run)


@fused.register_fake
def _fake(name: str, call: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _results(name, call, tensors, find(name).fn)


@torch.library.custom_op("tilefold::fused_gradient", mutates_args=())
def fused_gradient(
    name: str, call: str, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of the floating tensors of a call, from those of its floating results."""
    run = find(name).gradient(call, lambda: _pullback(name, call, len(tensors)))
    made = run(*tensors, *gradients)
    apart = _apart(made, [*tensors, *gradients])
    return [_laid_out(g, x) for g, x in zip(apart, filter(_differentiable, tensors), strict=True)]


@fused_gradient.register_fake
def _fake_gradient(
    name: str, call: str, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in tensors if _differentiable(x)]


def _laid_out(g: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    want = torch.empty_like(like)
    return g if g.stride() == want.stride() and g.dtype == want.dtype else want.copy_(g)


def _differentiable(x: torch.Tensor) -> bool:
    return x.is_floating_point()


def _pullback(name: str, call: str, count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The gradient of a call as a function of its tensors and of its results' gradients."""
    fn, written = find(name).fn, json.loads(call)
    return pullback_of(lambda *tensors: _called(fn, written, tensors), count)


def pullback_of(fn: Callable[..., Any], count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The gradient of a function of `count` tensors: a function of them and of the gradients of its floating results.

    It returns those of the floating arguments.
    """

    def pullback(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors, gradients = values[:count], values[count:]
        free = [n for n, x in enumerate(tensors) if _differentiable(x)]

        def f(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            all_of = list(tensors)
            for n, x in zip(free, xs, strict=True):
                all_of[n] = x
            return tuple([y for y in tree_leaves(fn(*all_of)) if _differentiable(y)])

        pull = torch.func.vjp(f, *[tensors[n] for n in free])[1]
        pulled: tuple[torch.Tensor, ...] = pull(tuple(gradients))
        return pulled

    return pullback


def _called(fn: Callable[..., Any], call: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What a function returns for a written call."""
    args, kwargs = call
    at = iter(tensors)
    args = [next(at) if isinstance(v, dict) else v for v in args]
    kwargs = {k: next(at) if isinstance(v, dict) else v for k, v in kwargs.items()}
    return fn(*args, **kwargs)


def _setup(ctx: Any, inputs: tuple[str, str, Sequence[torch.Tensor]], output: Sequence[torch.Tensor]) -> None:
    ctx.name, ctx.call, tensors = inputs
    ctx.floating = [_differentiable(y) for y in output]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[None, None, list[torch.Tensor | None]]:
    wanted = [g for g, floating in zip(gradients, ctx.floating, strict=True) if floating]
    made = iter(fused_gradient(ctx.name, ctx.call, list(ctx.saved_tensors), wanted))
    return None, None, [next(made) if _differentiable(x) else None for x in ctx.saved_tensors]


fused.register_autograd(_backward, setup_context=_setup)


@fused.register_vmap
def _batched(
    info: Any, in_dims: Any, name: str, call: str, tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[int]]:
    made = one_by_one(info.batch_size, in_dims[2], tensors, lambda one: fused(name, call, one))
    return made, [0] * len(made)


def one_by_one(
    size: int,
    dims: Sequence[int | None],
    tensors: Sequence[torch.Tensor],
    call: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """One call for each of a batch, whose extent is no part of what was compiled; results have it in front.

    dims: where each tensor has it (`torch.vmap`'s `in_dims`); None: the same for all.
    """
    made = []
    for n in range(size):
        made.append(call([x if d is None else x.select(d, n) for x, d in zip(tensors, dims, strict=True)]))
    return [torch.stack(ys) for ys in zip(*made, strict=True)]
