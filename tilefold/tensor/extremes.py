"""Maxima that have to be one of their elements to the last bit.

    count(x == amax(x)),   where(x < topk(x), -inf, x),   d amax(x) / dx = (x == amax(x)) / count(x == amax(x))

A Fold may take a factor out of a maximum, amax(|x r w|) = r amax(|x w|), whose product rounds in another order: no
element is the maximum then, the gradient is divided by none, and a threshold leaves its own element out. So it does
not where a program compares what it found (`algebra.cascade.Reduction.exact`), or returns it to one that may: the
backward of a program does.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilefold.algebra.expr import Call, Cast, Expr, Load, walk
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute

_ORDER = ("max", "min", "topk")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
#: Functions that give one of their arguments, or its size.
_KEEPING = ("neg", "abs", "maximum", "minimum", "where")


def is_exact(g: Graph, c: Compute) -> bool:
    """Whether a maximum is compared, or returned, as it is."""
    return c.reducer in _ORDER and c.name in g.once("exact", _exact)


def _exact(g: Graph) -> frozenset[str]:
    """Names of all that are."""
    todo = [*g.program.outputs, *(t for c in g.program.body for t in _compared(c.body))]
    found, seen = set[str](), set(todo)
    while todo:
        c = g.by_name.get(todo.pop())
        if c is None or not (c.reducer is None or c.reducer in _ORDER):
            continue
        if c.reducer is not None:
            found.add(c.name)
        fresh = [t for t in _kept(c.body) if t not in seen]
        seen.update(fresh)
        todo += fresh
    return frozenset(found)


def _compared(e: Expr) -> Iterator[str]:
    for n in walk(e):
        if isinstance(n, Call) and n.op in _COMPARED:
            for a in n.args:
                yield from _kept(a)


def _kept(e: Expr) -> Iterator[str]:
    """Tensors one of whose elements an expression may be, up to its sign."""
    match e:
        case Load(tensor, _):
            yield tensor
        case Cast(arg, _):
            yield from _kept(arg)
        case Call(op, args) if op in _KEEPING:
            for a in args[1:] if op == "where" else args:
                yield from _kept(a)
