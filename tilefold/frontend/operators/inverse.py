"""Inverse functions, and others that are arithmetic: no scalar operation of their own.

    atan    of |x| > tan(3 pi / 8), or > 0.66: of -1 / x, or of (x - 1) / (x + 1), beside a constant; the rest is a
            quotient of polynomials (Moshier's Cephes), right to the last places of f64 and so of f32
    atan2   is of atan: the quotient's zeros and infinities are what the formula needs them to be
    asin, acos    of |x| > 1/2: of the root of (1 - |x|) / 2, twice, beside a constant; the rest is such a quotient too
    asinh, acosh, atanh  are logarithms of what is added to 1, which small arguments keep their places in

Signs of zeros are kept, as eager keeps them.
"""

from __future__ import annotations

import math

from tilefold.algebra.expr import Expr, call, lit
from tilefold.algebra.polynomial import polynomial

#: From where atan is of another argument.
_TAN_PI_8, _TAN_3_PI_8 = 0.66, 2.41421356237309504880
#: (atan(x) / x - 1) / x^2 is a quotient of these in x^2, the highest power first.
_ABOVE = (-0.8750608600031904, -16.15753718733365, -75.00855792314705, -122.88666844901361, -64.85021904942025)
_BELOW = (1.0, 24.858464901423063, 165.02700983169885, 432.88106049129027, 485.3903996359137, 194.5506571482614)
#: (asin(x) / x - 1) / x^2 likewise, for |x| <= 1/2.
_ARC_ABOVE = (
    4.253011369004428248960e-3,
    -6.019598008014123785661e-1,
    5.444622390564711410273,
    -16.26247967210700244449,
    19.56261983317594739197,
    -8.198089802484824371615,
)
_ARC_BELOW = (
    1.0,
    -14.74091372988853791896,
    70.49610280856842141659,
    -147.1791292232726029859,
    139.5105614657485689735,
    -49.18853881490881290097,
)
#: Squares of larger numbers do not matter beside 1, nor may they overflow.
_LARGE = 1e8


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
    near = t * (z * polynomial(z, _ABOVE) / polynomial(z, _BELOW) + 1.0)
    return call("where", beyond, near + sign * call("where", far, math.pi / 2, math.pi / 4), near)


def atan2(y: Expr, x: Expr) -> Expr:
    a, b = call("abs", y), call("abs", x)
    same = call("or", call("and", call("isinf", a), call("isinf", b)), call("and", call("eq", a, 0), call("eq", b, 0)))
    quotient = call("where", same, call("minimum", a, 1.0), a / b)
    right = atan(quotient)
    whole = call("where", _negative(x), lit(math.pi) - right, right)
    return call("where", _negative(y), -whole, whole)


def _arc(x: Expr) -> tuple[Expr, Expr]:
    """Whether |x| > 1/2, and asin of x, or else of the root of (1 - |x|) / 2: one quotient and one root for both."""
    a = call("abs", x)
    steep = call("gt", a, 0.5)
    z = call("where", steep, (lit(1.0) - a) * 0.5, x * x)
    t = call("where", steep, call("sqrt", z), x)
    return steep, t + t * (z * polynomial(z, _ARC_ABOVE) / polynomial(z, _ARC_BELOW))


def asin(x: Expr) -> Expr:
    steep, near = _arc(x)
    far = lit(math.pi / 2) - near * 2.0
    return call("where", steep, call("where", call("lt", x, 0), -far, far), near)


def acos(x: Expr) -> Expr:
    steep, near = _arc(x)
    far = near * 2.0
    return call("where", steep, call("where", call("lt", x, 0), lit(math.pi) - far, far), lit(math.pi / 2) - near)


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
