"""A fused function inside a graph of others: one operator, `tilefold::fused`, that their compilers do not look into.

`torch.compile` and `torch.export` would else take a fused function apart into the operators that it was made of. In a
graph it is a name, a call and tensors (`fused.py`). Tilefold's own graphs take it apart (`taken_apart`): there the
whole is fused.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch

from tilefold.frontend.registered.fused import Structure, find, flat, fused, importable, structures
from tilefold.log import warn

_own: ContextVar[bool] = ContextVar("taken_apart", default=False)
#: Names of which `_stays_here` has spoken.
_told: set[str] = set()


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
    results = _in_graph(name, *args, **kwargs)
    return _put_together(_structure(name), results)


@torch.compiler.allow_in_graph
def _in_graph(name: str, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Flat results."""
    symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
    computed = any(isinstance(v, symbolic) for v in (*args, *kwargs.values()))  # sizes, which are no values for JSON
    if _own.get() or _differentiated() or computed or (torch.compiler.is_exporting() and _stays_here(name)):
        return tuple(flat(name, find(name).fn(*args, **kwargs)))
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    call = json.dumps([[_written(v) for v in args], {k: _written(v) for k, v in kwargs.items()}])
    return tuple(fused(name, call, tensors))


def _stays_here(name: str) -> bool:
    """Whether no other process could find the function, which is said once."""
    if importable(name):
        return False
    if name not in _told:
        _told.add(name)
        warn(
            "%s is taken apart in what torch.export makes: other processes could not import it\n"
            "  hint: define it at the top of a module, as @tilefold.fuse def f(...)",
            name,
        )
    return True


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


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _structure(name: str) -> Structure:
    return structures[name]


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
