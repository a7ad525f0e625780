"""Operators of torch as instructions of a tape that C++ calls by their names, without Python (`native/operator.h`).

    form ::= (name, overload, value...)                  values in the order of the schema, defaults filled in
    value ::= None | bool | int | float | str | dtype | device | layout | memory format
            | (TENSOR, place) | (INTS, int...) | (FLOATS, float...) | (BOOLS, bool...) | (TENSORS, place or -1 ...)
            | (OPTIONAL, place or -1 ...)                a place among the instruction's slots; -1: no tensor
            | (NUMBER, int or float)                     a number where the schema has a tensor

Operators with arguments of other types (generators, streams) and those of other libraries than torch's own, which may
be Python, have no form: a tape calls them from Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch


class Given(IntEnum):
    """What a tuple among the values is; the same numbers in `operator.h`."""

    TENSOR = 0
    INTS = 1
    FLOATS = 2
    BOOLS = 3
    TENSORS = 4
    OPTIONAL = 5
    NUMBER = 6


#: Lists by the type of their elements in a schema.
_LISTS = {"int": Given.INTS, "SymInt": Given.INTS, "float": Given.FLOATS, "bool": Given.BOOLS}
_LISTS |= {"Tensor": Given.TENSORS, "Optional[Tensor]": Given.OPTIONAL}
#: Numbers as a schema's types have them: Python takes True for 1, and 1 for 1.0.
_NUMBERS: Mapping[str, Callable[[Any], object]] = {"int": int, "SymInt": int, "float": float, "bool": bool}
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def form_of(func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...] | None:
    """The form of a call; tensors have places in the order in which they stand in `args`, then `kwargs`. None: it has
    none."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return None
    places = {id(x): n for n, x in enumerate(_tensors((*args, *kwargs.values())))}
    values: list[object] = []
    for n, a in enumerate(func._schema.arguments):
        x = args[n] if n < len(args) else kwargs.get(a.name, a.default_value)
        try:
            values.append(_value(str(a.type), x, places))
        except TypeError:
            return None
    return (func._schema.name, func._schema.overload_name, *values)


def _tensors(xs: Sequence[object]) -> list[torch.Tensor]:
    """The tensors among values and their lists, in the order of torch's pytrees."""
    found: list[torch.Tensor] = []
    for x in xs:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += _tensors(x)
    return found


def _value(kind: str, x: object, places: Mapping[int, int]) -> object:
    """A value for a parameter of this type. TypeError: it has no form."""
    optional = kind.startswith("Optional[")
    kind = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
    if x is None:
        return None
    if isinstance(x, torch.Tensor):
        return (int(Given.TENSOR), places[id(x)])
    if kind.startswith("List["):
        return _list(kind.removeprefix("List[").removesuffix("]"), x, places)
    if kind == "Tensor":
        if type(x) not in (bool, int, float):
            raise TypeError(f"{x!r} for a tensor")
        return (int(Given.NUMBER), x)
    if kind in _NUMBERS and isinstance(x, int) and not isinstance(x, torch.SymInt):
        return _NUMBERS[kind](x)
    if type(x) not in _PLAIN:
        raise TypeError(f"{x!r} for {kind}")
    return x


def _list(kind: str, xs: Any, places: Mapping[int, int]) -> tuple[object, ...]:
    given = _LISTS.get(kind)
    if given is None or not isinstance(xs, list | tuple):
        raise TypeError(f"a list of {kind}")
    if given in (Given.TENSORS, Given.OPTIONAL):
        return (int(given), *(-1 if x is None else places[id(x)] for x in xs))
    made = {Given.INTS: int, Given.FLOATS: float, Given.BOOLS: bool}[given]
    if any(isinstance(x, torch.SymInt) or not isinstance(x, int | float) for x in xs):
        raise TypeError(f"{xs!r} for a list of {kind}")
    return (int(given), *map(made, xs))
