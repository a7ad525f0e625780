"""Windows that slide: reductions over many neighbours as reductions over few sums of few.

Laws, for an associative and commutative reducer R, and B that varies with i and r by t = s i + r alone:

    parts    R over r < a b + c of B(s i + r)  =  R over q < a of P[s i + b q]  and R over r < c of B(s i + a b + r),
             P[t] = R over r < b of B(t + r)
    axes     R over r, q of B(s i + r, q)  =  R over r of P[s i + r],  P[t] = R over q of B(t, q)

A mean over 101 neighbours adds 21 numbers an element, in two maps, and one over 11 x 11 of an image 22. Of maxima and
minima the last part may overlap the one in front of it, so that there is no rest.

Side conditions: the window has a known extent, and no other reduction over windows of that extent reads the result, or
what is reduced, and does not slide (a variance: it looks at all elements anyway). Rounding: another order of the same
sums, of fewer in a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from tilefold.algebra.dtypes import DType
from tilefold.algebra.evaluate import COMBINE
from tilefold.algebra.expr import Const, Expr, Index, Load, dims_used, loads, substitute, tensors_read
from tilefold.names import free, fresh
from tilefold.tensor.analysis import Graph, is_map
from tilefold.tensor.index_simplify import const, poly, simplify
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.narrow import resimplified
from tilefold.tensor.rewrite import prune_dims
from tilefold.tensor.windows import joined

#: Elements that one map reduces, at most: more are again reduced in parts.
AT_ONCE = 27
#: Reducers of which an element may be counted twice.
_IDEMPOTENT = ("max", "min")


@dataclass(frozen=True, slots=True)
class Sliding:
    """A reduction over a window along one of its axes: `dim` of the result, `tap` of `count`, s = `stride`. others:
    elements of its other axes."""

    dim: str
    tap: str
    count: int
    stride: int
    others: int

    @property
    def alone(self) -> bool:
        """Whether the window has one axis."""
        return self.others == 1

    @property
    def part(self) -> int:
        """b of law parts: the one of fewest elements that are looked at, with few of them for the result."""
        few = (b for b in range(2, self.count) if sum(divmod(self.count, b)) <= AT_ONCE)
        return min(few, key=lambda b: b + sum(divmod(self.count, b)))

    @property
    def taps(self) -> tuple[int, int]:
        """Elements that are reduced for one of P, and for one of the result, after the law."""
        return (self.part, sum(divmod(self.count, self.part))) if self.alone else (self.others, self.count)


#: Whether a law is worth it: of a statement's elements, those of P, and the window.
Pays = Callable[[Compute, float, float, Sliding], bool]


def sliding_by_parts(p: Program, pays: Pays) -> Program:
    """The program with such reductions taken apart, as long as that pays."""
    names = [c.name for c in p.body if c.reducer in COMBINE and c.dtype.is_float]
    while names:
        g = Graph.of(p)
        c = g.by_name[names.pop(0)]
        found = _sliding(p, c)
        if found is None or _looked_at_again(g, c) or any(_looked_at_beside(g, c, x) for x in p.body):
            continue
        made = g.points(c.dims)
        inner = made / max(1, g.extent(found.dim)) * (g.extent(found.dim) * found.stride + found.count)
        if pays(c, made, inner, found):
            p, part = _taken_apart(p, c, found)
            names = [part, c.name, *names]
    return p


def _sliding(p: Program, c: Compute) -> Sliding | None:
    """The axis of its window along which a reduction slides: of several the longest."""
    sizes = [p.sizes[d] for d in c.rdims]
    if not all(isinstance(n, Const) for n in sizes):
        return None
    counts = dict(zip(c.rdims, (int(n.value) for n in sizes if isinstance(n, Const)), strict=True))
    whole = prod(counts.values())
    for tap, count in sorted(counts.items(), key=lambda x: -x[1]):
        for dim in c.dims if count > 2 else ():
            stride = _stride(p, c, dim, tap)
            if stride is not None:
                return Sliding(dim, tap, count, stride, whole // count)
    return None


def _stride(p: Program, c: Compute, dim: str, tap: str) -> int | None:
    """s, where what is reduced varies with both dims by s dim + tap alone."""
    strides = set[int]()
    for ld in loads(c.body):
        for e in ld.index:
            if dims_used(e) & {dim, tap}:
                terms = poly(e, p.sizes)
                a, b = (terms.get((Index(d),), 0) for d in (dim, tap))
                strides.add(a if b == 1 else 0)
    s = strides.pop() if len(strides) == 1 else 0
    if s < 1 or s >= int(p.sizes[tap].value):  # type: ignore[attr-defined]
        return None
    found = _moved(p, c.body, dim, tap, s, free("at", p.names))
    return s if found is not None else None


def _moved(p: Program, body: Expr, dim: str, tap: str, stride: int, t: str) -> Expr | None:
    """What is reduced, as it varies with t = stride dim + tap; None where it varies otherwise."""
    sizes = {**p.sizes, t: simplify(p.sizes[dim] * stride + p.sizes[tap], p.sizes)}
    found = resimplified(substitute(body, {Index(tap): Index(t) - Index(dim) * stride}), sizes)
    return None if dims_used(found) & {dim, tap} else found


def _looked_at_again(g: Graph, c: Compute) -> bool:
    """Whether a reduction over a window of the same extent reads the result, itself or by maps."""
    mine = g.points(c.rdims)
    readers = g.reached(c.name, g.consumers, is_map)
    return any(x.reducer is not None and g.points(x.rdims) == mine for x in readers)


def _looked_at_beside(g: Graph, c: Compute, x: Compute) -> bool:
    """Whether another reduction over a window of the same extent reads what this one does, and does not slide."""
    if x is c or x.reducer is None or g.points(x.rdims) != g.points(c.rdims):
        return False
    shared = tensors_read(x.body) & tensors_read(c.body)
    return bool(shared) and (_sliding(g.program, x) is None or _looked_at_again(g, x))


def _taken_apart(p: Program, c: Compute, w: Sliding) -> tuple[Program, str]:
    """The program after the law, and the name of P."""
    taken = set(p.names)
    t, name = fresh(f"{w.dim}_at", taken), fresh(f"{c.name}_part", taken)
    whole = _moved(p, c.body, w.dim, w.tap, w.stride, t)
    assert whole is not None
    b = w.part if w.alone else 1
    sizes = dict(p.sizes)
    sizes[t] = simplify((p.sizes[w.dim] - 1) * w.stride + (w.count - b + 1), p.sizes)
    dims = tuple(t if d == w.dim else d for d in c.dims)

    def at(place: Expr) -> Expr:
        return simplify(Index(w.dim) * w.stride + place, sizes)

    def part(place: Expr) -> Expr:
        return Load(name, tuple(at(place) if d == t else Index(d) for d in dims))

    def one(place: Expr, taps: Mapping[Expr, Expr] = MappingProxyType({})) -> Expr:
        return resimplified(substitute(whole, {Index(t): simplify(place, sizes), **taps}), sizes)

    if w.alone:
        n, rest = divmod(w.count, b)
        terms = [part(const(b * q)) for q in range(n)]
        if rest and c.reducer in _IDEMPOTENT:
            terms.append(part(const(w.count - b)))
        elif rest:
            terms += [one(at(const(b * n + r))) for r in range(rest)]
        outer = _map(c, c.name, c.dims, c.dtype, terms)
        r = fresh(f"{w.tap}_in", taken)
        sizes[r] = const(b)
        inner = replace(c, name=name, dims=dims, dtype=c.dtype.compute, rdims=(r,), body=one(Index(t) + Index(r)))
        if b <= AT_ONCE:
            inner = _map(c, name, dims, inner.dtype, [one(Index(t) + k) for k in range(b)])
    else:
        rest_of = tuple(d for d in c.rdims if d != w.tap)
        inner = replace(c, name=name, dims=dims, dtype=c.dtype.compute, rdims=rest_of, body=whole)
        if w.others <= AT_ONCE:
            places = itertools.product(*(range(int(p.sizes[d].value)) for d in rest_of))  # type: ignore[attr-defined]
            taps: list[dict[Expr, Expr]] = [
                {Index(d): const(k) for d, k in zip(rest_of, x, strict=True)} for x in places
            ]
            inner = _map(c, name, dims, inner.dtype, [one(Index(t), x) for x in taps])
        outer = replace(c, rdims=(w.tap,), body=part(Index(w.tap)))
        if w.count <= AT_ONCE:
            outer = _map(c, c.name, c.dims, c.dtype, [part(const(k)) for k in range(w.count)])
    body_of = [y for x in p.body for y in ((inner, outer) if x is c else (x,))]
    return prune_dims(replace(p, sizes=sizes, body=tuple(body_of))), name


def _map(c: Compute, name: str, dims: tuple[str, ...], dtype: DType, terms: list[Expr]) -> Compute:
    """The map that reduces these, one after the other."""
    return replace(c, name=name, dims=dims, dtype=dtype, body=joined(c.reducer or "", terms), reducer=None, rdims=())
