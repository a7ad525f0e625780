"""Coordinates that are put at other places of a longer row than they were computed for: a map for each.

Law: m[i, e] = where(e = 0, m_0[i], where(e = 1, m_1[i], ..)), m_k[i] = f(i, k), of m[i, j] = f(i, j)

The gradients of a box's centre and of its sides are two numbers each, which lie one behind the other in the gradient of
the box. What is computed for j and read for j - 2 is another kernel's; as numbers of a box all are of one.

Side conditions: m's last axis is one of few numbers (`MOST`), one of its readers reads it at a place computed from
several of the reader's own, none is a product of matrices or a window, and m is no result of the program.
Rounding: none.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Load, call, dims_used, loads, substitute
from tilefold.names import fresh
from tilefold.tensor.analysis import expr_flops
from tilefold.tensor.constant_parts import constant_parts, operands
from tilefold.tensor.index_simplify import const
from tilefold.tensor.inline import inline
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.narrow import narrow, narrowed
from tilefold.tensor.rewrite import prune_dims, rename_loads

#: Numbers along the longest axis that is taken apart.
MOST = 4
#: Units of arithmetic (`expr_flops`) of all that is written out, and of what readers choose by: a kernel's code has to
#: fit the instruction cache. 60 sines and cosines of three coordinates, 10,096 instructions, took 2.5 ms on an H100; 20
#: of a tile 52 us.
MOST_WORK = 512


def components_apart(p: Program) -> Program:
    """The program in which such maps are taken apart, with what is then read by its places alone, and inlined."""
    taken_apart, work = p, 0
    while (found := _apart(taken_apart)) is not taken_apart:
        known = {c.name: expr_flops(c.body) for c in taken_apart.body}
        work += sum(expr_flops(c.body) - known.get(c.name, 0) for c in found.body)
        if work > MOST_WORK:
            return p
        taken_apart = found
    return p if taken_apart is p else inline(constant_parts(prune_dims(narrow(taken_apart))))


def _apart(p: Program) -> Program:
    stored = operands(p) | {*p.outputs}
    moved = {ld.tensor for c in p.body for ld in loads(c.body) if _moves(p, ld)}
    chosen = next((c for c in p.body if c.name in moved - stored and _is_short(p, c)), None)
    if chosen is None:
        return p
    taken, extent = set(p.names), int(p.sizes[chosen.dims[-1]].value)  # type: ignore[attr-defined]
    parts = [
        replace(
            chosen,
            name=fresh(f"{chosen.name}_{k}", taken),
            dims=chosen.dims[:-1],
            body=substitute(chosen.body, {Index(chosen.dims[-1]): Const(k, DType.I64)}),
        )
        for k in range(extent)
    ]

    def one(ld: Load) -> Expr | None:
        if ld.tensor != chosen.name:
            return None
        *front, place = ld.index
        e: Expr = Load(parts[-1].name, tuple(front))
        for k in reversed(range(extent - 1)):
            e = call("where", call("lt", place, const(k + 1)), Load(parts[k].name, tuple(front)), e)
        return e

    body: list[Compute] = []
    for c in p.body:
        reads = any(ld.tensor == chosen.name for ld in loads(c.body))
        made = parts if c is chosen else [replace(c, body=rename_loads(c.body, one))] if reads else [c]
        body += made if made[0] is c else [replace(m, body=narrowed(m.body, p.sizes)) for m in made]
    return replace(p, body=tuple(body))


def _moves(p: Program, ld: Load) -> bool:
    """Whether the last index of a load is computed from dims, or is a dim of another extent."""
    e = ld.index[-1] if ld.index else const(0)
    if isinstance(e, Index):
        return p.sizes[e.dim] != p.shape_of(ld.tensor)[-1]
    return bool(dims_used(e)) and not loads(e)


def _is_short(p: Program, c: Compute) -> bool:
    size = p.sizes[c.dims[-1]] if c.dims else None
    return c.reducer is None and isinstance(size, Const) and 1 < size.value <= MOST
