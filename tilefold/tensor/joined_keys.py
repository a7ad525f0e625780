"""Sums by keys (`tensor.keyed`) that are only added up are one sum, over the elements of all of them.

    sum over k of a(k) + sum over l of b(l) = sum over m of where(m < K, a(m), b(m - K)),    m of K + L elements

A tensor of which rows are picked several times (heads and tails of triples) has a gradient a pick: apart, each is a
table of its own, written as zeros, added to, and read again for their sum. Sums in 16 bits are rounded once instead of
each before they are added. The second's elements begin at a multiple of `PART`, so that a thread block has elements of
one of them; those in between are no row's. Side conditions: nothing else reads the terms; one axis of elements each, of
known extent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import reduce

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, call, lit, substitute, walk
from tilefold.names import fresh
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.keyed import keyed
from tilefold.tensor.rewrite import in_order

#: Elements that a thread block may have of one sum: where another's begin is a multiple of it.
PART = 256


def joined(p: Program, sums: Collection[str]) -> Program:
    """The program in which no two of these sums are only added up."""
    while True:
        found = next(_pairs(p, sums), None)
        if found is None:
            return p
        reader, both, x, y = found
        p, one = _concatenated(p, x, y)
        instead = replace(reader, body=substitute(reader.body, {both: _total(both)}))
        known = {x.name: one, reader.name: instead}
        p = in_order(replace(p, body=tuple(known.get(c.name, c) for c in p.body if c.name != y.name)))


def _pairs(p: Program, sums: Collection[str]) -> Iterator[tuple[Compute, Expr, Compute, Compute]]:
    """Sums of two: the map that adds them, where, and the two."""
    g = Graph.of(p)
    alone = {c.name: c for c in p.body if c.name in sums and c.name not in p.outputs and _known(p, g, c)}
    for c in p.body:
        if c.reducer is not None or not any(m in alone for m in g.producers[c.name]):
            continue
        read = [e.tensor for e in walk(c.body) if isinstance(e, Load)]
        for e in walk(c.body):
            if not isinstance(e, Call) or e.op != "add":
                continue
            (a, like), (b, other) = map(_read, e.args)
            if a is None or b is None or like is not other or a.index != b.index:
                continue
            if all(read.count(ld.tensor) == 1 and ld.tensor in alone for ld in (a, b)) and _alike(p, alone, a, b):
                yield c, e, alone[a.tensor], alone[b.tensor]


def _read(e: Expr) -> tuple[Load | None, DType | None]:
    """What a term reads, and the type that it is rounded to."""
    match e:
        case Cast(Load() as read, dtype) if dtype.is_float:
            return read, dtype
        case Load():
            return e, None
    return None, None


def _total(both: Expr) -> Expr:
    """What stands in the place of two terms: the first, which has the sum of both."""
    assert isinstance(both, Call)
    return both.args[0]


def _known(p: Program, g: Graph, c: Compute) -> bool:
    """Whether a sum has one reader, and elements along one axis of known extent."""
    return len(g.consumers[c.name]) == len(c.rdims) == 1 and isinstance(p.sizes[c.rdims[0]], Const)


def _alike(p: Program, sums: dict[str, Compute], a: Load, b: Load) -> bool:
    """Whether two sums have the same rows, columns and type."""
    x, y = sums[a.tensor], sums[b.tensor]
    mine, other = keyed(x, p.sizes), keyed(y, p.sizes)
    assert mine is not None and other is not None
    shape = [p.sizes[d] for d in x.dims] == [p.sizes[d] for d in y.dims]
    places = [{c.dims.index(d) for d in k.keys} for c, k in ((x, mine), (y, other))]
    return shape and x.dtype is y.dtype and places[0] == places[1]


def _concatenated(p: Program, x: Compute, y: Compute) -> tuple[Program, Compute]:
    """The sum over the elements of both, under x's name."""
    mine, other = keyed(x, p.sizes), keyed(y, p.sizes)
    assert mine is not None and other is not None
    own, second = (int(p.sizes[c.rdims[0]].value) for c in (x, y))  # type: ignore[attr-defined]
    first = -(-own // PART) * PART
    m = fresh("m", set(p.names))
    at = Index(m)
    of_x: dict[Expr, Expr] = {Index(x.rdims[0]): at}
    of_y: dict[Expr, Expr] = {Index(d): Index(e) for d, e in zip(y.dims, x.dims, strict=True)}
    of_y[Index(y.rdims[0])] = at - first
    early = call("lt", at, first)

    def key(a: Expr, b: Expr) -> Expr:
        a = substitute(a, of_x)
        return call(
            "where", early, a if own == first else call("where", call("lt", at, own), a, -1), substitute(b, of_y)
        )

    def either(a: Expr, b: Expr) -> Expr:
        return call("where", early, substitute(a, of_x), substitute(b, of_y))

    same: list[Expr] = []
    for d, e in zip(x.dims, y.dims, strict=True):
        if d in mine.keys:
            same.append(call("eq", Index(d), key(mine.keys[d], other.keys[e])))
    condition = reduce(lambda a, b: call("and", a, b), same)
    body = call("where", condition, either(mine.value, other.value), lit(0.0))
    sizes = {**p.sizes, m: Const(first + second, DType.I64)}
    return replace(p, sizes=sizes), replace(x, body=body, rdims=(m,))
