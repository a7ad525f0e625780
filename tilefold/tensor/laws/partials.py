"""Reductions along a product's output as partial states of its output tiles.

    R over n of f(h[i, n])  =  R over tiles of (R over the tile of f(h[i, tile, l]))        CODA 3.2.1

The dim n is cut into tiles (n -> tile T + l, mixed radix), the partials are found where a tile is,
and a small statement combines them. Reductions that depend on one another (max and sum of exp, mean
and squares about it) go through the Fold of their cascade (`algebra.derive`): a tile's state is made
with the tile's own results, and merging repairs it,

    var = R over tiles of repair(var of the tile, D of the tile, D)                          RedFuser eq. 11

Side conditions: the tile divides the dim; the Fold exists; value reducers. Rounding: another order
of the same sums, at least as exact.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.derive import derive_fold
from tilefold.algebra.expr import Const, Expr, Index, Load, loads, transform
from tilefold.algebra.fold import NEW, OLD, Fold, StateVar
from tilefold.algebra.ops import VALUE_REDUCERS
from tilefold.errors import NotFusibleError
from tilefold.tensor.analysis import Graph
from tilefold.tensor.extremes import is_exact
from tilefold.tensor.index_simplify import const
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.laws.law import Law, Match
from tilefold.tensor.laws.terms import fresh, gemms, plain
from tilefold.tensor.narrow import narrow
from tilefold.tensor.rewrite import in_order, rename_loads, substitute_map
from tilefold.tensor.sizes import estimate
from tilefold.tensor.split_dims import cut
from tilefold.tensor.unify import unify

#: Columns (or rows) of an output tile.
TILE = 128
#: A tile is more than this part of what is asked for.
SMALLEST = 8


def tile_of(extent: Expr, most: int = TILE) -> int | None:
    """The largest divisor of a static extent up to `most`, None where it fits one tile or all are much smaller."""
    if not isinstance(extent, Const) or extent.value <= most:
        return None
    return next((t for t in range(most, max(1, most // SMALLEST), -1) if int(extent.value) % t == 0), None)


def along_products(p: Program) -> dict[str, list[Compute]]:
    """Dim -> reductions (no products) of what a product makes along it, in program order.

    A reduction over several such dims is listed under the longest.
    """
    known = gemms(p)
    made = _made_along(p)
    found: dict[str, list[Compute]] = {}
    for c in p.body:
        if c.reducer not in VALUE_REDUCERS or c.name in known:
            continue
        read = [
            d for d in c.rdims if any(d in made.get(ld.tensor, ()) and Index(d) in ld.index for ld in loads(c.body))
        ]
        if read:
            found.setdefault(max(read, key=lambda d: estimate(p.sizes[d])), []).append(c)
    return found


def _made_along(p: Program) -> dict[str, set[str]]:
    """Dims of results that come out of a product's epilogue: its own, and those of maps of it.

    A map that needs a reduction over the dim is made after it, in a pass of its own.
    """
    known = gemms(p)
    out: dict[str, set[str]] = {}
    behind: dict[str, set[str]] = {}  # dims that were reduced on the way since the last product
    for c in p.body:
        if c.name in known:
            out[c.name], behind[c.name] = set(c.dims), set()
            continue
        behind[c.name] = set(c.rdims).union(*(behind.get(ld.tensor, ()) for ld in loads(c.body)))
        if c.reducer is None:
            dims = {d for ld in loads(c.body) for d in out.get(ld.tensor, ()) if Index(d) in ld.index}
            out[c.name] = dims & set(c.dims) - behind[c.name]
    return out


def matches(p: Program, most: int = TILE) -> tuple[Match, ...]:
    """Dims along which partials can be taken, with the tile."""
    out = []
    for d, reductions in along_products(p).items():
        tile = tile_of(p.sizes[d], most)
        if tile is not None:
            names = ", ".join(c.name for c in reductions)
            out.append(Match("partials", (d,), f"{names} along {d} in tiles of {tile}", (const(tile),)))
    return tuple(out)


def together(found: tuple[Match, ...]) -> Match:
    """Several dims' matches as one, so that the program is cut once."""
    dims = tuple(d for m in found for d in m.at)
    return Match("partials", dims, "; ".join(m.what for m in found), tuple(c for m in found for c in m.choice))


def apply(p: Program, match: Match) -> Program:
    """Cut the dims everywhere and take partials of the reductions along them."""
    along = along_products(p)
    cuts = {d: by for d, by in zip(match.at, match.choice, strict=True) if isinstance(by, Expr)}
    sizes = set(p.sizes)
    p = narrow(cut(p, cuts))
    made = [n for n in p.sizes if n not in sizes]
    for n, d in enumerate(cuts):
        tile, inside = made[2 * n], made[2 * n + 1]
        names = [c.name for c in along[d]]
        done: set[str] = set()
        for name in names:
            if name not in done:
                group = _cascade(p, name, names, inside)
                p = _partial(p, group, tile, inside)
                done |= set(group)
    return unify(in_order(p))


def _cascade(p: Program, name: str, names: list[str], inside: str) -> list[str]:
    """The reduction with the others of `names` that depend on it, over the same axes, of the same product."""
    by_name = {c.name: c for c in p.body}
    group = [name]
    source = _latest_product(p, by_name[name])
    for other in names[names.index(name) + 1 :]:
        c = by_name[other]
        if set(c.rdims) != set(by_name[name].rdims) or _latest_product(p, c) != source:
            continue
        if {ld.tensor for ld in loads(_through_maps(p, c.body, set(group)))} & set(group):
            group.append(other)
    return group


def _latest_product(p: Program, c: Compute) -> str | None:
    """The last product whose result a statement reads, directly or through maps: where its partials are made."""
    known = gemms(p)
    maps = {m.name: m for m in p.body if m.reducer is None}
    position = {m.name: n for n, m in enumerate(p.body)}
    found: set[str] = set()
    todo, seen = [ld.tensor for ld in loads(c.body)], set()
    while todo:
        t = todo.pop()
        if t in known:
            found.add(t)
        elif t in maps and t not in seen:
            seen.add(t)
            todo += [ld.tensor for ld in loads(maps[t].body)]
    return max(found, key=position.__getitem__, default=None)


def _through_maps(p: Program, e: Expr, wanted: set[str]) -> Expr:
    """Maps that read one of `wanted` substituted, so that the dependence is in the open."""
    maps = {c.name: c for c in p.body if c.reducer is None}

    def reads(name: str) -> bool:
        return any(ld.tensor in wanted or (ld.tensor in maps and reads(ld.tensor)) for ld in loads(maps[name].body))

    def one(ld: Load) -> Expr | None:
        if ld.tensor in maps and reads(ld.tensor):
            return _through_maps(p, substitute_map(maps[ld.tensor], ld), wanted)
        return None

    return rename_loads(e, one)


def _partial(p: Program, group: list[str], tile: str, inside: str) -> Program:
    by_name = {c.name: c for c in p.body}
    members = [by_name[n] for n in group]
    if len(members) == 1:
        return _simple(p, members[0], inside)
    axes = members[0].rdims
    if set(axes) == {tile, inside}:
        try:
            return _folded(p, members, tile, inside)
        except NotFusibleError:
            pass
    for c in members:
        p = _simple(p, c, inside)
    return p


def _simple(p: Program, c: Compute, inside: str) -> Program:
    """An independent reduction: over the inside of a tile, then over the rest."""
    rest = tuple(d for d in c.rdims if d != inside)
    part = replace(c, name=fresh(p, f"{c.name}_part"), dims=(*c.dims, *rest), rdims=(inside,), dtype=c.dtype.compute)
    whole = replace(c, rdims=rest, body=Load(part.name, plain(part.dims)))
    return _with(p, c, [part, whole])


def _with(p: Program, c: Compute, made: list[Compute]) -> Program:
    return replace(p, body=tuple(x for s in p.body for x in (made if s.name == c.name else [s])))


def _folded(p: Program, members: list[Compute], tile: str, inside: str) -> Program:
    """A cascade: each state variable in a tile, then merged; NotFusibleError where there is no Fold."""
    names = {c.name for c in members}
    axes = members[0].rdims
    reductions = tuple(
        Reduction(
            c.name, str(c.reducer), c.dims, _through_maps(p, c.body, names), c.dtype.compute, loc=c.loc,
            exact=is_exact(Graph.of(p), c),
        )
        for c in members
    )  # fmt: skip
    fold = derive_fold(Cascade(axes, reductions, tuple((i.name, i.dtype) for i in p.inputs)))
    parts: dict[str, str] = {}
    wholes: dict[str, str] = {}
    made: list[Compute] = []
    for v in fold.state:
        known = replace(p, body=(*p.body, *made))
        parts[v.name] = fresh(known, f"{v.name}_part")
        element = _named(fold, v.element, parts, tile)
        part = Compute(parts[v.name], (*v.dims, tile), v.dtype, element, v.reducer, (inside,), loc=members[0].loc)
        made.append(part)
    for v in fold.state:
        known = replace(p, body=(*p.body, *made))
        wholes[v.name] = v.name if v.name not in names and v.name not in _taken(known) else fresh(known, f"{v.name}_s")
        made.append(Compute(wholes[v.name], v.dims, v.dtype, _merged(v, parts, wholes, tile), v.reducer, (tile,)))
    for c in members:
        value = dict(fold.finish)[c.name]
        made.append(replace(c, reducer=None, rdims=(), body=_named(fold, value, wholes, None)))
    return replace(p, body=(*(c for c in p.body if c.name not in names), *made))


def _taken(p: Program) -> set[str]:
    return {i.name for i in p.inputs} | {r for c in p.body for r in c.results} | set(p.sizes)


def _named(fold: Fold, e: Expr, table: dict[str, str], tile: str | None) -> Expr:
    """State loads (`@new`, or bare in `finish`) as loads of the tensors that hold them."""
    states = {v.name for v in fold.state}

    def one(n: Expr) -> Expr | None:
        if not isinstance(n, Load):
            return None
        base = n.tensor.removesuffix(NEW)
        if base not in states or base not in table:
            return None
        return Load(table[base], (*n.index, Index(tile)) if tile is not None else n.index)

    return transform(e, one)


def _merged(v: StateVar, parts: dict[str, str], wholes: dict[str, str], tile: str) -> Expr:
    """A tile's variable moved from the tile's D to the whole's."""

    def one(n: Expr) -> Expr | None:
        if not isinstance(n, Load):
            return None
        base = n.tensor.removesuffix(NEW).removesuffix(OLD)
        if base not in parts:
            return None
        if n.tensor.endswith(NEW):
            return Load(wholes[base], n.index)
        return Load(parts[base], (*n.index, Index(tile)))

    own = Load(parts[v.name], (*plain(v.dims), Index(tile)))
    return own if v.repair is None else transform(v.repair, one)


PARTIALS = Law(
    "partials", "R over n = R over tiles of R over the tile", "the same reductions in another order",
    "CODA 3.2.1, RedFuser eq. 11", matches, apply,
)  # fmt: skip
