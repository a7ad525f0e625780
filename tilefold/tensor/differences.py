"""Differences of two sums over as many elements.

Law: (sum over l of f) - (sum over m of g)  is  sum over l of (f - g), m named l in g

Side conditions: both are sums of float32 (or wider) over dims of equal extents, nothing else reads them, they are no
results, and neither is a product of matrices, which a library computes.
Rounding: of a sum the error grows with the sum of what it adds, of magnitude: the differences of two log-probabilities
of 512 tokens are a hundredth of these, and so is the error of the loss that compares them. It is never larger by more
than that of one subtraction for each element, which the sums' own bound has room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Load, call, loads, rename_dims, transform, walk
from tilefold.names import fresh
from tilefold.tensor.index_simplify import same
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of

WIDE = (DType.F32, DType.F64)


def joined_sums(p: Program) -> Program:
    """The program in which a difference of two sums is the sum of the differences."""
    by_name = {c.name: c for c in p.body}
    pairs = {(a.tensor, b.tensor): (a, b) for c in p.body for a, b in _differences(c.body)}
    taken = set(p.names)
    for (left, right), (a, b) in pairs.items():
        f, g = by_name.get(left), by_name.get(right)
        if f is None or g is None or a.index != b.index or not _joins(p, f, g) or not _only_there(p, left, right):
            continue
        other = rename_dims(g.body, dict(zip((*g.dims, *g.rdims), (*f.dims, *f.rdims), strict=True)))
        made = replace(f, name=fresh(f"{left}_less", taken), body=call("sub", f.body, other))
        p = _put(p, f, g, made)
        by_name = {c.name: c for c in p.body}
    return p


def _differences(e: Expr) -> Iterator[tuple[Load, Load]]:
    for x in walk(e):
        match x:
            case Call("sub", (Load() as a, Load() as b)) if a.tensor != b.tensor:
                yield a, b


def _joins(p: Program, f: Compute, g: Compute) -> bool:
    """Whether both are sums of floats over dims of the same extents, and no products."""
    both = f.reducer == g.reducer == "sum" and f.dtype is g.dtype and f.dtype in WIDE
    if not both or len(f.dims) != len(g.dims) or len(f.rdims) != len(g.rdims):
        return False
    pairs = zip((*f.dims, *f.rdims), (*g.dims, *g.rdims), strict=True)
    return all(same(p.sizes[m], p.sizes[n]) for m, n in pairs) and product_of(f) is None and product_of(g) is None


def _only_there(p: Program, left: str, right: str) -> bool:
    """Whether both are read in their differences alone."""
    if {left, right} & {*p.outputs}:
        return False

    def gone(e: Expr) -> Expr | None:
        match e:
            case Call("sub", (Load(s, i), Load(t, j))) if (s, t) == (left, right) and i == j:
                return Const(0.0, DType.F32)
        return None

    return not any(ld.tensor in (left, right) for c in p.body for ld in loads(transform(c.body, gone)))


def _put(p: Program, f: Compute, g: Compute, made: Compute) -> Program:
    """`made` in place of both sums, and in place of their differences."""

    def read(e: Expr) -> Expr | None:
        match e:
            case Call("sub", (Load(s, i), Load(t, _))) if (s, t) == (f.name, g.name):
                return Load(made.name, i)
        return None

    body = []
    for c in p.body:
        if c in (f, g):
            last = f if p.body.index(f) > p.body.index(g) else g  # all that both read is there
            body += [made] if c is last else []
        else:
            body.append(replace(c, body=transform(c.body, read)))
    return replace(p, body=tuple(body))
