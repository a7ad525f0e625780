"""Nodes of expressions: what is equal, and how they are made."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from itertools import combinations

import pytest

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    Size,
    Sym,
    places,
    rename_dims,
    substitute,
    times_read,
    transform,
    type_of,
    walk,
)
from tilefold.tensor.rewrite import rename_loads

NODES: list[Expr] = [
    *(Const(x, DType.F32) for x in (0.0, -0.0, 1.0, math.nan, math.inf)),
    *(Const(1, t) for t in (DType.F64, DType.I64, DType.BOOL)),
    *(Index("i"), Index("j"), Size("i"), Sym("i")),
    *(Load("x", (Index("i"),)), Call("neg", (Index("i"),)), Cast(Index("i"), DType.F32)),
]


def test_nodes_are_equal_where_they_say_the_same():
    for x in NODES:
        again = copy.deepcopy(x)
        assert again == x and hash(again) == hash(x) and pickle.loads(pickle.dumps(x)) == x
    assert not any(x == y for x, y in combinations(NODES, 2))
    assert Const(math.nan, DType.F32) == Const(-math.nan, DType.F32)
    assert Const(1, DType.F32) == Const(1.0, DType.F32)


def test_constructors_are_those_of_dataclasses_and_faster():
    for x in NODES:
        given = {f.name: getattr(x, f.name) for f in fields(x)}  # type: ignore[arg-type]
        assert type(x)(**given) == x == type(x)(*given.values()) and replace(x, **given) == x  # type: ignore[type-var]
        with pytest.raises(TypeError):
            type(x)()
        with pytest.raises(FrozenInstanceError):
            setattr(x, next(iter(given)), 0)
    names = {n for kind in (Const, Index, Size, Load, Call, Cast) for n in kind.__init__.__code__.co_names}
    assert "__setattr__" not in names  # by name it takes twice the time


def doubled(levels: int, tensor: str = "x", dim: str = "i") -> Expr:
    """One load, added to itself again and again: written out, 2^levels of them."""
    e: Expr = Load(tensor, (Index(dim),))
    for _ in range(levels):
        e = e + e
    return e


def test_what_is_shared_is_looked_at_once():
    e, levels = doubled(90), 90
    assert e == doubled(levels) and e != doubled(levels, "y") and hash(e) == hash(doubled(levels))
    assert rename_dims(e, {"i": "j"}) == doubled(levels, dim="j")
    assert rename_loads(e, lambda ld: Load("y", ld.index)) == doubled(levels, "y")
    assert substitute(e, {Index("i"): Index("j")}) == doubled(levels, dim="j")
    assert transform(e, lambda x: Index("j") if x == Index("i") else None) == doubled(levels, dim="j")
    assert type_of(e, {"x": DType.F32}.__getitem__) is DType.F32
    assert times_read(e) == {"x": 2**levels}
    assert len(list(walk(e))) == 1 + 2 * levels + 2


def test_paths_are_followed_where_they_are_asked_for():
    e = doubled(3)
    assert sum(isinstance(n, Load) for n in places(e)) == 8 == times_read(e)["x"]
    assert sum(isinstance(n, Load) for n in walk(e)) == 2
