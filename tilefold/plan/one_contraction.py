"""Sums of products of the same shapes as one product of all that they contract.

Law: sum over t of (sum over k of a_t[i, k] b_t[k, j])  is  sum over (t, k) of a[i, (t, k)] b[(t, k), j],
where a and b have a_t and b_t one behind the other. So is a sum over t of sums over k of a_t alone.

The gradient of a matrix that each step of a recurrence multiplies by is such a sum, of as many products as there are
steps, each over a batch. They were as many calls, whose results were written and added. Taken where these, and what
passes through memory for them, take longer than writing operands side by side does, and where the operands are no more
bytes than the results that were kept until they were added.

Side conditions: nothing else reads the products, and no reduction what they add up to; extents are known, and the same
for all. Rounding: the whole sum is
rounded once, instead of each product and each partial sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, call, lit, loads
from tilefold.names import fresh
from tilefold.plan.hardware import Gpu
from tilefold.tensor.analysis import Graph, is_map
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import drop_dead, in_order

#: How many times what it costs has to be saved.
CLEAR = 1.25

#: An operand's axes: dims of the sum that reads the product; None: what is contracted.
_Axes = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class _Operand:
    """A factor of a product, or what a sum adds."""

    tensor: str
    axes: _Axes
    dtype: DType


@dataclass(frozen=True, slots=True)
class _Term:
    """A product or sum that is added: what it is of, operands of rows before those of columns."""

    of: Compute
    operands: tuple[_Operand, ...]
    extent: int

    @property
    def kind(self) -> tuple[object, ...]:
        """What it has in common with those that it can be one with."""
        return self.extent, self.of.dtype, tuple((x.axes, x.dtype) for x in self.operands)


@dataclass(frozen=True, slots=True)
class _Side:
    """Operands one behind the other: the statement that writes them, and the operands, in order."""

    made: Compute
    of: tuple[str, ...]
    axes: _Axes
    dim: str


def contracted_together(p: Program, machine: Gpu) -> Program:
    """The program with such sums as one product each, where that takes less time on a GPU."""
    sides: list[_Side] = []
    kinds: tuple[Literal["product", "sum"], ...] = ("product", "sum")
    for kind in kinds:  # a sum alone is no reason to write what it adds side by side
        for name in [c.name for c in p.body if c.reducer is None]:
            p = _joined(p, name, machine, sides, kind)
    return drop_dead(in_order(p)) if sides else p


def _joined(p: Program, name: str, machine: Gpu, sides: list[_Side], kind: Literal["product", "sum"]) -> Program:
    """With the terms of one map in one. sides: what is written side by side, which this adds to."""
    g = Graph.of(p)
    m = g.by_name[name]
    if not m.dtype.is_float or any(x.reducer is not None for x in g.reached(name, g.consumers, is_map)):
        return p  # scores that a fold goes on with may never be in memory
    terms = list(_terms(m.body))
    families: dict[tuple[object, ...], list[tuple[int, _Term]]] = {}
    for at, e in enumerate(terms):
        t = _term(g, m, e)
        if t is not None and (len(t.operands) == 2) == (kind == "product"):
            families.setdefault(t.kind, []).append((at, t))
    for family in families.values():
        group = [t for _, t in family]
        if len(group) < 2 or (kind == "product" and not _pays(g, group, machine)):
            continue
        found = _sides(p, group) if kind == "product" else _known(group, sides)
        if found is None:
            continue
        new = [s for s in found if s not in sides]
        sides += new
        dim = found[0].dim
        total = _whole(p, m, group[0], found)
        joined = {at for at, _ in family}
        rest = [e for at, e in enumerate(terms) if at not in joined]
        if rest:
            body: Expr = Load(total.name, tuple(map(Index, m.dims)))
            for e in rest:
                body = call("add", body, e)
            made: list[Compute] = [total, replace(m, body=body)]
        else:
            made = [replace(total, name=m.name, dtype=m.dtype)]
        sizes = {**p.sizes, dim: lit(group[0].extent * len(group))}
        out = [x for c in p.body for x in (made if c.name == name else [c])]
        return _joined(replace(p, sizes=sizes, body=(*(s.made for s in new), *out)), name, machine, sides, kind)
    return p


def _terms(e: Expr) -> Iterator[Expr]:
    """What is added; roundings of partial sums are left out."""
    match e:
        case Call("add", (a, b)):
            yield from _terms(a)
            yield from _terms(b)
        case Cast(arg=Call("add") as inner, dtype=kind) if kind.is_float:
            yield from _terms(inner)
        case _:
            yield e


def _term(g: Graph, m: Compute, e: Expr) -> _Term | None:
    """The term that an expression is, if it is one that could be joined."""
    c = g.by_name.get(e.tensor) if isinstance(e, Load) else None
    if c is None or c.reducer != "sum" or len(c.rdims) != 1 or not c.dtype.is_float or not isinstance(e, Load):
        return None
    names = {d: ix.dim for d, ix in zip(c.dims, e.index, strict=True) if isinstance(ix, Index)}
    extent = g.program.sizes[c.rdims[0]]
    alone = g.consumers[c.name] == (m.name,) and sum(ld.tensor == c.name for ld in loads(m.body)) == 1
    if {*names.values()} != {*m.dims} or len(names) != len(c.dims) or not alone or c.name in g.program.outputs:
        return None
    if not isinstance(extent, Const) or any(not isinstance(g.program.sizes[d], Const) for d in c.dims):
        return None
    factors = [c.body]
    if not isinstance(c.body, Load):
        p = product_of(c)
        if p is None or p.loads is None or not p.whole or not p.is_matrix():
            return None
        factors = list(p.loads)
    names[c.rdims[0]] = ""
    operands = [x for x in (_operand(g, x, names) for x in factors) if x is not None]
    if len(operands) < len(factors):
        return None
    operands.sort(key=lambda x: [m.dims.index(d) for d in x.axes if d])
    return _Term(c, tuple(operands), int(extent.value))


def _operand(g: Graph, ld: Expr, names: Mapping[str, str]) -> _Operand | None:
    """A tensor with a dim an axis; None: it is another."""
    if not isinstance(ld, Load):
        return None
    dims = [names.get(ix.dim) if isinstance(ix, Index) else None for ix in ld.index]
    if None in dims or len({*dims}) < len(dims) or "" not in dims:
        return None
    return _Operand(ld.tensor, tuple(d or None for d in dims), g.program.dtype_of(ld.tensor))


def _pays(g: Graph, group: Sequence[_Term], machine: Gpu) -> bool:
    n, memory = len(group), machine.reached * machine.bandwidth
    written = sum(g.nbytes([x.tensor]) for t in group for x in t.operands)
    made = g.nbytes([group[0].of.name])
    saved = (n - 1) * (machine.call + 2 * made / memory)
    return written <= n * made and saved > CLEAR * (2 * machine.second_kernel + 2 * written / memory)


def _sides(p: Program, group: Sequence[_Term]) -> list[_Side]:
    """Statements that write the operands of each side one behind the other."""
    dim = fresh("together", {*p.names})
    taken, found = {*p.names, dim}, list[_Side]()
    for operands in zip(*(t.operands for t in group), strict=True):
        first, k = operands[0], group[0].extent
        made: Expr | None = None
        for at, x in reversed([*enumerate(operands)]):
            place = Index(dim) if at == 0 else call("sub", Index(dim), at * k)
            e = Load(x.tensor, tuple(place if d is None else Index(d) for d in x.axes))
            made = e if made is None else call("where", call("lt", Index(dim), (at + 1) * k), e, made)
        assert made is not None
        name = fresh(f"{first.tensor}_together", taken)
        dims, loc = tuple(dim if d is None else d for d in first.axes), group[0].of.loc
        statement = Compute(name, dims, first.dtype, made, loc=loc)
        found.append(_Side(statement, tuple(x.tensor for x in operands), first.axes, dim))
    return found


def _known(group: Sequence[_Term], sides: Sequence[_Side]) -> list[_Side] | None:
    """What is side by side already of what sums add."""
    of, axes = sorted(t.operands[0].tensor for t in group), group[0].operands[0].axes
    found = next((s for s in sides if sorted(s.of) == of and len(s.axes) == len(axes)), None)
    return None if found is None or found.axes.index(None) != axes.index(None) else [found]


def _whole(p: Program, m: Compute, like: _Term, sides: Sequence[_Side]) -> Compute:
    """The one product, or sum, of all, with the dims that m reads such a term along."""
    factors = [
        Load(s.made.name, tuple(Index(s.dim if d is None else d) for d in x.axes))
        for s, x in zip(sides, like.operands, strict=True)
    ]
    body: Expr = factors[0] if len(factors) == 1 else call("mul", *factors)
    name = fresh(f"{like.of.name}_of_all", {*p.names, *(s.made.name for s in sides)})
    return replace(like.of, name=name, dims=m.dims, body=body, rdims=(sides[0].dim,))
