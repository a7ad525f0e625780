"""Sums of which a mask leaves nothing.

Law: y = sum over l of where(c, x, 0) v  is  where(any[l] c, y, 0)

Folds divide such a sum by what is constant along l, once: probabilities e / t that are zeroed after the softmax become
(sum of where(c, e, 0) v) / t. Where the mask discards a whole row (a query without keys) the sum is 0 and stays 0, also
where t is 0 or nan; so the statement says it. (Values of v that are inf or nan in such a row do not count then.)
Random masks are left out: dropout multiplies, so eager has nan there as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    call,
    dims_used,
    loads,
    ops_used,
    substitute,
    walk,
)
from tilefold.algebra.ops import RANDOM
from tilefold.names import fresh
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute, Program


def guard_masked_sums(p: Program) -> Program:
    """The program in which masked sums over a fold's elements are 0 where the mask leaves none of them."""
    g = Graph.of(p)
    taken = {*p.names, *p.sizes, *p.syms, *(i.name for i in p.inputs)}
    body: list[Compute] = []
    for c in p.body:
        mask = next(_masks(g, c), None) if c.reducer == "sum" else None
        if mask is None:
            body.append(c)
            continue
        over = tuple(d for d in c.rdims if d in dims_used(mask))
        dims = tuple(d for d in c.dims if d in dims_used(mask))
        if over:
            some = Compute(fresh(f"{c.name}_any", taken), dims, DType.BOOL, mask, "any", over, loc=c.loc)
            body.append(some)
            mask = Load(some.name, _at(dims))
        whole = replace(c, name=fresh(f"{c.name}_all", taken))
        kept = call("where", mask, Load(whole.name, _at(c.dims)), 0.0)
        body += [whole, replace(c, body=kept, reducer=None, rdims=())]
    return replace(p, body=tuple(body))


def _at(dims: tuple[str, ...]) -> tuple[Expr, ...]:
    return tuple(Index(d) for d in dims)


def _masks(g: Graph, c: Compute) -> Iterator[Expr]:
    """Masks of factors of what is summed, over values that something constant along it divides."""
    summed = set(c.rdims)
    for e in _factors(c.body):
        if isinstance(e, Load) and e.tensor in g.by_name and g.by_name[e.tensor].reducer is None:
            m = g.by_name[e.tensor]
            e = substitute(m.body, {Index(d): ix for d, ix in zip(m.dims, e.index, strict=True)})
        for mask, x in _masked(e):
            random = not ops_used(mask).isdisjoint(RANDOM)
            negated = isinstance(mask, Call) and mask.op == "not"  # as a safe softmax: its fold's own finish minds it
            if (summed & dims_used(mask) or not negated) and not random and _scaled(g, x, summed):
                yield mask


def _factors(e: Expr) -> Iterator[Expr]:
    match e:
        case Call("mul", (a, b)):
            yield from _factors(a)
            yield from _factors(b)
        case Cast(arg, _):
            yield from _factors(arg)
        case _:
            yield e


def _masked(e: Expr) -> Iterator[tuple[Expr, Expr]]:
    """(mask, value) of a value that is 0 where the mask is false."""
    match e:
        case Cast(arg, _):
            yield from _masked(arg)
        case Call("where", (c, x, Const(zero, _))) if zero == 0:
            yield c, x
        case Call("where", (c, Const(zero, _), x)) if zero == 0:
            yield call("not", c), x


def _scaled(g: Graph, x: Expr, summed: set[str]) -> bool:
    """Whether x is divided by a reduction of this program that is constant along the summed dims."""
    for e in walk(x):
        match e:
            case Call("div", (_, t)) if not summed & dims_used(t):
                if any(ld.tensor in g.by_name and g.by_name[ld.tensor].reducer for ld in loads(t)):
                    return True
    return False
