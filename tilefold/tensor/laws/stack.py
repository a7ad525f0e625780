"""Paired features: halves that an epilogue combines lie in one product's tile.

    stack         X W1, X W2            = (X [W1 W2])[.., 0], (X [W1 W2])[.., 1]        weights interleaved
    concatenate   A1 B1 + A2 B2         = [A1 A2] [B1; B2]                           summed over (k, q)
    interleave    h[.., D q + l] read at l and D + l  ->  h[.., q, l], both q in one tile

CODA 3.2.2 (RoPE, SwiGLU, and SwiGLU's backward, whose two gradients one product consumes; kernels
1, 2, 6, 7, 10). The stacked dim q is the innermost of the operand, so that paired features are
neighbours; it is not parallel, so that an epilogue has the whole pair. `interleave` cuts the output
dim (mixed radix, which leaves memory as it is).

Side conditions: the products have the same shared operand, dims of equal extents, and dtype; no
product depends on the other; for `concatenate`, nothing but one sum reads them. Rounding: none for
stack and interleave; concatenate adds in the accumulator what was rounded in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from tilefold.algebra.expr import (
    Call,
    Const,
    Expr,
    Index,
    Load,
    dims_used,
    loads,
    rename_dims,
    substitute,
    tensors_read,
    transform,
    walk,
)
from tilefold.tensor.analysis import Graph
from tilefold.tensor.index_simplify import const, poly, same
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.laws.law import Law, Match
from tilefold.tensor.laws.terms import Gemm, dims_of_load, fresh, gemms, plain
from tilefold.tensor.narrow import narrow
from tilefold.tensor.rewrite import dims_of, in_order
from tilefold.tensor.split_dims import cut
from tilefold.tensor.unify import unify

#: Most products stacked into one.
MOST = 3


def _alike(p: Program, a: Compute, b: Compute) -> dict[str, str] | None:
    """How b's dims must be called to be a's; None where the two have other shapes or dtypes."""
    if a.dtype is not b.dtype or len(a.dims) != len(b.dims) or len(a.rdims) != len(b.rdims):
        return None
    names = dict(zip((*b.dims, *b.rdims), (*a.dims, *a.rdims), strict=True))
    return names if all(same(p.sizes[x], p.sizes[y]) for x, y in names.items()) else None


def _independent(g: Graph, names: tuple[str, ...]) -> bool:
    """Whether none of these statements needs another of them."""
    return not any(c.name in names for n in names for c in g.reached(n, g.producers, lambda c: True))


def _stacked(q: str, parts: list[Expr]) -> Expr:
    """parts[q], as nested conditions."""
    out = parts[-1]
    for n in range(len(parts) - 2, -1, -1):
        out = Call("where", (Call("lt", (Index(q), const(n + 1))), parts[n], out))
    return out


def _pack(p: Program, q: str, operands: list[Load]) -> Compute:
    """The operands as one tensor with q innermost."""
    first = operands[0]
    name = fresh(p, f"{first.tensor}_{len(operands)}")
    return Compute(name, (*dims_of_load(first), q), p.dtype_of(first.tensor), _stacked(q, list(operands)))


def _stack_dim(p: Program, n: int, taken: set[str]) -> str:
    """A dim of extent n for stacks: the one there is, unless the products range over it already."""
    name = f"q{n}"
    while name in taken or (name in p.sizes and p.sizes[name] != const(n)):
        name += "_"
    return name if name in p.sizes else fresh(p, name)


def _packed_so(p: Program, operands: list[Load]) -> bool:
    """Whether the program packs these in this order already."""
    wanted = [o.tensor for o in operands]
    return any(
        c.reducer is None and isinstance(c.body, Call) and c.body.op == "where" and _parts(c.body) == wanted
        for c in p.body
    )


def _parts(e: Expr) -> list[str]:
    """Tensors that nested conditions choose from."""
    match e:
        case Call("where", (_, a, b)):
            return _parts(a) + _parts(b)
        case Load(tensor, _):
            return [tensor]
    return [""]


# -- stack ----------------------------------------------------------------------------------


def _with_shared(p: Program, found: list[Gemm]) -> list[tuple[Load, Load]] | None:
    """(shared operand, own operand) of each product in the first one's dims."""
    for shared in found[0].operands:
        out = [(shared, found[0].other(shared))]
        for g in found[1:]:
            names = _alike(p, found[0].compute, g.compute)
            if names is None:
                return None
            renamed = [rename_dims(o, names) for o in g.operands]
            if shared not in renamed:
                break
            own = renamed[1 - renamed.index(shared)]
            if not isinstance(own, Load) or p.dtype_of(own.tensor) is not p.dtype_of(out[0][1].tensor):
                break
            out.append((shared, own))
        if len(out) == len(found):
            return out
    return None


def stack_matches(p: Program) -> tuple[Match, ...]:
    """Products that share an operand."""
    known, g = gemms(p), Graph.of(p)
    return tuple(
        Match("stack", names, f"{', '.join(names)} as one product")
        for names in _groups(known)
        if _with_shared(p, [known[n] for n in names]) is not None and _independent(g, names)
    )


def _groups(known: Mapping[str, Gemm]) -> Iterator[tuple[str, ...]]:
    """Pairs and triples of products that read a common tensor."""
    names = list(known)
    reads = {n: frozenset(o.tensor for o in known[n].operands) for n in names}
    for size in range(2, MOST + 1):
        yield from (g for g in combinations(names, size) if frozenset.intersection(*(reads[n] for n in g)))


def stack_apply(p: Program, match: Match) -> Program:
    """One product with an inner dim q; the old results are its elements."""
    found = [gemms(p)[n] for n in match.at]
    pairs = _with_shared(p, found)
    assert pairs is not None
    first = found[0].compute
    q = _stack_dim(p, len(found), {d for g in found for d in dims_of(g.compute)})
    p = replace(p, sizes={**p.sizes, q: const(len(found))})
    order = list(range(len(found)))
    if _packed_so(p, [o for _, o in pairs[::-1]]):
        order.reverse()
    packed = _pack(p, q, [pairs[n][1] for n in order])
    whole = fresh(p, f"{first.name}_{len(found)}")
    body = Call("mul", (pairs[0][0], Load(packed.name, plain(packed.dims))))
    stacked = replace(first, name=whole, dims=(*first.dims, q), body=body)
    out: list[Compute] = []
    for c in p.body:
        if c.name in match.at:
            n = order.index(match.at.index(c.name))
            out.append(replace(c, reducer=None, rdims=(), body=Load(whole, (*plain(c.dims), const(n)))))
        else:
            out.append(c)
    return in_order(replace(p, body=(packed, stacked, *out)))


# -- concatenate ------------------------------------------------------------------------------


def _summed(p: Program) -> Iterator[tuple[list[Gemm], list[tuple[Load, ...]]]]:
    """(products that are only ever added to one another, their operands side by side in the first one's dims)."""
    known = gemms(p)
    together: dict[tuple[str, ...], int] = {}
    reads: dict[str, int] = {}
    for c in p.body:
        for ld in loads(c.body):
            if ld.tensor in known:
                reads[ld.tensor] = reads.get(ld.tensor, 0) + 1
        for group in _added(c.body, set(known) - set(p.outputs)):
            if _join(c.body, group, group[0]) is not None:
                names = tuple(ld.tensor for ld in group)
                together[names] = together.get(names, 0) + 1
    for names, n in together.items():
        if all(reads[x] == n for x in names):
            found = [known[x] for x in names]
            operands = _side_by_side(p, found)
            if operands is not None:
                yield found, operands


def _side_by_side(p: Program, found: list[Gemm]) -> list[tuple[Load, ...]] | None:
    """For each operand of the first product, the matching operands of all."""
    first = found[0]
    sides: list[list[Load]] = [[o] for o in first.operands]
    for g in found[1:]:
        names = _alike(p, first.compute, g.compute)
        if names is None:
            return None
        renamed = [r for o in g.operands if isinstance(r := rename_dims(o, names), Load)]
        for order in (renamed, renamed[::-1]):
            pairs = list(zip(first.operands, order, strict=True))
            if all(dims_used(o) == dims_used(r) and p.dtype_of(o.tensor) is p.dtype_of(r.tensor) for o, r in pairs):
                for side, r in zip(sides, order, strict=True):
                    side.append(r)
                break
        else:
            return None
    return [tuple(side) for side in sides]


def _chain(e: Expr) -> list[Expr]:
    match e:
        case Call("add", (a, b)):
            return _chain(a) + _chain(b)
    return [e]


def _added(e: Expr, wanted: set[str]) -> dict[tuple[Load, ...], None]:
    """Groups of loads that are terms of one sum, at the same indices."""
    out: dict[tuple[Load, ...], None] = {}
    for n in walk(e):
        if isinstance(n, Call) and n.op == "add":
            found = sorted({t for t in _chain(n) if isinstance(t, Load) and t.tensor in wanted}, key=repr)
            for size in range(2, MOST + 1):
                out |= {g: None for g in combinations(found, size) if len({t.index for t in g}) == 1}
    return out


def _join(e: Expr, group: tuple[Load, ...], whole: Load) -> Expr | None:
    """`e` with every sum of the group replaced, None where one of them stands elsewhere too."""

    def one(n: Expr) -> Expr | None:
        if not isinstance(n, Call) or n.op != "add":
            return None
        chain = _chain(n)
        if any(chain.count(t) != 1 for t in group):
            return None
        out: Expr = mark
        for t in chain:
            if t not in group:
                out = Call("add", (out, t))
        return out

    mark = Load("@whole", group[0].index)
    done = transform(e, one)
    return None if {t.tensor for t in group} & tensors_read(done) else substitute(done, {mark: whole})


def concat_matches(p: Program) -> tuple[Match, ...]:
    """Products that are only ever added."""
    graph = Graph.of(p)
    names = [tuple(g.compute.name for g in found) for found, _ in _summed(p)]
    return tuple(Match("concatenate", n, " + ".join(n)) for n in names if _independent(graph, n))


def concat_apply(p: Program, match: Match) -> Program:
    """One product over (k, q) in place of the sum."""
    found, operands = next(f for f in _summed(p) if tuple(g.compute.name for g in f[0]) == match.at)
    first = found[0].compute
    q = _stack_dim(p, len(found), {d for g in found for d in dims_of(g.compute)})
    p = replace(p, sizes={**p.sizes, q: const(len(found))})
    turned = any(_packed_so(p, list(side[::-1])) for side in operands)
    made: list[Compute] = []
    for side in operands:
        made.append(_pack(replace(p, body=(*p.body, *made)), q, list(side[::-1] if turned else side)))
    body = Call("mul", (Load(made[0].name, plain(made[0].dims)), Load(made[1].name, plain(made[1].dims))))
    whole = replace(first, name=fresh(p, f"{first.name}_{len(found)}"), rdims=(*first.rdims, q), body=body)
    rest = [_reading(c, match.at, whole.name) for c in p.body if c.name not in match.at]
    return in_order(replace(p, body=(*made, whole, *rest)))


def _reading(c: Compute, names: tuple[str, ...], whole: str) -> Compute:
    """A reader of the sum reading the whole."""
    for a in [ld for ld in loads(c.body) if ld.tensor == names[0]]:
        joined = _join(c.body, tuple(Load(n, a.index) for n in names), Load(whole, a.index))
        assert joined is not None
        c = replace(c, body=joined)
    return c


# -- interleave -------------------------------------------------------------------------------


def _halves(p: Program) -> Iterator[tuple[str, str, int]]:
    """(product, its dim, D) where the dim is read D apart."""
    known = gemms(p)
    for c in p.body:
        for ld in loads(c.body):
            if ld.tensor not in known:
                continue
            for d, i in zip(known[ld.tensor].compute.dims, ld.index, strict=True):
                n = p.sizes[d]
                offset = poly(i, p.sizes).get((), 0)
                if isinstance(n, Const) and offset and not isinstance(i, Const) and int(n.value) % abs(offset) == 0:
                    yield ld.tensor, d, abs(offset)


def interleave_matches(p: Program) -> tuple[Match, ...]:
    """Output dims of products that are read at an offset which divides them."""
    found = dict.fromkeys((d, by) for _, d, by in _halves(p))
    return tuple(Match("interleave", (d,), f"{d} as pairs {by} apart", (const(by),)) for d, by in found)


def interleave_apply(p: Program, match: Match) -> Program:
    """The dim cut where its parts begin."""
    (d,) = match.at
    by = match.choice[0]
    assert isinstance(by, Expr)
    return unify(narrow(cut(p, {d: by})))


STACK = Law(
    "stack", "X W1, X W2 = X [W1 W2]", "none", "CODA 3.2.2", stack_matches, stack_apply
)  # fmt: skip
CONCATENATE = Law(
    "concatenate", "A1 B1 + A2 B2 = [A1 A2] [B1; B2]", "the two are added unrounded", "CODA kernel 10",
    concat_matches, concat_apply,
)  # fmt: skip
INTERLEAVE = Law(
    "interleave", "h[.., D q + l] = h[.., q, l]", "none", "CODA 3.2.2", interleave_matches, interleave_apply
)
