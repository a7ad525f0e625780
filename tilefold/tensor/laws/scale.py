"""Scales commute with matrix products.

    row scale       (diag(r) X) W = diag(r) (X W)          CODA 3.2.1: 1 / rms leaves the product's operand
    column scale    (X diag(g)) W = X (diag(g) W)          the scale of a contracted dim moves to the other operand

An operand of a product is a map m = s f with a factor s that lacks a dim of m. Where s is constant
along what is contracted, the product of f is taken and its result scaled; where s varies only
along what is contracted (and what the other operand has), the other operand is scaled.

Side conditions: m is a product with the factor s (nothing quantises it), s lacks one of m's dims,
and the product is not one of m with itself.
Rounding: the scale meets a sum instead of each element: one rounding of every operand element is
saved, so that narrow operands give no larger an error (CODA figure 6). A scale of 0, inf or nan
gives other special values than the elementwise form only where that has 0 * inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tilefold.algebra.expr import Call, Expr, Index, Load, dims_used, substitute
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.laws.law import Law, Match
from tilefold.tensor.laws.terms import Gemm, dims_of_load, factors, fresh, gemms, map_of, plain, product

_ROUNDING = "one rounding fewer of each operand element; the scale meets the accumulated sum"


def _scales(p: Program, m: Compute) -> list[Expr]:
    """Factors of a map that lack one of its dims, those over the same dims together."""
    if m.dtype.rounds or not m.dtype.is_float:
        return []
    by_dims: dict[frozenset[str], list[Expr]] = {}
    parts = factors(m.body, p.dtype_of)
    for f in parts:
        if dims_used(f) < set(m.dims):
            by_dims.setdefault(dims_used(f), []).append(f)
    together = [f for group in by_dims.values() for f in group]
    if len(together) == len(parts):  # an outer product of scales: some factor has to stay
        return []
    return [product(group) for group in by_dims.values()]


def _rest(p: Program, m: Compute, s: Expr) -> Expr:
    gone = list(factors(s, p.dtype_of))
    left = []
    for f in factors(m.body, p.dtype_of):
        if f in gone:
            gone.remove(f)
        else:
            left.append(f)
    return product(left)


def _way(g: Gemm, m: Compute, operand: Load, s: Expr) -> str | None:
    """ "out" of the product, "over" to the other operand, or None."""
    used = dims_used(_read(m, operand, s))
    over = set(g.compute.rdims)
    if not used & over:
        return "out"
    return "over" if used <= dims_used(g.other(operand)) else None


def _read(m: Compute, operand: Load, s: Expr) -> Expr:
    return substitute(s, {Index(d): i for d, i in zip(m.dims, operand.index, strict=True)})


def _places(p: Program) -> Iterator[tuple[Compute, Expr, list[tuple[str, str]]]]:
    """(map, scale, its [(product, way)])."""
    all_gemms = gemms(p)
    for m in p.body:
        if m.reducer is not None:
            continue
        for s in _scales(p, m):
            found = [
                (name, way)
                for name, g in all_gemms.items()
                if g.a.tensor != g.b.tensor
                for operand in g.operands
                if operand.tensor == m.name and (way := _way(g, m, operand, s)) is not None
            ]
            if found:
                yield m, s, found


def _matches(kind: str) -> Callable[[Program], tuple[Match, ...]]:
    law = {"out": "row scale", "over": "column scale"}[kind]

    def matches(p: Program) -> tuple[Match, ...]:
        out: list[Match] = []
        for m, s, found in _places(p):
            for name, way in found:
                if way == kind:
                    out.append(Match(law, (m.name, name), f"out of {m.name} in {name}", (s,)))
            alike = tuple(n for n, way in found if way == kind)
            groups = dict.fromkeys((alike, tuple(n for n, _ in found) if found[0][1] == kind else ()))
            out += [
                Match(law, (m.name, *names), f"out of {m.name} in {', '.join(names)}", (s,))
                for names in groups
                if len(names) > 1
            ]
        return tuple(out)

    return matches


def apply(p: Program, match: Match) -> Program:
    """Take the scale out of the operand of every product that the match names."""
    m = map_of(p, match.at[0])
    s = match.choice[0]
    assert m is not None and isinstance(s, Expr)
    rest = _rest(p, m, s)
    body: list[Compute] = []
    reduced: str | None = None
    for c in p.body:
        body.append(c)
        if c.name == m.name and not isinstance(rest, Load):
            reduced = fresh(p, f"{m.name}_n")
            body.append(replace(m, name=reduced, body=rest))
    base = Load(reduced, plain(m.dims)) if reduced is not None else rest
    for name in match.at[1:]:
        at = next(n for n, c in enumerate(body) if c.name == name)
        body[at : at + 1] = _commuted(replace(p, body=tuple(body)), m, base, s, body[at])
    return replace(p, body=tuple(body))


def _commuted(p: Program, m: Compute, base: Expr, s: Expr, c: Compute) -> list[Compute]:
    """The statements in place of product `c`."""
    g = gemms(p)[c.name]
    operand = g.a if g.a.tensor == m.name else g.b
    scale, smaller = _read(m, operand, s), _read(m, operand, base)
    if _way(g, m, operand, s) == "out":
        raw = fresh(p, f"{c.name}_raw")
        scaled = replace(c, reducer=None, rdims=(), body=product((Load(raw, plain(c.dims)), scale)))
        return [replace(c, name=raw, body=Call("mul", _in_order(g, operand, smaller, g.other(operand)))), scaled]
    other = g.other(operand)
    dims = dims_of_load(other)
    weight = Compute(fresh(p, f"{other.tensor}_s"), dims, p.dtype_of(other.tensor), product((other, scale)), loc=c.loc)
    moved = Call("mul", _in_order(g, operand, smaller, Load(weight.name, plain(dims))))
    return [weight, replace(c, body=moved)]


def _in_order(g: Gemm, operand: Load, mine: Expr, other: Expr) -> tuple[Expr, Expr]:
    return (mine, other) if operand == g.a else (other, mine)


ROW_SCALE = Law("row scale", "(diag(r) X) W = diag(r) (X W)", _ROUNDING, "CODA 3.2.1", _matches("out"), apply)
COLUMN_SCALE = Law(
    "column scale", "(X diag(g)) W = X (diag(g) W)", "the other operand is rounded after scaling", "CODA 3.2.1",
    _matches("over"), apply,
)  # fmt: skip
