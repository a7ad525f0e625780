"""Rank-1 corrections: what a sum adds to an operand in separable form leaves the product.

    (X - a b^T) W = X W - a (b^T W)             Blockbuster rule 5; LayerNorm's mean with b = 1
    (X + 1 b^T) W = X W + 1 (b^T W)             LayerNorm's shift

An operand is a map whose terms (products distributed over sums) divide into separable ones, each
factor constant along what is contracted or varying along nothing else, and others. The vectors
b^T W are sums over the weight alone.

Side conditions: at least one term of each kind; the operand is stored in f32 or wider and is
not both operands.
Rounding: X W - a b^T W cancels where |a b| is much larger than what is left: the error grows with
|mean| / deviation times the operand's precision. In f16 and bf16, where the mean is subtracted
before rounding and now is not, that would show: such operands are refused.
"""

from __future__ import annotations

from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Const, Expr, Index, Load, dims_used, substitute
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.laws.law import Law, Match
from tilefold.tensor.laws.terms import Factors, Gemm, fresh, gemms, map_of, plain, product, terms, total


def _split(p: Program, g: Gemm, operand: Load) -> tuple[list[Factors], list[tuple[Factors, Factors]]] | None:
    """Terms that stay, and separable ones as (factors out of the product, factors along it)."""
    m = map_of(p, operand.tensor)
    if m is None or m.dtype not in (DType.F32, DType.F64):
        return None
    body = substitute(m.body, {Index(d): i for d, i in zip(m.dims, operand.index, strict=True)})
    found = terms(body, p.dtype_of)
    if found is None or len(found) < 2:
        return None
    over = set(g.compute.rdims)
    stay: list[Factors] = []
    apart: list[tuple[Factors, Factors]] = []
    for t in found:
        if any(dims_used(f) & over and dims_used(f) - over for f in t):
            stay.append(t)
        else:
            out = tuple(f for f in t if not dims_used(f) & over)
            apart.append((out, tuple(f for f in t if dims_used(f) & over)))
    return (stay, apart) if stay and apart else None


def matches(p: Program) -> tuple[Match, ...]:
    """Products with an operand that has separable terms."""
    out: list[Match] = []
    for name, g in gemms(p).items():
        for operand in g.operands if g.a.tensor != g.b.tensor else ():
            if _split(p, g, operand) is not None:
                out.append(Match("rank one", (name, operand.tensor), f"from {operand.tensor} in {name}"))
    return tuple(out)


def apply(p: Program, match: Match) -> Program:
    """Replace the product by that of the other terms, plus the corrections."""
    name, tensor = match.at
    g = gemms(p)[name]
    operand = g.a if g.a.tensor == tensor else g.b
    split = _split(p, g, operand)
    m = map_of(p, tensor)
    assert split is not None and m is not None
    stay, apart = split
    other, c = g.other(operand), g.compute
    dims = tuple(d for d in (*c.dims, *c.rdims) if d in dims_used(operand))
    rest = Compute(fresh(p, f"{tensor}_c"), dims, m.dtype, total(stay), loc=m.loc)
    made: list[Compute] = [rest]
    p = replace(p, body=(*p.body, rest))
    raw = fresh(p, f"{name}_raw")
    made.append(replace(c, name=raw, body=Call("mul", (Load(rest.name, plain(dims)), other))))
    p = replace(p, body=(*p.body, made[-1]))
    result: Expr = Load(raw, plain(c.dims))
    for out, along in apart:
        vector = _vector(p, c, other, along)
        made.append(vector)
        p = replace(p, body=(*p.body, vector))
        result = Call("add", (result, product((*out, Load(vector.name, plain(vector.dims))))))
    made.append(replace(c, reducer=None, rdims=(), body=result))
    at = next(n for n, s in enumerate(p.body) if s.name == name)
    body = p.body[: len(p.body) - len(made) + 1]
    return replace(p, body=(*body[:at], *made, *body[at + 1 :]))


def _vector(p: Program, c: Compute, other: Load, along: Factors) -> Compute:
    """sum over the contracted dims of `along` times the other operand."""
    dims = tuple(d for d in c.dims if d in dims_used(other))
    dtype = c.dtype.compute
    body = product((*along, other)) if along else other
    if isinstance(body, Const):
        body = Const(body.value, DType.F32)
    return Compute(fresh(p, f"{c.name}_v"), dims, dtype, body, "sum", c.rdims, loc=c.loc)


RANK_ONE = Law(
    "rank one", "(X + a b^T) W = X W + a (b^T W)",
    "subtracts after the sum: the error grows with |a b| / |X + a b|; f32 and wider only",
    "Blockbuster rule 5", matches, apply,
)  # fmt: skip
