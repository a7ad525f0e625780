"""The transpose identity: an inner product with a product's result is one with its operand's.

    sum over n of (sum over m of A[i, m] W[m, n]) F[i, n]  =  sum over m of A[i, m] Y[i, m],
    Y[i, m] = sum over n of F[i, n] W[m, n]                               CODA 3.2.4 and A.2

In the backward pass of an RMSNorm, A is the gradient of the next product's result and Y that
result, which the forward pass has: the row statistic is found where the gradient is made, before
the product that needs it in its epilogue. Several products in the sum (a norm read by Q, K and V)
give one inner product each.

Side conditions: each term of the sum has one factor that is a product D = A W over its own dims; a
product Y over n exists whose operands are the same W and an X, and F is X times factors constant
along n. Rounding: the same sums in another order; both are sums of as many terms as the
contraction, in the accumulator's precision.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from tilefold.algebra.expr import Expr, Load, dims_used, loads
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.laws.law import Law, Match
from tilefold.tensor.laws.terms import (
    Factors,
    Gemm,
    expand,
    fresh,
    gemms,
    map_of,
    plain,
    product,
    summands,
    terms,
)
from tilefold.tensor.rewrite import in_order, substitute_map


@dataclass(frozen=True, slots=True)
class _Moved:
    """One term after the exchange: `body` summed over `over`."""

    body: Factors
    over: tuple[str, ...]


def _moved(p: Program, s: Compute, term: Factors, known: dict[str, Gemm]) -> list[_Moved] | None:
    """One product of the sum moved to the other side, None where the identity does not apply.

    Its factor that is a sum of results of products (D1 + D2) gives one product each.
    """
    full = tuple(x for f in term for x in expand(p, f))
    for n, f in enumerate(full):
        m = map_of(p, f.tensor) if isinstance(f, Load) else None
        summed = substitute_map(m, f) if m is not None and isinstance(f, Load) and not m.dtype.rounds else f
        linear = terms(summed, p.dtype_of)
        if linear is None or not any(ld.tensor in known for ld in loads(summed)):
            continue
        rest = full[:n] + full[n + 1 :]
        found = [_one_moved(p, s, t, rest, known) for t in linear]
        done = [m for m in found if m is not None]
        if len(done) == len(found):
            return done
    return None


def _one_moved(p: Program, s: Compute, d: Factors, rest: Factors, known: dict[str, Gemm]) -> _Moved | None:
    for n, f in enumerate(d):
        if isinstance(f, Load) and f.tensor in known and f.index == plain(known[f.tensor].compute.dims):
            found = _exchange(p, s, known[f.tensor], (*d[:n], *d[n + 1 :], *rest), known)
            if found is not None:
                return found
    return None


def _exchange(p: Program, s: Compute, d: Gemm, rest: Factors, known: dict[str, Gemm]) -> _Moved | None:
    over_n = set(s.rdims)
    middle = d.compute.rdims
    if set(middle) & {*s.dims, *s.rdims}:
        return None
    for weight in d.operands:
        a = d.other(weight)
        if not over_n <= dims_used(weight) or dims_used(a) & over_n or not dims_used(a) - set(middle) <= set(s.dims):
            continue
        for y in known.values():
            if set(y.compute.rdims) != over_n or weight not in y.operands:
                continue
            x = y.other(weight)
            left = _without(rest, expand(p, x))
            if left is None or any(dims_used(f) & over_n for f in left) or not dims_used(x) - over_n <= set(s.dims):
                continue
            if not set(y.compute.dims) <= {*s.dims, *middle}:
                continue
            return _Moved((*left, a, Load(y.compute.name, plain(y.compute.dims))), middle)
    return None


def _without(have: Factors, gone: Factors) -> Factors | None:
    """`have` as a multiset less `gone`; None where something of `gone` is missing."""
    count = Counter(gone)
    left = []
    for f in have:
        if count[f]:
            count[f] -= 1
        else:
            left.append(f)
    return None if any(count.values()) else tuple(left)


def _all_moved(p: Program, s: Compute) -> list[_Moved] | None:
    if s.reducer != "sum" or s.dtype.rounds or not s.dtype.is_float:
        return None
    known = gemms(p)
    if s.name in known:
        return None
    moved: list[_Moved] = []
    for term in summands(s.body, p.dtype_of):
        found = _moved(p, s, term, known)
        if found is None:
            return None
        moved += found
    return moved


def matches(p: Program) -> tuple[Match, ...]:
    """Sums whose every term can be moved."""
    return tuple(
        Match("transpose identity", (s.name,), f"{s.name} from the products' results")
        for s in p.body
        if _all_moved(p, s) is not None
    )


def apply(p: Program, match: Match) -> Program:
    """The sum as inner products on the other side; one statement a contracted dim."""
    (name,) = match.at
    s = next(c for c in p.body if c.name == name)
    moved = _all_moved(p, s)
    assert moved is not None
    groups: dict[tuple[str, ...], list[Expr]] = {}
    for m in moved:
        groups.setdefault(m.over, []).append(product(m.body))
    made: list[Compute] = []
    for over, bodies in groups.items():
        part = s.name if len(groups) == 1 else fresh(replace(p, body=(*p.body, *made)), f"{s.name}_p")
        made.append(replace(s, name=part, rdims=over, body=_sum(bodies)))
    if len(groups) > 1:
        made.append(replace(s, reducer=None, rdims=(), body=_sum([Load(c.name, plain(c.dims)) for c in made])))
    return in_order(replace(p, body=(*(c for c in p.body if c.name != name), *made)))


def _sum(items: list[Expr]) -> Expr:
    out = items[0]
    for e in items[1:]:
        out = out + e
    return out


TRANSPOSE = Law(
    "transpose identity", "sum((A W^T) * F) = sum(A * (F W))", "the same sum in another order",
    "CODA 3.2.4, A.2", matches, apply,
)  # fmt: skip
