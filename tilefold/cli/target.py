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

import math
import os
import re
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from tilefold.algebra.dtypes import DType
from tilefold.cli.place import split
from tilefold.errors import ParseError, TilefoldError
from tilefold.frontend.fuse import signature_of
from tilefold.user_file import imported, made

Function = Callable[..., Any]
_TENSOR = re.compile(r"(\w+)\s*\[([\d\s,]*)\]\s*(?:<\s*(\d+))?")
_WORDS: dict[str, object] = {"true": True, "false": False, "none": None}


def load(target: str) -> tuple[Function, ModuleType]:
    """The function that `FILE:FUNCTION` names, and its module; TilefoldError if there is none."""
    path, name = split(target)
    file, module = str(path), imported(path)
    fn = getattr(module, name, None)
    if isinstance(fn, type):
        raise TilefoldError(f"{name} is a class", hint=f"name an instance of it, as `model = {name}()` in {file}")
    if not callable(fn):
        functions = (n for n, v in vars(module).items() if isinstance(v, FunctionType) and not n.endswith("_inputs"))
        known = ", ".join(sorted(functions)) or "none"
        raise TilefoldError(f"{file} has no function {name}", hint=f"its functions: {known}")
    return fn, module


def arguments(fn: Function, module: ModuleType, spec: str | None, *, seed: int = 0) -> tuple[Any, ...]:
    """Positional arguments for `fn`: from `spec`, or by the file's convention (see the module)."""
    torch.manual_seed(seed)
    if spec is not None:
        positional, named = parse(spec)
        return _bind(fn, positional, named)
    own = getattr(fn, "__name__", type(fn).__name__)
    here = [n for n, v in vars(module).items() if v is fn]  # a lambda's own name is `<lambda>`
    names = [n for n in (own, *here) if n.isidentifier()]
    for convention in (*(f"{n}_inputs" for n in names), "example_inputs"):
        if callable(getattr(module, convention, None)):
            values = made(module, convention)
            if isinstance(values, Mapping):
                return _bind(fn, (), dict(values))
            return _bind(fn, tuple(values) if isinstance(values, (tuple, list)) else (values,), {})
    raise TilefoldError(
        f"no arguments for {names[0]}",
        hint=f'give --args "q=f32[2, 8, 128, 64], ..." or define {names[0]}_inputs() in the file, returning a tuple',
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
    _check_memory(shape, text)
    if dtype.is_int:
        if m[3] is None or int(m[3]) == 0:
            raise ParseError(f"an integer tensor needs a positive bound: {text!r}", hint=f"write {text} < 1000")
        most = torch.iinfo(dtype.torch_dtype).max
        if int(m[3]) - 1 > most:
            raise ParseError(f"{dtype.value} holds no number beyond {most}: {text!r}")
        return torch.randint(int(m[3]), shape).to(dtype.torch_dtype)
    if m[3] is not None:
        raise ParseError(f"only integer tensors take a bound: {text!r}")
    if dtype is DType.BOOL:
        return torch.rand(shape) < 0.5
    return torch.randn(shape, dtype=torch.float64).to(dtype.torch_dtype)


def _check_memory(shape: list[int], text: str) -> None:
    """ParseError for a tensor (8 bytes an element while it is made) that this machine has no memory for."""
    need = 8 * math.prod(shape)
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > have:
        sizes = f"{need / 2**30:.3g} GiB" if need < 2**80 else "more than 2^80 bytes"
        raise ParseError(f"{text} takes {sizes} to make; this machine has {have / 2**30:.3g} GiB")


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
    name = getattr(fn, "__name__", type(fn).__name__)
    signature = signature_of(fn)
    if signature is None:
        if named:
            raise TilefoldError(
                f"{name} has no signature to find {', '.join(named)} in", hint="give values by position"
            )
        return positional
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as err:
        raise TilefoldError(f"the arguments do not fit {name}{signature}: {err}") from None
    if bound.kwargs:
        raise TilefoldError(f"{name} takes {', '.join(bound.kwargs)} by name only", hint="give them a default")
    return bound.args
