"""Inverse functions, and others that are arithmetic: no scalar operation of their own.

    atan    of |x| > tan(3 pi / 8), or > 0.66: of -1 / x, or of (x - 1) / (x + 1), beside a constant; the rest is a
            quotient of polynomials (Moshier's Cephes), right to the last places of f64 and so of f32
    asin, acos, atan2    are of atan: the quotient's zeros and infinities are what the formulas need them to be
    asinh, acosh, atanh  are logarithms of what is added to 1, which small arguments keep their places in

Signs of zeros are kept, as eager keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilefold.algebra.expr import Expr, call, lit

#: From where atan is of another argument.
_TAN_PI_8, _TAN_3_PI_8 = 0.66, 2.41421356237309504880
#: (atan(x) / x - 1) / x^2 is a quotient of these in x^2, the highest power first.
_ABOVE = (-0.8750608600031904, -16.15753718733365, -75.00855792314705, -122.88666844901361, -64.85021904942025)
_BELOW = (1.0, 24.858464901423063, 165.02700983169885, 432.88106049129027, 485.3903996359137, 194.5506571482614)
#: Squares of larger numbers do not matter beside 1, nor may they overflow.
_LARGE = 1e8


def _polynomial(x: Expr, factors: Sequence[float]) -> Expr:
    found: Expr = lit(factors[0])
    for factor in factors[1:]:
        found = found * x + factor
    return found


def _negative(x: Expr) -> Expr:
    """Whether x < 0, or the zero that is below."""
    return call("or", call("lt", x, 0), call("and", call("eq", x, 0), call("lt", lit(1.0) / x, 0)))


def _odd(x: Expr, of_magnitude: Expr) -> Expr:
    """An odd function, from its value at |x|."""
    return call("where", call("eq", x, 0), x, call("where", call("lt", x, 0), -of_magnitude, of_magnitude))


def atan(x: Expr) -> Expr:
    a, sign = call("abs", x), call("where", call("lt", x, 0), -1.0, 1.0)
    far, beyond = call("gt", a, _TAN_3_PI_8), call("gt", a, _TAN_PI_8)
    above = call("where", far, -sign, call("where", beyond, x - sign, x))
    below = call("where", far, a, call("where", beyond, a + 1.0, 1.0))
    t = above / below
    z = t * t
    near = t * (z * _polynomial(z, _ABOVE) / _polynomial(z, _BELOW) + 1.0)
    return call("where", beyond, near + sign * call("where", far, math.pi / 2, math.pi / 4), near)


def atan2(y: Expr, x: Expr) -> Expr:
    a, b = call("abs", y), call("abs", x)
    same = call("or", call("and", call("isinf", a), call("isinf", b)), call("and", call("eq", a, 0), call("eq", b, 0)))
    quotient = call("where", same, call("minimum", a, 1.0), a / b)
    right = atan(quotient)
    whole = call("where", _negative(x), lit(math.pi) - right, right)
    return call("where", _negative(y), -whole, whole)


def asin(x: Expr) -> Expr:
    return atan(x / call("sqrt", (lit(1.0) - x) * (x + 1.0)))


def acos(x: Expr) -> Expr:
    return atan(call("sqrt", (lit(1.0) - x) / (x + 1.0))) * 2.0


def asinh(x: Expr) -> Expr:
    a = call("abs", x)
    root = call("sqrt", a * a + 1.0)
    near = call("log1p", a + a * a / (root + 1.0))
    return _odd(x, call("where", call("gt", a, _LARGE), call("log", a) + math.log(2), near))


def acosh(x: Expr) -> Expr:
    t = x - 1.0
    near = call("log1p", t + call("sqrt", t * (t + 2.0)))
    return call("where", call("gt", x, _LARGE), call("log", x) + math.log(2), near)


def atanh(x: Expr) -> Expr:
    return (call("log1p", x) - call("log1p", -x)) * 0.5


def hypot(x: Expr, y: Expr) -> Expr:
    """sqrt(x^2 + y^2), of squares that do not overflow."""
    a, b = call("abs", x), call("abs", y)
    most, least = call("maximum", a, b), call("minimum", a, b)
    part = least / most
    found = call("where", call("eq", most, 0), most, most * call("sqrt", part * part + 1.0))
    return call("where", call("or", call("isinf", a), call("isinf", b)), math.inf, found)


def fmax(x: Expr, y: Expr) -> Expr:
    """The greater number: NaN where neither is one."""
    return _number(x, y, call("maximum", x, y))


def fmin(x: Expr, y: Expr) -> Expr:
    """The less number: NaN where neither is one."""
    return _number(x, y, call("minimum", x, y))


def _number(x: Expr, y: Expr, of_two: Expr) -> Expr:
    return call("where", call("isnan", x), y, call("where", call("isnan", y), x, of_two))


#: By the names that ATen has for them.
UNARY = {"atan": atan, "asin": asin, "acos": acos, "asinh": asinh, "acosh": acosh, "atanh": atanh}
BINARY = {"atan2": atan2, "hypot": hypot, "fmax": fmax, "fmin": fmin}
