"""Laws that bring dependent reductions over a common axis, so that one Fold can hold them.

split: for an associative and commutative reducer, R over (A, B) = R over A of R over B. A
reduction over more axes than a later one that depends on it is cut into an inner part and one
over the later one's axes (the maximum over keys and features, in front of sums over keys). One over more
axes than an earlier one that it depends on is cut into a part over the earlier one's axes, which joins
its cascade, and one over the rest (a loss over all rows, made of the log-sum-exp of each). Parts are not rounded.

exchange: sum over K of w[k] * (sum over J of f[k, j]) = sum over J of (sum over K of w[k] * f[k, j]),
for a short J, where f depends on a reduction over K: the inner sum would keep the outer one from
joining the cascade over K (the moment of inertia sums squares over three coordinates). Not where that is many times
the arithmetic: a product of matrices behind an inner sum (weights of few keys times values, then projected) would be
one for each j.

order: R over (A, B) = R over (B, A). Kernels share out and stream over the first axes, and leave the last to a step,
so a reduction's axes are those of what it reads as they lie in memory (all of a matrix that was transposed).
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.expr import Call, Expr, Index, Load, dims_used, loads, substitute, tensors_read
from tilefold.algebra.ops import VALUE_REDUCERS
from tilefold.names import free
from tilefold.tensor.analysis import Graph, is_static, out_dims
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of

#: Longest inner sum that is kept as separate outer sums, and times the arithmetic of both that these may take.
SHORT, MORE = 16, 2


def align_reductions(p: Program, keep: frozenset[str] = frozenset()) -> Program:
    """Apply both laws wherever they bring a dependent reduction onto common axes; those in `keep` stay whole."""
    return exchange_sums(split_axes(p, keep), keep)


def as_memory_lies(p: Program) -> Program:
    """Apply law order: to reductions of which one tensor that they read the most of has all axes, where it has them
    otherwise. Products of matrices stay as they are."""
    g = Graph.of(p)
    return replace(p, body=tuple(replace(c, rdims=_as_read(g, c)) for c in p.body))


def _as_read(g: Graph, c: Compute) -> tuple[str, ...]:
    """The axes of a reduction as they lie in what it reads the most of."""
    if c.reducer not in VALUE_REDUCERS or len(c.rdims) < 2:
        return c.rdims
    product = product_of(c)
    if product is not None and product.is_matrix():
        return c.rdims
    maps = [m for m in g.reached(c.name, g.producers, lambda m: m.reducer is None) if m.reducer is None]
    computed = {m.name for m in maps}
    found = {ld for m in (c, *maps) for ld in loads(m.body) if ld.tensor not in computed}
    read = [(g.points(dims_used(ld)), order) for ld in found if len(order := _order(ld, c.rdims)) == len(c.rdims)]
    most = max((n for n, _ in read), default=0)
    orders = sorted(order for n, order in read if n == most)
    return c.rdims if not orders or c.rdims in orders else orders[0]


def _order(ld: Load, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the axes that a load has, in the order of its own."""
    places = {d: min(n for n, e in enumerate(ld.index) if d in dims_used(e)) for d in axes if d in dims_used(ld)}
    return tuple(sorted(places, key=lambda d: places[d]))


def split_axes(p: Program, keep_whole: frozenset[str] = frozenset()) -> Program:
    """Law split, for reductions that depend on one over fewer of their axes, or that such a one depends on."""
    g = Graph.of(p)
    body: list[Compute] = []
    for c in p.body:
        keep = None if c.name in keep_whole else _outer_axes(g, c, keep_whole)
        if keep is None or _mostly_parts(g, c, keep):
            body.append(c)
            continue
        inner = tuple(d for d in c.rdims if d not in keep)
        name = free(f"{c.name}_in", p.names)
        part = replace(c, name=name, dims=(*c.dims, *keep), rdims=inner, dtype=c.dtype.compute)
        whole = replace(c, rdims=keep, body=Load(part.name, tuple(Index(d) for d in part.dims)))
        body += [part, whole]
    return replace(p, body=tuple(body))


def _mostly_parts(g: Graph, c: Compute, keep: tuple[str, ...]) -> bool:
    """Whether a product of matrices would have more parts than elements of operands and results: each of these is used
    by several of those (of a convolution of patches, behind which another sums over the channels that it sums over, a
    part for each channel: 604 MB, 2.5 ms on an H200 for what takes 0.08)."""
    product = product_of(c)
    if product is None or not product.is_matrix():
        return False
    whole = g.points(product.left) + g.points(product.right) + g.points(c.dims)
    return g.points((*c.dims, *keep)) > whole


def _outer_axes(g: Graph, c: Compute, apart: frozenset[str]) -> tuple[str, ...] | None:
    """Axes of `c` that are reduced last: those that a dependent reduction over strictly fewer of them has, or those
    that a reduction over strictly fewer of them, which `c` depends on, has not. What is behind one of `apart` is in
    another kernel, whatever its axes (the loss behind a network of convolutions and batch norms), and so is a dependent
    one behind a reduction that keeps one of the axes: that one needs `c` whole, for each place of it (scores of pairs
    that positions turn, the gradients of such pairs, and a sum over these). One that is a cascade
    with another over all of its axes (a mean and a variance) stays whole, as that one would have to be cut too."""
    if c.reducer not in VALUE_REDUCERS or len(c.rdims) < 2 or _in_cascade(g, c):
        return None

    def through(x: Compute) -> bool:
        return x.name not in apart

    def within(x: Compute) -> bool:
        return through(x) and (x.reducer is None or set(c.rdims).isdisjoint(out_dims(x)))

    for later in g.reached(c.name, g.consumers, within):
        common = tuple(d for d in c.rdims if d in later.rdims)
        if later.reducer is not None and common and len(common) < len(c.rdims):
            return common
    product = product_of(c)
    if product is not None and product.is_matrix():
        return None
    for earlier in g.reached(c.name, g.producers, through):
        rest = tuple(d for d in c.rdims if d not in earlier.rdims)
        if earlier.reducer is not None and rest and len(rest) < len(c.rdims) and set(rest) <= set(out_dims(earlier)):
            return rest
    return None


def _in_cascade(g: Graph, c: Compute) -> bool:
    """Whether a reduction over the same axes depends on `c`, or `c` on it, with maps alone between them."""
    linked = (x for step in (g.consumers, g.producers) for x in g.reached(c.name, step, lambda m: m.reducer is None))
    return any(x.reducer is not None and set(x.rdims) == set(c.rdims) for x in linked)


def exchange_sums(p: Program, keep: frozenset[str] = frozenset()) -> Program:
    """Law exchange, where the inner sum depends on a reduction over the outer one's axes, and neither is in `keep`; of
    three sums in a row the first two."""
    g = Graph.of(p)
    inner_of: dict[str, str] = {}
    for c in p.body:
        if c.reducer != "sum" or c.name in keep:
            continue
        for r in g.producers[c.name]:
            if r not in keep and r not in inner_of and _exchanges(g, g.by_name[r], c):
                inner_of[c.name] = r
                break
    body: list[Compute] = []
    for c in p.body:
        if c.name in inner_of.values():
            continue
        if c.name not in inner_of:
            body.append(c)
            continue
        s = g.by_name[inner_of[c.name]]
        (ld,) = [x for x in loads(c.body) if x.tensor == s.name]
        at: dict[Expr, Expr] = {Index(d): ix for d, ix in zip(s.dims, ld.index, strict=True)}
        merged = substitute(c.body, {ld: substitute(s.body, at)})
        part = replace(c, name=free(f"{c.name}_in", p.names), dims=(*c.dims, *s.rdims), body=merged)
        outer = replace(c, rdims=s.rdims, body=Load(part.name, tuple(Index(d) for d in part.dims)))
        body += [part, outer]
    return replace(p, body=tuple(body))


def _exchanges(g: Graph, s: Compute, c: Compute) -> bool:
    sizes = g.program.sizes
    if s.reducer != "sum" or g.consumers[s.name] != (c.name,) or s.name in g.program.outputs:
        return False
    if set(s.rdims) & {*c.dims, *c.rdims} or not all(is_static(sizes[d]) for d in s.rdims):
        return False
    found = [x for x in loads(c.body) if x.tensor == s.name]
    if g.points(s.rdims) > SHORT or len(found) != 1 or not _linear_in(c.body, found[0]):
        return False
    apart = g.points({*s.dims, *s.rdims}) + g.points({*c.dims, *c.rdims})
    if g.points({*c.dims, *c.rdims, *s.rdims}) > MORE * apart:
        return False
    return _depends_on_axes(g, s.name, set(c.rdims))


def _linear_in(e: Expr, x: Load) -> bool:
    """Whether e = (something without x) * x."""
    match e:
        case Load():
            return e == x
        case Call("mul", (a, b)):
            return (_linear_in(a, x) and x.tensor not in tensors_read(b)) or (
                _linear_in(b, x) and x.tensor not in tensors_read(a)
            )
        case Call("neg", (a,)):
            return _linear_in(a, x)
        case Call("div", (a, b)):
            return _linear_in(a, x) and x.tensor not in tensors_read(b)
    return False


def _depends_on_axes(g: Graph, name: str, axes: set[str]) -> bool:
    """Whether a Compute uses, directly or not, a reduction over one of the axes."""
    todo = list(g.producers[name])
    seen = set(todo)
    while todo:
        r = todo.pop()
        if set(g.by_name[r].rdims) & axes:
            return True
        fresh = [u for u in g.producers[r] if u not in seen]
        seen.update(fresh)
        todo += fresh
    return False
