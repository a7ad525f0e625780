"""In which order of axes the library's attention has its result, and who copies it where that is not the wanted one.

The call gives a result of 16 bits the order of q's axes, and one of float32 heads side by side behind rows, whatever
its operands' are. Torch would copy what is wanted otherwise (rows first, of heads that came first) element by element:
10.5 MB in 14.7 us on an H200, where a kernel takes 7.

    q that maps make    is made in the order that is wanted of the result: kernels write any, the call reads any
    all else            lies as it does, so that the result is a statement in the order that it has, and a copy of it,
                        which is a kernel's, where the program or a product of the library wants another one

Law: a tensor stored with its axes in another order and read at the reordered indices is the same tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import permutations
from math import factorial

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Index, Load, tensors_read
from tilefold.names import fresh
from tilefold.plan.attention import AttentionCall, attention_call
from tilefold.plan.memory_orders import MOST_ORDERS, library_copies, read_turned
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute, Program

#: Dims of a result as memory has them, outermost first.
Lies = tuple[str, ...]


def in_order(
    p: Program, calls: Sequence[AttentionCall], products: Collection[str]
) -> tuple[Program, tuple[AttentionCall, ...], frozenset[str]]:
    """The program with results of attention as the library writes them, its calls, and those whose order nobody knows.
    products: the library's, which take what they read as it lies or copy it."""
    outs, unknown = list[str](), set[str]()
    for x in calls:
        p, lies = _q_turned(p, x, products)
        if lies is None:
            unknown.add(x.out)
            outs.append(x.out)
        else:
            p, out = _written(p, x, lies)
            outs.append(out)
    g = Graph.of(p)
    found = (attention_call(g, g.by_name[out]) for out in outs)
    return p, tuple(x for x in found if x is not None), frozenset(unknown)


def copied_bytes(p: Program, x: AttentionCall, products: Collection[str] = ()) -> int:
    """Bytes of the result that are copied because they are wanted in another order."""
    ways = _ways(p, x)
    return min((_copied(p, x, lies, products) for lies in ways), default=0)


def _ways(p: Program, x: AttentionCall) -> tuple[Lies, ...]:
    """Orders that the result may have, the usual one first; none where nobody knows it."""
    if x.dtype is DType.F32:
        return ((*x.batch[:-1], x.rows, *x.batch[-1:], x.columns),)
    lies = tuple(ix.dim for ix in x.q.index if isinstance(ix, Index))
    given = p.is_input(x.q.tensor)
    if (given and not p.is_row_major(x.q.tensor)) or not lies or lies[-1] != x.width:
        return ()
    lies = (*lies[:-1], x.columns)
    usual = (lies,) if _flat(lies, x) else ()
    if given or not _turns(p, x) or factorial(len(lies)) > MOST_ORDERS:
        return usual
    return (*usual, *(o for n in permutations(lies[:-1]) if (o := (*n, x.columns)) not in usual and _flat(o, x)))


def _flat(lies: Lies, x: AttentionCall) -> bool:
    """Whether the axes in front of heads are side by side, so that they are one of the call's."""
    outer = x.batch[:-1]
    at = lies.index(outer[0]) if outer else 0
    return lies[at : at + len(outer)] == outer


def _turns(p: Program, x: AttentionCall) -> bool:
    """Whether q is what maps make for attention alone, and all of it is read."""
    name = x.q.tensor
    made = next((c for c in p.body if c.name == name), None)
    if made is None or made.reducer is not None or name in p.outputs or len(x.q.index) != len(x.batch) + 2:
        return False
    return all(isinstance(ix, Index) for ix in x.q.index) and [
        c.name for c in p.body if name in tensors_read(c.body)
    ] == [m for m in x.members if name in tensors_read(next(c.body for c in p.body if c.name == m))]


def _copied(p: Program, x: AttentionCall, lies: Lies, products: Collection[str]) -> int:
    """Bytes of the result that are copied if it lies so: for the program, and for products that cannot read it."""
    c = next(c for c in p.body if c.name == x.out)
    order = [c.dims.index(d) for d in lies]
    readers = [r for r in p.body if x.out in tensors_read(r.body) and r.name in products]
    nbytes = Graph.of(p).nbytes([x.out])
    asked = int(nbytes) if x.out in p.outputs and lies != c.dims else 0
    turned = replace(p, body=tuple(read_turned(r, x.out, order) for r in p.body))
    of_products = (library_copies(turned, next(r for r in turned.body if r.name == m.name)) for m in readers)
    return asked + (0 if asked else sum(of_products))


def _q_turned(p: Program, x: AttentionCall, products: Collection[str]) -> tuple[Program, Lies | None]:
    """The program with q in the order in which least is copied of the result, and that of the result."""
    ways = _ways(p, x)
    if not ways:
        return p, None
    lies = min(ways, key=lambda lies: _copied(p, x, lies, products))
    mine = tuple(ix.dim for ix in x.q.index if isinstance(ix, Index))
    wanted = (*lies[:-1], x.width)
    if x.dtype is DType.F32 or mine == wanted:
        return p, lies
    order = [mine.index(d) for d in wanted]
    return replace(p, body=tuple(read_turned(c, x.q.tensor, order) for c in p.body)), lies


def _written(p: Program, x: AttentionCall, lies: Lies) -> tuple[Program, str]:
    """The program whose attention has its result in that order, and the result's name."""
    c = next(c for c in p.body if c.name == x.out)
    if lies == c.dims:
        return p, x.out
    if x.out not in p.outputs:
        order = [c.dims.index(d) for d in lies]
        return replace(p, body=tuple(read_turned(r, x.out, order) for r in p.body)), x.out
    made = replace(c, name=fresh(f"{c.name}_made", set(p.names)), dims=lies)
    body = Load(made.name, tuple(map(Index, lies)))
    copy = Compute(c.name, c.dims, c.dtype, body, loc=c.loc)
    return replace(p, body=tuple(y for r in p.body for y in ((made, copy) if r is c else (r,)))), made.name
