"""Dataclasses survive JSON exactly; a text that holds anything else is refused and runs nothing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import pytest

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr
from tilefold.errors import ParseError
from tilefold.runtime import records


@dataclass(frozen=True)
class Leaf:
    value: float | int | bool | str | None
    kind: DType = DType.F32


@dataclass(frozen=True)
class Tree:
    parts: tuple[Leaf, ...]
    names: frozenset[str]
    table: dict[str, Leaf]
    derived: int = field(init=False, default=3)


CLASSES = (Leaf, Tree, Call, Const, DType)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, True, math.inf, -math.inf, math.nan, 2**70, "a\n\u2200", "", None])
def test_values_keep_their_type_and_sign(value):
    back = records.load(records.dump(Leaf(value, DType.BF16)), CLASSES)
    assert type(back.value) is type(value) and repr(back) == repr(Leaf(value, DType.BF16))


def test_trees_come_back_and_share_what_is_equal():
    x = Tree((Leaf(1), Leaf(1), Leaf(1.0)), frozenset("ab"), {"t": Leaf(None)})
    text = records.dump(x)
    assert records.load(text, CLASSES) == x and records.dump(records.load(text, CLASSES)) == text
    assert len(json.loads(text)["nodes"]) == 4  # 1 and 1.0 are not the same


def test_what_is_shared_is_written_once():
    e: Expr = Const(1.5, DType.F32)
    for _ in range(60):
        e = Call("add", (e, e))  # 2**60 leaves as a tree
    text = records.dump(e)
    assert len(text) < 5000 and records.dump(records.load(text, CLASSES)) == text


def test_what_has_no_form_is_refused():
    with pytest.raises(TypeError, match="object has no form"):
        records.dump(Leaf(object()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "{}", "\xff", "[" * 10**5, '{"nodes": []}', '{"nodes": 3, "root": 1}'),
        '{"nodes": [["Popen", "touch /tmp/x"]], "root": ["n", 0]}',
        '{"nodes": [["Leaf"]], "root": ["n", 0]}',
        '{"nodes": [["Leaf", 1, 2, 3]], "root": ["n", 0]}',
        '{"nodes": [[]], "root": 0}',
        '{"nodes": [], "root": ["n", 0]}',
        '{"nodes": [["Leaf", ["n", -1], 0]], "root": 1}',
        '{"nodes": [], "root": ["e", "DType", "f31"]}',
        '{"nodes": [], "root": ["e", "Leaf", 1]}',
        '{"nodes": [["DType", "f32"]], "root": 1}',
        '{"nodes": [], "root": ["d", 1]}',
        '{"nodes": [], "root": ["x"]}',
        '{"nodes": [], "root": {}}',
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ParseError, match="not a record"):
        records.load(text, CLASSES)
