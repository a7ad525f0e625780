"""Elements of a map that are known to be another tensor's are read there: what a slice was not written to.

Law: m[i] = where(c(i), a(i), b(i)) read at e is a(e) where c holds at e, and b(e) where it does not.

A loop that writes to one row of a tensor after the other (`cost[:, d, d:] = ...`) is a chain of maps, each of which
reads the one before at its own places, and at the row that it changes. That row is what it was at first: read there,
each map has one reader, and all of them are one kernel.

Side conditions: the condition is decided at some number (`tensor.narrow`), and what stands there is a load or a
number: nothing is computed twice. Rounding: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, loads
from tilefold.tensor.index_simplify import simplify
from tilefold.tensor.inline import converted
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.narrow import narrowed
from tilefold.tensor.rewrite import rename_loads, substitute_map


def read_through(p: Program) -> Program:
    """The program with loads at numbers of a dim in place of maps that choose by it, wherever that is decided."""
    dtypes = {i.name: i.dtype for i in p.inputs} | {r: c.dtype for c in p.body for r in c.results}
    maps: dict[str, Compute] = {}
    body: list[Compute] = []

    def one(ld: Load) -> Expr | None:
        return _behind(p, maps, dtypes, _settled(ld, p.sizes)) if ld.tensor in maps else None

    for c in p.body:
        if any(ld.tensor in maps and _numbered(_settled(ld, p.sizes)) for ld in loads(c.body)):
            c = replace(c, body=rename_loads(c.body, one))
        body.append(c)
        if c.reducer is None and isinstance(c.body, Call) and c.body.op == "where":
            maps[c.name] = c
    return replace(p, body=tuple(body))


def _behind(p: Program, maps: Mapping[str, Compute], dtypes: dict[str, DType], ld: Load) -> Expr | None:
    """What stands in a map at these indices, if it is a load or a number; of a map again, what stands there."""
    m = maps.get(ld.tensor)
    if m is None or not _numbered(ld):
        return None
    found = narrowed(substitute_map(m, ld), p.sizes)
    bare = found
    while isinstance(bare, Cast):
        bare = bare.arg
    if not isinstance(bare, Load | Const):
        return None
    further = _behind(p, maps, dtypes, bare) if found is bare and isinstance(bare, Load) else None
    return converted(found if further is None else further, m.dtype, dtypes)


def _settled(ld: Load, sizes: Mapping[str, Expr]) -> Load:
    """The load, at numbers that are not sums of numbers (an element of a slice)."""
    if all(isinstance(ix, Index | Const) for ix in ld.index):
        return ld
    return Load(ld.tensor, tuple(ix if loads(ix) else simplify(ix, sizes) for ix in ld.index))


def _numbered(ld: Load) -> bool:
    return any(isinstance(ix, Const) for ix in ld.index)
