"""Sums of two products that have an operand in common.

Law: sum over l of a[i, l] x[l, j] + sum over m of b[i, m] x[m, j]  is  sum over l of (a + b)[i, l] x[l, j]

The gradient of a matrix of dot products (x x^T: features that interact, Gram matrices) is such: (dz + dz^T) x. Taken
where what it saves, a product's result written and read and x read once more, has more elements than reading a and b
and writing their sum. Side conditions: both have the same type, as do a and b, and nothing else reads them.
Rounding: a and b are added rounded to their type, instead of the products to theirs. Not in float16, where a sum may be
none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, call, loads, rename_dims, transform, walk
from tilefold.names import fresh
from tilefold.tensor.index_simplify import same
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of
from tilefold.tensor.rewrite import in_order
from tilefold.tensor.sizes import estimate

#: Types that have the sum of any two of their numbers that a product could have.
WIDE = (DType.BF16, DType.F32, DType.F64)


def common_factors(p: Program) -> Program:
    """The program in which sums of two products of the same operand are one product."""
    for c in p.body:
        for e in _added(c):
            made = _factored(p, c, e)
            if made is not None:
                return common_factors(made)
    return p


def _added(c: Compute) -> Iterator[Call]:
    """Sums of two loads in a map."""
    for e in walk(c.body) if c.reducer is None else ():
        match e:
            case Call("add", (Load() as a, Load() as b)) if a.tensor != b.tensor:
                yield e


def _factored(p: Program, reader: Compute, both: Call) -> Program | None:
    a, b = both.args
    assert isinstance(a, Load) and isinstance(b, Load)
    by_name = {c.name: c for c in p.body}
    f, g = by_name.get(a.tensor), by_name.get(b.tensor)
    if f is None or g is None or f.dtype is not g.dtype or not _only_there(p, reader, both):
        return None
    names = _names(p, f, g, a, b)
    mine = product_of(f)
    theirs = product_of(replace(g, dims=f.dims, rdims=f.rdims, body=rename_dims(g.body, names))) if names else None
    if mine is None or theirs is None or mine.loads is None or theirs.loads is None or not mine.whole:
        return None
    for n in (0, 1):
        x, own = mine.loads[n], mine.loads[1 - n]
        if x not in theirs.loads:
            continue
        other = theirs.loads[1 - theirs.loads.index(x)]
        if _pays(p, f, x, own, other):
            return _put(p, reader, both, f, g, x, own, other)
    return None


def _names(p: Program, f: Compute, g: Compute, a: Load, b: Load) -> dict[str, str]:
    """What dims of g are called in f where both are read as the reader reads them; none where they differ."""
    at: dict[Expr, str] = {ix: d for d, ix in zip(f.dims, a.index, strict=True) if isinstance(ix, Index)}
    if len(at) < len(f.dims) or len(f.dims) != len(g.dims) or len(f.rdims) != len(g.rdims):
        return {}
    pairs = [(d, at.get(ix)) for d, ix in zip(g.dims, b.index, strict=True)] + [*zip(g.rdims, f.rdims, strict=True)]
    found = {d: e for d, e in pairs if e is not None and same(p.sizes[d], p.sizes[e])}
    return found if len({*found.values()}) == len(pairs) == len(found) else {}


def _only_there(p: Program, reader: Compute, both: Call) -> bool:
    """Whether two tensors are read in their sum alone, once."""
    names = {ld.tensor for ld in both.args if isinstance(ld, Load)}
    read = sum(ld.tensor in names for c in p.body for ld in loads(c.body))
    return not names & {*p.outputs} and read == 2 and both in walk(reader.body)


def _pays(p: Program, f: Compute, x: Load, own: Load, other: Load) -> bool:
    kinds = {p.dtype_of(own.tensor), p.dtype_of(other.tensor)}
    dims = [_dims(ld) for ld in (own, other)]
    if len(kinds) > 1 or not kinds <= {*WIDE} or None in dims or {*(dims[0] or ())} != {*(dims[1] or ())}:
        return False
    summed, made = (prod(estimate(p.sizes[d]) for d in of) for of in (dims[0] or (), f.dims))
    read = prod(estimate(p.sizes[d]) for d in _dims(x) or ())
    return 3 * summed <= 2 * made + read


def _dims(ld: Load) -> tuple[str, ...] | None:
    """The dims that a load has an axis each for, and single places of others."""
    found = tuple(ix.dim for ix in ld.index if isinstance(ix, Index))
    places = sum(isinstance(ix, Const) for ix in ld.index)
    return found if len({*found}) == len(found) == len(ld.index) - places else None


def _put(p: Program, reader: Compute, both: Call, f: Compute, g: Compute, x: Load, own: Load, other: Load) -> Program:
    dims = _dims(own) or ()
    total = Compute(
        fresh(f"{f.name}_factor", {*p.names}), dims, p.dtype_of(own.tensor), call("add", own, other), loc=f.loc
    )
    made = replace(f, body=transform(f.body, lambda e: Load(total.name, tuple(map(Index, dims))) if e == own else None))
    read = replace(reader, body=transform(reader.body, lambda e: both.args[0] if e == both else None))
    known = {f.name: [made], g.name: [], reader.name: [read]}
    if (whole := _as_reader(made, read)) is not None:
        known |= {f.name: [], reader.name: [whole]}
    return in_order(replace(p, body=(total, *(y for c in p.body for y in known.get(c.name, [c])))))


def _as_reader(made: Compute, read: Compute) -> Compute | None:
    """The product under the name of a map that is no more than its copy."""
    e = read.body
    if not isinstance(e, Load) or read.dtype is not made.dtype or {*made.rdims} & {*read.dims}:
        return None
    names = {d: ix.dim for d, ix in zip(made.dims, e.index, strict=True) if isinstance(ix, Index)}
    if {*names.values()} != {*read.dims} or len(names) != len(read.dims):
        return None
    return replace(made, name=read.name, dims=read.dims, body=rename_dims(made.body, names))
