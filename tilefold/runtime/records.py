"""Frozen dataclasses as JSON, and back: what is kept between processes without running anything to read it.

    text   ::= {"nodes": [[class, field, ...], ...], "root": value}      fields in order, those that __init__ takes
    value  ::= text | number | true | false | null                       as they are
             | ["n", index]                                              an earlier node; equal objects are one node
             | ["t", value...] | ["s", value...] | ["d", key, value ...] tuple, frozenset (sorted), mapping
             | ["e", class, value]                                       a member of an enumeration

Only classes that the reader lists are made, by their own constructors with arguments of these types. The text forms of
the IRs are for people and leave out what people do not ask for there: lines of the user's code, proofs, derivations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from tilefold.errors import ParseError

#: What JSON has itself.
_PLAIN = frozenset({type(None), bool, int, float, str})


@cache
def _given(kind: Any) -> tuple[str, ...]:
    """Names of the fields of a dataclass that its constructor takes."""
    return tuple(f.name for f in fields(kind) if f.init)


def dump(x: object) -> str:
    """The text of a value. TypeError for what has no form here."""
    writer = _Writer()
    root = writer.value(x)
    return json.dumps({"nodes": writer.nodes, "root": root}, separators=(",", ":"))


def load(text: str | bytes, classes: Iterable[type]) -> Any:
    """The value of a text. ParseError where it is none, or holds another class."""
    try:
        data = json.loads(text)
        reader = _Reader({c.__name__: c for c in classes})
        for node in data["nodes"]:
            reader.add(*node)
        return reader.value(data["root"])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as err:
        raise ParseError(f"not a record: {type(err).__name__}: {err}") from None


class _Writer:
    def __init__(self) -> None:
        self.nodes: list[tuple[Any, ...]] = []
        self._at: dict[str, int] = {}
        self._seen: dict[int, Any] = {}

    def value(self, x: Any) -> Any:
        kind = type(x)
        if kind in _PLAIN:
            return x
        if kind is tuple:
            return ("t", *[y if type(y) in _PLAIN else self.value(y) for y in x])
        found = self._seen.get(id(x))
        if found is None:
            found = self._other(x)
        return found

    def _other(self, x: Any) -> Any:
        kind = type(x)
        if isinstance(x, Enum):
            self._seen[id(x)] = member = ("e", kind.__name__, x.value)
            return member
        if not is_dataclass(kind):
            return self._collection(x)
        node = (kind.__name__, *[self.value(getattr(x, name)) for name in _given(kind)])
        key = repr(node)  # unlike the node itself it tells 1 from True and 1.0, 0.0 from -0.0
        if key not in self._at:
            self._at[key] = len(self.nodes)
            self.nodes.append(node)
        self._seen[id(x)] = found = ("n", self._at[key])
        return found

    def _collection(self, x: Any) -> Any:
        match x:
            case int() | float() | str():
                return x
            case tuple():
                return ("t", *map(self.value, x))
            case frozenset():
                return ("s", *sorted(map(self.value, x), key=json.dumps))
            case Mapping():
                return ("d", *(self.value(v) for item in x.items() for v in item))
        raise TypeError(f"{type(x).__name__} has no form in records")


class _Reader:
    def __init__(self, classes: Mapping[str, type]):
        self._classes, self._made = classes, list[Any]()

    def add(self, name: str, *values: Any) -> None:
        made: Any = self._classes[name]
        if not is_dataclass(made) or len(values) != len(_given(self._classes[name])):
            raise ValueError(f"not a {name}")
        self._made.append(self._classes[name](*map(self.value, values)))

    def value(self, x: Any) -> Any:
        if type(x) in _PLAIN:
            return x
        match x:
            case ["n", int(at)] if at >= 0:
                return self._made[at]
            case ["t", *items]:
                return tuple(map(self.value, items))
            case ["s", *items]:
                return frozenset(map(self.value, items))
            case ["d", *items] if len(items) % 2 == 0:
                return dict(zip(map(self.value, items[::2]), map(self.value, items[1::2]), strict=True))
            case ["e", str(name), value] if issubclass(self._classes[name], Enum):
                return self._classes[name](value)
        raise ValueError(f"not a value: {str(x)[:40]}")
