"""The digamma function as arithmetic: the derivative of log gamma (Abramowitz and Stegun, 6.3).

    psi(x) = psi(x + n) - sum over k < n of 1 / (x + k)              6.3.6
    psi(x) = psi(1 - x) - pi / tan(pi x)                             6.3.7, of x < 0
    psi(x) = log x - 1 / 2x - sum over k of B_2k / (2k x^2k)         6.3.18, from x = SHIFT

At zero it is infinite with the sign of -x, and of negative whole numbers not defined, as PyTorch has it.
"""

from __future__ import annotations

import math

from tilefold.algebra.expr import Expr, call, lit
from tilefold.algebra.polynomial import polynomial

#: What small arguments are moved up by.
SHIFT = 6
#: B_2k / 2k of the series, the highest power first: the next is 2e-15 of the value from SHIFT on.
_SERIES = (
    -174611 / 6600,
    43867 / 14364,
    -3617 / 8160,
    1 / 12,
    -691 / 32760,
    1 / 132,
    -1 / 240,
    1 / 252,
    -1 / 120,
    1 / 12,
)


def digamma(x: Expr) -> Expr:
    """psi(x), in the type of x: the error is that of the additions, of the largest of them."""
    below = call("lt", x, 0)
    y = call("where", below, lit(1.0) - x, x)
    small = call("lt", y, float(SHIFT))
    moved: Expr = lit(1.0) / y
    for k in range(1, SHIFT):
        moved = moved + lit(1.0) / (y + float(k))
    far = call("where", small, y + float(SHIFT), y)
    z = lit(1.0) / (far * far)
    value = call("log", far) - lit(0.5) / far - polynomial(z, _SERIES) * z - call("where", small, moved, 0.0)
    angle = (x - call("round", x)) * math.pi
    mirrored = value - call("cos", angle) / call("sin", angle) * math.pi
    undefined = call("eq", x, call("trunc", x))
    return call("where", below, call("where", undefined, math.nan, mirrored), value)
