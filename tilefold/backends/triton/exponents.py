"""exp of a sum of terms as a power of two: exp(x - m) is exp2(x log2(e) - m log2(e)), one multiply-add an element.

A multiply-add rounds once, so that the element x = m itself comes to log2(e) m less that product rounded: not to 0, but
to what the rounding took. That is one number a row, by which all of its exponentials are off alike, and no quotient of
them is, as long as everything that is compared with them is off by it too. So

- products of what varies less than the elements (m) are rounded, by a multiply-add of nothing that no compiler joins
  with the difference; and where both terms vary alike (a state that is rescaled) both are, so that exp2(m log2(e) -
  m' log2(e)) takes a state to the other rounding;
- where the number is large, exp2 of it overflows: a mask by the least bf16 is off by 2^102, one by -1e10 by 2^9. There
  the terms are multiplied by powers of two instead of log2(e), so that products are exact: differences are 0, or beyond
  what a sum of exponentials has digits for. Only where elements may be so large (`far`): the choice costs a comparison
  and a selection a row and tile (1.3 % of the instructions of causal attention).

That is for kernels of matrix products and for 16 bits. Elsewhere shares are compared with what is not off by it
(a row's largest share is 1 over its sum, a loss the log of its sum), and the factor is larger than what eager rounds:
5e-6 at 45, 2e-6. There exp(k x - m) is computed as it stands, k x rounded, for two instructions more. A row's maximum
is rounded likewise, k max x, so that its own exponential is 1 however large it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilefold.algebra.dtypes import DType
from tilefold.backends.triton.far import COARSE, LOG2E
from tilefold.backends.triton.values import Value, fitted, is_number, number, union


@dataclass(frozen=True, slots=True)
class Term:
    """A multiple of a value. far: its values may be as large as `may_be_far` says."""

    times: float
    value: Value
    far: bool


def exponential(terms: Sequence[Term], kind: DType, frame: Sequence[str], *, exact: bool = False) -> Value:
    """exp of the sum of terms; axes in frame order. exact: elements times a number, less a row's, as they stand."""
    axes = union([t.value for t in terms], frame)
    level = max(t.value.level for t in terms)
    if exact and kind is DType.F32 and len(terms) == 2 and terms[1].times == -1.0:
        (x, m) = terms
        if x.times != 1.0 and len(x.value.axes) > len(m.value.axes):
            product = _rounded(x, Value(number(x.times, kind), (), kind), axes)
            return Value(f"tl.exp({product} - {fitted(m.value, axes)})", axes, kind, level)
    *first, last = sorted(terms, key=lambda t: -1.5 if is_number(t.value.code) else -len(t.value.axes))
    if not first:
        return Value(f"tl.exp2({fitted(last.value, axes)} * {number(last.times * LOG2E, kind)})", axes, kind, level)
    large = any(t.far for t in terms if len(t.value.axes) == len(axes)) and not is_number(last.value.code)
    by = last.value if large and last.times and kind is DType.F32 else None
    near, far = [t.times * LOG2E for t in (*first, last)], _exact_factors((*first, last))
    less = "-" if last.times < 0 else ""  # of the product: its factor is then the one of what it is subtracted from
    near[-1], far[-1] = abs(near[-1]), abs(far[-1])
    factors = [_factor(by, abs(near[-1]), *pair) for pair in zip(near, far, strict=True)]
    over = last.value.axes
    shift = fitted(Value(f"({less}{_rounded(last, factors.pop(), over)})", over, kind), axes)
    if len(first) == 1 and len(over) < len(axes):
        return Value(f"tl.exp2({_added(first[0], factors[0], axes, shift)})", axes, kind, level)
    code = _rounded(first[0], factors[0], axes)
    for t, factor in zip(first[1:], factors[1:], strict=True):
        code = _added(t, factor, axes, code)
    return Value(f"tl.exp2({code} + {shift})", axes, kind, level)


def _exact_factors(terms: Sequence[Term]) -> list[float]:
    """Factors in place of multiples of log2(e) whose products are exact: if all terms are multiples by one number, a
    power of two; else the multiples themselves."""
    sizes = {abs(t.times) for t in terms}
    power = min(1.0, 2.0 ** math.ceil(math.log2(max(sizes) or 1.0)))
    return [math.copysign(power, t.times) if len(sizes) == 1 else t.times for t in terms]


def _factor(by: Value | None, most: float, near: float, far: float) -> Value:
    """`near`, or `far` where `by` times `most` is too coarse."""
    if by is None:
        return Value(number(near, DType.F32), (), DType.F32)
    limit = number(COARSE / most, DType.F32)
    choice = f"tl.where(tl.abs({by.code}) > {limit}, {number(far, DType.F32)}, {number(near, DType.F32)})"
    return Value(choice, by.axes, DType.F32, by.level)


def _rounded(t: Term, factor: Value, over: Sequence[str]) -> str:
    """The product, rounded whatever it is added to."""
    if is_number(t.value.code):
        return f"({t.value.code} * {fitted(factor, over)})"
    return f"tl.fma({fitted(t.value, over)}, {fitted(factor, over)}, 0.0)"


def _added(t: Term, factor: Value, over: Sequence[str], to: str) -> str:
    """The product and `to`, rounded once."""
    return f"tl.fma({fitted(t.value, over)}, {fitted(factor, over)}, {to})"
