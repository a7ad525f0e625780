"""A fused function inside a graph of others: one operator, `tilefold::fused`, that their compilers do not look into.

`torch.compile` and `torch.export` would else take a fused function apart into the operators that it was made of. In a
graph it is a name, a call and tensors. The name is `module:function`, by which another process imports the function;
the call is JSON: which arguments are tensors, and the values of all others. The operator has no kernel of its own: it
calls the compiled function. Its gradient is the function's (`torch.func.vjp`), captured and compiled as any other
function, so that the forward values are computed again rather than kept. Tilefold's own graphs take it apart
(`taken_apart`): there the whole is fused.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import FunctionType
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
_structures: dict[str, Structure] = {}
_own: ContextVar[bool] = ContextVar("taken_apart", default=False)


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
        module, _, path = name.partition(":")
        try:
            found = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError):
            hint = "define it at the top of a module that can be imported"
            raise TilefoldError(f"the graph calls {name}, which is not to be found", hint=hint) from None
        if not hasattr(found, "gradient"):
            raise TilefoldError(f"{name} is not fused", hint="decorate it with tilefold.fuse")
    _in_graphs[name] = found
    return found


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def alone(name: str) -> bool:
    """Whether a function works on its arguments alone: tensors that it finds elsewhere belong to the graph."""
    fn = find(name).fn
    if not isinstance(fn, FunctionType):
        return False
    around = inspect.getclosurevars(fn)
    found = (*around.nonlocals.values(), *around.globals.values())
    return not any(isinstance(v, torch.Tensor | torch.nn.Module) for v in found)


def simple(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether a call can be an operator's: of tensors and of values that JSON holds, with a tensor among them."""
    values = (*args, *kwargs.values())
    fits = all([v is None or isinstance(v, torch.Tensor | int | float | bool | str) for v in values])
    return fits and any([isinstance(v, torch.Tensor) for v in values])


def in_graph(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of a fused function while a graph is being made."""
    flat = _in_graph(name, *args, **kwargs)
    return _put_together(_structure(name), flat)


@torch.compiler.allow_in_graph
def _in_graph(name: str, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Flat results."""
    symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
    if _own.get() or _differentiated() or any(isinstance(v, symbolic) for v in (*args, *kwargs.values())):
        return tuple(_flat(name, find(name).fn(*args, **kwargs)))  # a size that is computed is no value for JSON
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    call = json.dumps([[_written(v) for v in args], {k: _written(v) for k, v in kwargs.items()}])
    return tuple(fused(name, call, tensors))


def _differentiated() -> bool:
    """Whether a transformation other than `vmap` is under way, which operators with gradients of their own do not
    take (torch's have no `setup_context`)."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in stack)


@contextmanager
def taken_apart() -> Iterator[None]:
    """While Tilefold makes a graph of its own: functions in it are what they compute, so that the whole is fused."""
    before = _own.set(True)
    try:
        yield
    finally:
        _own.reset(before)


def _flat(name: str, results: Any) -> list[torch.Tensor]:
    """The tensors of results; how they are put together is remembered."""
    flat: list[torch.Tensor] = []

    def shape(x: Any) -> Structure:
        if isinstance(x, torch.Tensor):
            flat.append(x)
            return len(flat) - 1
        if type(x) in (tuple, list):
            return type(x).__name__, tuple(shape(y) for y in x)
        if type(x) is dict and all(isinstance(k, str) for k in x):
            return "dict", tuple((k, shape(y)) for k, y in x.items())
        hint = "return tensors, or tuples, lists and dictionaries of tensors"
        raise UnsupportedError(f"{name} returns {type(x).__name__}, which no operator can", hint=hint)

    _structures[name] = shape(results)
    return flat


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _structure(name: str) -> Structure:
    return _structures[name]


def _put_together(structure: Structure, flat: Sequence[torch.Tensor]) -> Any:
    if isinstance(structure, int):
        return flat[structure]
    kind, parts = structure
    if kind == "dict":
        return {k: _put_together(v, flat) for k, v in parts}
    made = [_put_together(v, flat) for v in parts]
    return made if kind == "list" else tuple(made)


def _written(v: Any) -> Any:
    return {"tensor": None} if isinstance(v, torch.Tensor) else v


def _results(name: str, call: str, tensors: Sequence[torch.Tensor], run: Callable[..., Any]) -> list[torch.Tensor]:
    """Flat results of a call, none of which shares memory with another or with an argument."""
    flat = _flat(name, _called(run, json.loads(call), tensors))
    return _apart(flat, tensors)


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
