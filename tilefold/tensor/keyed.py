"""Sums over elements, each of which belongs to one row, the key, or to one place along several axes.

    y[r, j] = sum over k of where(key(k) == r, v(k, j), 0)     is     y = 0;  y[key(k), j] += v(k, j) for all k, j

Keys are data, or follow from an element's place (patches that overlap are put together so). Left, every row looks at
all elements; right, every element is added where it belongs, in any order. Gradients of gathers and embeddings,
`index_add` and bins are such sums. Other dims of the result (heads, batches) are the element's own:
`y[b, r] = sum over k of where(key(b, k) == r, v(b, k), 0)`. A key that is no row's adds nothing on either side.
Maxima are the same, of -inf instead of 0; they do not depend on the order.

Rows that were cut in digits (a canvas that is seen as an image) have one each:

    r D + s == key, s of D or fewer     is     r == key // D and s == key % D
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf

from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, call, dims_used
from tilefold.tensor.analysis import Graph, expr_flops
from tilefold.tensor.index_simplify import const, poly
from tilefold.tensor.inline import checked_inside, converted, too_long
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.rewrite import drop_dead, rename_loads, substitute_map

#: Arithmetic (in adds) of a map that each of several sums computes again: less than to write and read an element.
AGAIN = 32
#: What an element of another row is, of the reducers whose parts join in any order.
NOTHING = {"sum": 0.0, "max": -inf}


@dataclass(frozen=True, slots=True)
class Keyed:
    """keys: of the dims of the result that elements say; value: of an element; dims: of the elements, in the order of
    memory."""

    keys: Mapping[str, Expr]
    value: Expr
    dims: tuple[str, ...]


def keyed(c: Compute, sizes: Mapping[str, Expr]) -> Keyed | None:
    """What a statement of a program with these sizes sums (or has the maximum of) by which key, if it does."""
    if c.reducer not in NOTHING or c.index_name is not None or not c.dtype.is_float:
        return None
    e = c.body
    while isinstance(e, Cast) and e.dtype is c.dtype.compute:
        e = e.arg
    match e:
        case Call("where", (condition, value, Const(none))) if none == NOTHING[c.reducer]:
            keys = _keys(c, condition, sizes)
        case _:
            return None
    if not keys or dims_used(value) & keys.keys() or any(dims_used(k) & keys.keys() for k in keys.values()):
        return None
    at = min(c.dims.index(d) for d in keys)
    rest = [d for d in c.dims if d not in keys]
    before = sum(c.dims.index(d) < at for d in rest)
    return Keyed(keys, value, (*rest[:before], *c.rdims, *rest[before:]))


def _keys(c: Compute, condition: Expr, sizes: Mapping[str, Expr]) -> dict[str, Expr]:
    """The dims of the result that a condition compares with what elements say; none where it says something else."""
    found: dict[str, Expr] = {}
    todo = [condition]
    while todo:
        match todo.pop():
            case Call("and", (a, b)):
                todo += (a, b)
            case Call("eq", (a, b)):
                here = _digits(c, a, b, sizes) or _digits(c, b, a, sizes)
                if not here or here.keys() & found.keys():
                    return {}
                found |= here
            case _:
                return {}
    return found if set(c.rdims) & frozenset().union(*map(dims_used, found.values())) else {}


def _digits(c: Compute, row: Expr, key: Expr, sizes: Mapping[str, Expr]) -> dict[str, Expr]:
    """What of a key each dim of the result is that `row` is made of; nothing where it is no row, or the key the element
    itself."""
    if isinstance(key, Index) or not dims_used(row) or not dims_used(row) <= {*c.dims}:
        return {}
    if isinstance(row, Index):
        return {row.dim: key}
    steps = dict[str, int]()
    for mono, step in poly(row, sizes).items():
        match mono:
            case (Index(d),):
                steps[d] = step
            case _:
                return {}
    order = sorted(steps, key=steps.__getitem__)
    if steps[order[0]] != 1:
        return {}
    found = dict[str, Expr]()
    for d, above in zip(order, [*order[1:], None], strict=True):
        of = key
        if above is not None:
            extent, step = sizes[d], steps[above]
            if not isinstance(extent, Const) or step < steps[d] * int(extent.value) or step % steps[d]:
                return {}
            of = call("mod", key, const(step))
        found[d] = of if steps[d] == 1 else call("floordiv", of, const(steps[d]))
    return found


def with_values(p: Program, sums: Collection[str]) -> Program:
    """The program in which these sums compute their elements themselves, from maps that nothing else reads."""
    g = Graph.of(p)
    dtypes = {i.name: i.dtype for i in p.inputs} | {r: p.dtype_of(r) for r in g.results}
    own: dict[str, Compute] = {}
    for c in reversed(p.body):
        readers = g.consumers[c.name]
        if c.reducer is not None or c.name in p.outputs or not readers:
            continue
        if all(u in sums or u in own for u in readers) and (len(readers) == 1 or expr_flops(c.body) <= AGAIN):
            own[c.name] = c

    def written_out(c: Compute) -> Compute:
        while True:

            def one(ld: Load) -> Expr | None:
                m = own.get(ld.tensor)
                if m is None:
                    return None
                return converted(substitute_map(checked_inside(m, ld, p.sizes), ld), m.dtype, dtypes)

            e = rename_loads(c.body, one)
            if e is c.body or too_long(e):
                return c
            c = replace(c, body=e)

    return drop_dead(replace(p, body=tuple(written_out(c) if c.name in sums else c for c in p.body)))
