"""Which sums by keys (`tensor.keyed`) are additions in any order, and which are folds: the price of either.

    fold       every row looks at all elements: points / LOOKED
    additions  elements / ADDED, the last cache's rate; those of one row wait for each other: a row's / QUEUED;
               zeros are written before, by a launch of its own

The order of additions is another at each call, as of eager's: where torch is to be deterministic all are folds, but
maxima, which are the same in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, prod

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, dims_used, loads
from tilefold.names import fresh
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph
from tilefold.tensor.inline import converted
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.joined_keys import joined
from tilefold.tensor.keyed import keyed, with_values
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import drop_dead, substitute_map

#: Indices a row from which on atomic additions queue at few addresses, and eager's sort is faster: 1,048,576 indices of
#: 32 rows of 8 columns (T5's relative biases) took 16 ms on an H200, where all of a step of four layers took eager 14.
CROWDED = 2048
#: Elements a second that are compared with a row and summed, of all multiprocessors: 33 million in 19 us forecast for
#: an H100 where pairs of rows share what is read, in 41 where not.
LOOKED = 1.5e12
#: Elements a second that are added at places of their own, and at one place (H100: 15.4 million in 24 us with what they
#: are computed from; 30 ns each for a row that all indices name).
ADDED, QUEUED = 0.7e12, 3.3e7


def with_sums_added(p: Program, machine: Gpu) -> tuple[Program, frozenset[str]]:
    """The program, and its sums that additions are faster for: each has the elements of all that are added up, and
    computes them itself."""
    ordered = torch.are_deterministic_algorithms_enabled()
    p = p if ordered else of_one_hot(p, machine)
    found = frozenset(c.name for c in p.body if not (ordered and c.reducer == "sum") and _pays(p, c, machine))
    if not found:
        return p, found
    p = joined(p, frozenset(c.name for c in p.body if c.name in found and c.reducer == "sum"))
    found &= {c.name for c in p.body}
    p = with_values(p, found)
    return _wide(p, found)


def of_one_hot(p: Program, machine: Gpu) -> Program:
    """The program in which products with rows that tell keys (`one_hot(t).T @ x`), and counts of keys, are sums by
    keys, where additions are faster than the product and writing what tells the keys:

        sum over k of (key(k) == r) x(k, j)    is    sum over k of where(key(k) == r, x(k, j), 0)

    An inf of a row that the key does not name stays out of the sum, as in `tensor.laws.one_hot`."""
    maps = {c.name: c for c in p.body if c.reducer is None and len(c.results) == 1}
    dtypes = {i.name: i.dtype for i in p.inputs} | {r: c.dtype for c in p.body for r in c.results}
    g, body = Graph.of(p), list[Compute]()
    for c in p.body:
        ways = (_by_keys(c, told, value, maps, dtypes) for told, value in _told(c))
        made = next((m for m in ways if m is not None and _pays(p, m, machine)), None)
        body.append(c if made is None or _seconds(p, made) >= _as_product(g, c, machine) else made)
    return drop_dead(replace(p, body=tuple(body)))


def _told(c: Compute) -> list[tuple[Expr, Expr]]:
    """What may tell keys in a sum, and what is summed by them."""
    if c.reducer != "sum" or c.index_name is not None or not c.dtype.is_float:
        return []
    match c.body:
        case Call("mul", (a, b)):
            return [(a, b), (b, a)]
    return [(c.body, Const(1.0, c.dtype.compute))]


def _by_keys(
    c: Compute, told: Expr, value: Expr, maps: Mapping[str, Compute], dtypes: dict[str, DType]
) -> Compute | None:
    """The sum by keys; None where nothing but those of elements, each of which has one, says which are summed."""
    e = told
    while isinstance(e, Cast) or (isinstance(e, Load) and e.tensor in maps):
        e = e.arg if isinstance(e, Cast) else converted(substitute_map(maps[e.tensor], e), maps[e.tensor].dtype, dtypes)
    if not isinstance(e, Call) or e.op != "eq" or not loads(e):
        return None
    return replace(c, body=Call("where", (e, value, Const(0.0, c.dtype.compute))), origin="")


def _as_product(g: Graph, c: Compute, machine: Gpu) -> float:
    """Seconds of a product by the library, with its operands written; of a sum, that of every element for each row."""
    x = product_of(c)
    if x is None or not x.is_matrix():
        return inf
    points = prod(g.extent(d) for d in {*c.dims, *c.rdims})
    made = sum(prod(g.extent(d) for d in dims_used(e)) for e in (x.a, x.b) if dims_used(e) & {*c.dims})
    rate = machine.gemm_rate(c.dtype, library=True)
    return 2.0 * points / rate + c.dtype.nbytes * made / (machine.reached * machine.bandwidth)


def _wide(p: Program, sums: frozenset[str]) -> tuple[Program, frozenset[str]]:
    """The program in which these sums have at least float32, and maps round them once; the sums' names."""
    taken, body, wide = set(p.names), list[Compute](), set[str]()
    for c in p.body:
        if c.name not in sums:
            body.append(c)
            continue
        total = c if c.dtype is c.dtype.compute else replace(c, name=fresh(c.name, taken), dtype=c.dtype.compute)
        wide.add(total.name)
        body.append(total)
        if total is not c:
            read = Load(total.name, tuple(map(Index, c.dims)))
            body.append(replace(c, reducer=None, rdims=(), body=read))
    return replace(p, body=tuple(body)), frozenset(wide)


def _pays(p: Program, c: Compute, machine: Gpu) -> bool:
    found = _counted(p, c)
    if found is None:
        return False
    rows, elements, _ = found
    return _seconds(p, c) + machine.second_kernel < rows * elements / LOOKED


def _seconds(p: Program, c: Compute) -> float:
    """Of a sum by keys in any order, without the zeros before."""
    found = _counted(p, c)
    assert found is not None, c
    _, elements, each = found
    return max(elements / ADDED, each / QUEUED)


def _counted(p: Program, c: Compute) -> tuple[int, int, float] | None:
    """Rows of a sum by keys, elements, and those of a row; None where it is none, or of sizes that nobody knows."""
    found = keyed(c, p.sizes)
    sizes = [p.sizes[d] for d in (*c.dims, *c.rdims)]
    if found is None or not all(isinstance(n, Const) and int(n.value) > 0 for n in sizes):
        return None
    extent = {d: int(n.value) for d, n in zip((*c.dims, *c.rdims), sizes, strict=True)}  # type: ignore[attr-defined]
    rows, elements = prod(extent[d] for d in found.keys), prod(extent[d] for d in found.dims)
    return rows, elements, prod(extent[d] for d in c.rdims) / rows
