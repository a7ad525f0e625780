"""Functions of statistics that are arithmetic: no scalar operation of their own.

    erfcx   exp(x^2) erfc(x), of |x|: (1 + 2 |x|) times it is a polynomial in 1 - 6 / (|x| + 3)
    erfc    1 - erf(x), from 1 / 2 on exp(-x^2) erfcx(x)

exp(x^2) is of the square of a multiple of 1 / 16, which is exact, and of the rest, as fdlibm's: an error of x^2 in its
last place would be one of the result in its first. Of float32 the polynomial ends earlier.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, call, lit
from tilefold.algebra.polynomial import polynomial
from tilefold.frontend.operators.context import Context, Value, attrs, meta_of
from tilefold.frontend.operators.elementwise import Lowerer

aten = torch.ops.aten
#: From there on exp(-x^2) is 0 in any type.
_FAR = 30.0
#: (1 + 2 x) exp(x^2) erfc(x) of q = 1 - 6 / (x + 3), the highest power first.
_ERFCX_SINGLE = (
    -1.1057230027974098e-05,
    3.861849136821459e-06,
    0.00011324623983168478,
    -0.00010413071427970404,
    -0.0007713736760226932,
    0.0018881128646091253,
    0.0025260688678001345,
    -0.023770334675484478,
    0.06830870677166784,
    -0.11927369132068087,
    0.12964509696901552,
    -0.04756229269565379,
    -0.13562110449402126,
    1.2530080582534238,
)
_ERFCX = (
    -3.451497487664328e-11,
    8.393734858690877e-10,
    1.2019719440135793e-09,
    -8.217595058711455e-09,
    -1.3906145791730994e-08,
    4.1064013667940355e-08,
    1.0277997488271058e-07,
    -1.4047654315428462e-07,
    -6.175617678992323e-07,
    3.5576086684080595e-07,
    3.473024167841533e-06,
    -7.308281468783614e-07,
    -2.0100843094844725e-05,
    4.949196649968345e-06,
    0.0001250994355712812,
    -0.00010515971958448065,
    -0.0007798322884823084,
    0.0018886903449991718,
    0.0025293918180474668,
    -0.02377051491717134,
    0.06830802734384515,
    -0.11927366341538638,
    0.12964515870276475,
    -0.0475622943534492,
    -0.1356211061245812,
    1.2530080582697296,
)
#: Of a number, and whether it has 64 bits.
Formula = Callable[[Expr, bool], Expr]


def _exp_of_square(a: Expr, sign: float) -> Expr:
    """exp(sign a^2) of a >= 0."""
    a = call("minimum", a, _FAR)
    near = call("round", a * 16.0) * 0.0625
    return call("exp", near * near * sign) * call("exp", (a - near) * (a + near) * sign)


def _scaled(a: Expr, wide: bool) -> Expr:
    """erfcx of a >= 0."""
    q = lit(1.0) - lit(6.0) / (a + 3.0)
    return polynomial(q, _ERFCX if wide else _ERFCX_SINGLE) / (a * 2.0 + 1.0)


def erfc(x: Expr, wide: bool) -> Expr:
    a = call("maximum", x, 0.5)
    far = _scaled(a, wide) * _exp_of_square(a, -1.0)
    return call("where", call("lt", x, 0.5), lit(1.0) - call("erf", x), far)


def erfcx(x: Expr, wide: bool) -> Expr:
    a = call("abs", x)
    found = _scaled(a, wide)
    return call("where", call("lt", x, 0), _exp_of_square(a, 1.0) * 2.0 - found, found)


def lowering(formula: Formula) -> Lowerer:
    """An operator of one tensor; integers are converted."""

    def lower(ctx: Context, node: torch.fx.Node) -> Value:
        a = attrs(node)["self"]
        (shape, dtype), ct, x = meta_of(node), ctx.compute_dtype([a]), ctx.value(a)
        ct = ct if ct.is_float else DType.F32
        return ctx.map(shape, dtype, lambda i: formula(ctx.operand(x, i, ct), ct is DType.F64))

    return lower


TABLE: dict[torch._ops.OpOverload, Lowerer] = {
    aten.erfc.default: lowering(erfc),
    aten.special_erfcx.default: lowering(erfcx),
}
