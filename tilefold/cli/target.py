"""What a command works on: `FILE:FUNCTION`, and the arguments to call the function with.

Arguments come from `--args`, or from a function of the same file, `<function>_inputs` or
`example_inputs`, that returns a tuple (by position) or a dict (by name).

    args  ::= item, item, ...         item  ::= value | name=value
    value ::= f32[2, 8, 64]           a tensor of normal random numbers (any float dtype)
            | i64[128] < 1000         of integers in 0 .. 999 (any integer dtype)
            | bool[4, 4]              of coin tosses
            | 0.5 | 3 | true | none   a scalar
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tilefold.algebra.dtypes import DType
from tilefold.errors import ParseError, TilefoldError

Function = Callable[..., Any]
_TENSOR = re.compile(r"(\w+)\s*\[([\d\s,]*)\]\s*(?:<\s*(\d+))?")
_WORDS: dict[str, object] = {"true": True, "false": False, "none": None}


def load(target: str) -> tuple[Function, ModuleType]:
    """The function that `FILE:FUNCTION` names, and its module; TilefoldError if there is none."""
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise TilefoldError(f"not FILE:FUNCTION: {target!r}", hint="for example: model.py:attention")
    path = Path(file)
    if not path.is_file():
        raise TilefoldError(f"no such file: {file}")
    spec = importlib.util.spec_from_file_location(f"{path.stem}_target", path)
    if spec is None or spec.loader is None:
        raise TilefoldError(f"not a Python file: {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` would, for the file's own imports
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    fn = getattr(module, name, None)
    if not callable(fn):
        known = ", ".join(sorted(n for n, v in vars(module).items() if inspect.isfunction(v))) or "none"
        raise TilefoldError(f"{file} has no function {name}", hint=f"its functions: {known}")
    return fn, module


def arguments(fn: Function, module: ModuleType, spec: str | None, *, seed: int = 0) -> tuple[Any, ...]:
    """Positional arguments for `fn`: from `spec`, or by the file's convention (see the module)."""
    torch.manual_seed(seed)
    if spec is not None:
        positional, named = parse(spec)
        return _bind(fn, positional, named)
    name = getattr(fn, "__name__", "")
    for convention in (f"{name}_inputs", "example_inputs"):
        make = getattr(module, convention, None)
        if callable(make):
            made = make()
            if isinstance(made, Mapping):
                return _bind(fn, (), dict(made))
            return _bind(fn, tuple(made) if isinstance(made, (tuple, list)) else (made,), {})
    raise TilefoldError(
        f"no arguments for {name}",
        hint=f'give --args "q=f32[2, 8, 128, 64], ..." or define {name}_inputs() in the file, returning a tuple',
    )


def parse(spec: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named values of an `args` text; ParseError naming the item that cannot be read."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for item in _split(spec):
        name, equals, value = item.partition("=")
        if not equals:
            if named:
                raise ParseError(f"a value by position after one by name: {item!r}")
            positional.append(_value(item))
        elif not name.strip().isidentifier() or name.strip() in named:
            raise ParseError(f"not a new argument name: {name.strip()!r}", hint=f"in {item!r}")
        else:
            named[name.strip()] = _value(value)
    return tuple(positional), named


def _split(spec: str) -> list[str]:
    """Split at commas outside brackets."""
    return [s.strip() for s in re.split(r",(?![^\[]*\])", spec) if s.strip()]


def _value(text: str) -> Any:
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    m = _TENSOR.fullmatch(text)
    if m is None:
        return _number(text)
    try:
        dtype = DType(m[1])
    except ValueError:
        raise ParseError(f"unknown dtype in {text!r}", hint="one of " + ", ".join(d.value for d in DType)) from None
    shape = [int(s) for s in m[2].split(",") if s.strip()]
    if dtype.is_int:
        if m[3] is None or int(m[3]) == 0:
            raise ParseError(f"an integer tensor needs a positive bound: {text!r}", hint=f"write {text} < 1000")
        return torch.randint(int(m[3]), shape).to(dtype.torch_dtype)
    if m[3] is not None:
        raise ParseError(f"only integer tensors take a bound: {text!r}")
    if dtype is DType.BOOL:
        return torch.rand(shape) < 0.5
    return torch.randn(shape, dtype=torch.float64).to(dtype.torch_dtype)


def _number(text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ParseError(
        f"not a tensor or a number: {text!r}", hint='write f32[2, 8, 64], "i64[128] < 1000", bool[4] or 0.5'
    )


def _bind(fn: Function, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    name = getattr(fn, "__name__", repr(fn))
    try:
        bound = inspect.signature(fn).bind(*positional, **named)
    except TypeError as err:
        raise TilefoldError(f"the arguments do not fit {name}{inspect.signature(fn)}: {err}") from None
    if bound.kwargs:
        raise TilefoldError(f"{name} takes {', '.join(bound.kwargs)} by name only", hint="give them a default")
    return bound.args
