"""Polynomials of an expression."""

from __future__ import annotations

from collections.abc import Sequence

from tilefold.algebra.expr import Expr, lit


def polynomial(x: Expr, factors: Sequence[float]) -> Expr:
    """The polynomial with these factors in x, the highest power first, by Horner's rule."""
    found: Expr = lit(factors[0])
    for factor in factors[1:]:
        found = found * x + factor
    return found
